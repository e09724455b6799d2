"""`hisparse bench indexer` from a checkout; --help says what it measures."""

import sys

from hisparse.cli import main

if __name__ == "__main__":
    main(["bench", "indexer", *sys.argv[1:]])
