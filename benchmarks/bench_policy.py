"""`hisparse bench policy` from a checkout; --help says what it measures."""

import sys

from hisparse.bench.policy import main

if __name__ == "__main__":
    sys.exit(main())
