"""``python -m vflsec`` is ``vflsec``."""

from vflsec.cli import main

main()
