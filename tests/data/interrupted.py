"""A preparation that kills itself, as ``kill -9`` would, at a chosen moment: run by `test_interrupted`.

Arguments: folder to write, workers, what is counted (``write`` for flushes and renames, ``chunk`` for finished
chunks), at which count to die, then the sources.
"""

import os
import signal
import sys
from pathlib import Path

from siamesenorm.data.preparation import prepare
from siamesenorm.data.workers import Progress

OPTIONS = {"shard_bytes": 3000, "validation": 0.3, "seed": 2}


class Deadly:
    """Counts, and dies at the count."""

    def __init__(self, limit):
        self.left = limit

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyProgress(Progress):
    def __init__(self, step):
        self.step = step

    def chunk(self, record):
        self.step()


def main(out, workers, counted, limit, *sources):
    step = Deadly(int(limit))
    if counted == "write":
        for name in ("fsync", "replace"):
            real = getattr(os, name)

            def deadly(*args, real=real):
                step()
                real(*args)

            setattr(os, name, deadly)
    progress = DeadlyProgress(step) if counted == "chunk" else None
    prepare(sources, Path(out), workers=int(workers), progress=progress, **OPTIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
