"""Where the ``siamesenorm`` command and ``python -m siamesenorm`` start."""

import sys

from siamesenorm.loading import loading


def run() -> int:
    """Load the command line and run it."""
    with loading():
        from siamesenorm.cli import main
    return main()


if __name__ == "__main__":
    sys.exit(run())
