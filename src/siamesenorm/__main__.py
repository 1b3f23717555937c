"""``python -m siamesenorm``: the same as the ``siamesenorm`` command."""

import sys

from siamesenorm.cli import main

sys.exit(main())
