"""`hisparse bench copy` from a checkout; --help says what it measures."""

import sys

from hisparse.cli import main

if __name__ == "__main__":
    main(["bench", "copy", *sys.argv[1:]])
