"""``python -m vflsec`` is ``vflsec``."""

import sys


def main() -> None:
    """Run the command line, in which no file of the current folder, or of that of scripts, takes a package's place."""
    if not sys.flags.safe_path:
        del sys.path[0]
    from vflsec import cli

    cli.main()


if __name__ == "__main__":
    main()
