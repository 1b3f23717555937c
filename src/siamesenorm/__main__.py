"""Where the ``siamesenorm`` command and ``python -m siamesenorm`` start."""

import sys

from siamesenorm.interrupts import Interrupts, loading


def run() -> int:
    """Load the command line and run it."""
    interrupts = Interrupts()
    interrupts.install()
    with loading():
        from siamesenorm.cli import main
    code = main()
    interrupts.ending(code)
    return code


if __name__ == "__main__":
    sys.exit(run())
