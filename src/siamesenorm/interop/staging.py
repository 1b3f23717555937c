"""Folders that are whole or absent: written beside their place, then renamed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end, or vanishes with an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        folder.chmod(0o755)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
