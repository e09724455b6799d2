"""`hisparse bench policy` from a checkout; --help says what it measures."""

import sys

from hisparse.cli import main

if __name__ == "__main__":
    main(["bench", "policy", *sys.argv[1:]])
