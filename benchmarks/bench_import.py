"""`hisparse bench import` from a checkout; --help says what it measures."""

import sys

from hisparse.bench.pd_import import main

if __name__ == "__main__":
    sys.exit(main())
