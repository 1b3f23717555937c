"""kill -9 at any moment: what was finished is kept, and the end is the same to the byte."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from siamesenorm.data import DataError, open_tokens, prepare
from siamesenorm.data.workers import Progress

from .folders import contents, write_sources
from .interrupted import OPTIONS

SCRIPT = Path(__file__).with_name("interrupted.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    sources = write_sources(root / "sources")
    prepare(sources, root / "out", workers=1, **OPTIONS)
    return sources, contents(root / "out")


def kill(out, workers, counted, limit, sources):
    """Run until it has killed itself; its output ends when its workers have ended too."""
    command = [sys.executable, str(SCRIPT), str(out), str(workers), counted, str(limit), *sources]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout.decode()


class Kept(Progress):
    count = 0

    def begin(self, total, todo, kept):
        self.count = kept


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_a_write_and_again(tmp_path, whole, seed):
    sources, expected = whole
    chance = random.Random(seed)
    kill(tmp_path / "out", 1, "write", chance.randrange(1, 60), sources)
    kill(tmp_path / "out", 1, "write", chance.randrange(1, 60), sources)
    with pytest.raises(DataError, match=r"is unfinished"):
        open_tokens(tmp_path / "out")
    prepare(sources, tmp_path / "out", workers=1, **OPTIONS)
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("seed", range(2))
def test_killed_with_workers_which_end_too(tmp_path, whole, seed):
    sources, expected = whole
    limit = random.Random(seed).randrange(1, 8)
    kill(tmp_path / "out", 2, "chunk", limit, sources)
    kept = Kept()
    prepare(sources, tmp_path / "out", workers=1, progress=kept, **OPTIONS)
    assert kept.count >= limit
    assert contents(tmp_path / "out") == expected
