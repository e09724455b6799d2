"""`hisparse bench attention` from a checkout; --help says what it measures."""

import sys

from hisparse.bench.attention import main

if __name__ == "__main__":
    sys.exit(main())
