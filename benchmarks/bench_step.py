"""`hisparse bench step` from a checkout; --help says what it measures."""

import sys

from hisparse.cli import main

if __name__ == "__main__":
    main(["bench", "step", *sys.argv[1:]])
