"""`python -m hisparse.cli` is `hisparse`."""

from hisparse.cli import main

main()
