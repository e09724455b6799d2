"""`hisparse bench serve` from a checkout; --help says what it measures."""

import sys

from hisparse.cli import main

if __name__ == "__main__":
    main(["bench", "serve", *sys.argv[1:]])
