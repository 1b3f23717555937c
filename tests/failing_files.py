"""File operations of which one fails, and a yard of other people's files around them that nobody may touch."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "scandir", "listdir", "fsync", "chmod")
"""Functions of `os`; opening and writing of Python's own files are counted too."""


WRITING = re.compile(r"open .*[wxa].*|write [^r].*|mkdir")
"""What a full disk refuses; where a file lies already it may be written over."""


class Failing:
    """Counts the operations on files below a folder; the one with the number `at` raises what `code` says."""

    def __init__(self, root: Path, at: int | None, code: int, only: str | None) -> None:
        self.root, self.at, self.code, self.only, self.count = os.path.realpath(root), at, code, only, 0
        self.failed: str | None = None
        self.full = False

    def touch(self, operation: str, target: Any) -> None:
        """One more operation, if it is on a file of ours."""
        if isinstance(target, int):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{target}")
        if isinstance(target, int) or not os.path.abspath(os.fspath(target)).startswith(self.root):
            return
        self.count += self.only in (None, operation)
        if self.count == self.at or (self.full and WRITING.fullmatch(operation)):
            self.failed = f"{operation} {target}"
            raise OSError(self.code, os.strerror(self.code), str(target))


@contextlib.contextmanager
def failing(root: Path, at: int | None = None, code: int = errno.ENOSPC, only: str | None = None) -> Iterator[Failing]:
    """The file operations of this process, counted below `root`, for as long as the block lasts."""
    state, plain_open = Failing(root, at, code, only), io.open
    plain = {name: getattr(os, name) for name in OPERATIONS}

    class Raw(io.FileIO):
        def write(self, content: Any) -> int:
            state.touch(f"write {self.mode}", self.name)
            return super().write(content)

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if isinstance(file, int):
            return plain_open(file, mode, buffering, *args, **options)
        state.touch(f"open {mode}", file)
        if not set(mode) & set("wax+"):
            return plain_open(file, mode, buffering, *args, **options)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, *args, **options)
        text.mode = mode  # type: ignore[misc]
        return text

    def counted(name: str) -> Callable[..., Any]:
        def call(target: Any = ".", *args: Any, **options: Any) -> Any:
            state.touch(name, target)
            return None if name == "fsync" else plain[name](target, *args, **options)  # nobody pulls the plug here

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(name))
    builtins.open = io.open = opened
    try:
        yield state
    finally:
        builtins.open = io.open = plain_open
        for name, function in plain.items():
            setattr(os, name, function)


def yard(root: Path) -> Path:
    """A folder to work in with files that are somebody else's, in it and around it."""
    work = root / "work"
    for name in (".git/config", "notes.txt", "checkpoints/mine.pt", "step-00000001/mine", ".x.00000000.partial"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(f"mine: {name}")
    (root / "above.txt").write_text("mine: above")
    return work


def contents(root: Path, leave_out: Path | None = None) -> dict[str, bytes]:
    """Every file below a folder with its bytes, but for those below another."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in (Path(folder) / name for name in names):
            if leave_out is None or leave_out not in (path, *path.parents):
                link = os.readlink(path).encode() if path.is_symlink() else None
                found[path.relative_to(root).as_posix()] = link or path.read_bytes()
    return found
