"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from siamesenorm.data.errors import DataError

PARTIAL = ".partial"
"""How the name of a file ends while it is being written."""

BLOCK = 1 << 20


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when the block ends without an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def remove_partial(folder: Path) -> None:
    """Remove what a killed writer left behind."""
    for partial in folder.glob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read block by block."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_matches(path: Path, expected: str, size: int | None = None) -> bool:
    """Whether a file is there with the expected size, if given, and SHA-256."""
    try:
        if size is not None and path.stat().st_size != size:
            return False
        return sha256_of(path) == expected
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked_folder(folder: Path, work: str = "out: another preparation") -> Iterator[None]:
    """Keep a second piece of work out of a folder; the lock goes with the process, however it ends.

    work: how the sentence begins that the second one is refused with.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{work} is at work in {str(folder)!r}; wait for it or stop it") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
