"""`hisparse bench resolver` from a checkout; --help says what it measures."""

import sys

from hisparse.bench.resolver import main

if __name__ == "__main__":
    sys.exit(main())
