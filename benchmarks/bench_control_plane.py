"""`hisparse bench control-plane` from a checkout; --help says what it measures."""

import sys

from hisparse.bench.scheduling import main

if __name__ == "__main__":
    sys.exit(main())
