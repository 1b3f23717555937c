"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from siamesenorm.data.removal import PARTIAL, check_removable, hidden_name, remove_file
from siamesenorm.data.replacement import replace_file
from siamesenorm.data.streams import is_stream, write_stream
from siamesenorm.errors import DataError

BLOCK = 1 << 20


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when the block ends without an error.

    Links are followed. A pipe, a terminal or another stream is written to when the block has ended; see `is_stream`.
    """
    if is_stream(path):
        content = io.BytesIO()
        yield content
        with named(path):
            write_stream(path, content.getvalue())
        return
    place = Path(os.path.realpath(path))
    partial = place.with_name(hidden_name(place.name, PARTIAL))
    with named(path, partial):
        opened = open(partial, "xb")  # noqa: SIM115  # what could not be made is not removed either
        try:
            with opened as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            replace_file(partial, place)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_file(partial)
            raise
        sync_folder(place.parent)


@contextlib.contextmanager
def named(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Let errors name the file that was asked for: a full disk names none, others the one beside it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all; text as UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write texts by name into a folder, each whole or not at all; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def check_output(path: Path, field: str) -> None:
    """Raise unless a file can be written there: asked before long work, whose result would be lost."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise DataError.not_allowed(field, str(path), "a file in a folder that is there")
    try:
        if not is_stream(path):
            place = Path(os.path.realpath(path))
            check_removable(place)
            attempt = place.with_name(hidden_name(place.name, PARTIAL))
            open(attempt, "xb").close()
            remove_file(attempt)
    except OSError as error:
        raise DataError.failed(field, path, "written", error) from None


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


def locked_folder(folder: Path, work: str = "out: another preparation") -> contextlib.AbstractContextManager[None]:
    """Keep a second piece of work out of a folder; work: how the sentence begins that it is refused with."""
    return locked(folder, os.O_RDONLY, DataError(f"{work} is at work in {str(folder)!r}; wait for it or stop it"))


@contextlib.contextmanager
def locked(path: Path, flags: int, refusal: Exception) -> Iterator[None]:
    """Hold the lock of a file or folder, or raise; the lock goes with the process, however it ends."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(path, flags, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
