"""`python -m weightgrad`."""

from weightgrad.cli import main

main()
