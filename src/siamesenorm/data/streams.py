"""Streams: outputs that are no files to be replaced, such as /dev/stdout, /dev/null, a FIFO, or ``>(command)``."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from pathlib import Path

LINKS = 40
"""Links followed in a row, as the system does."""


def is_stream(path: Path) -> bool:
    """Whether a name stands for a pipe, a character device or a file that some process has open already.

    What can be neither written to nor replaced, such as a disk or a folder, raises `OSError`.
    """
    found = open_file(path)
    if found is not None:
        os.stat(found)
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return not stat.S_ISREG(mode)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a block device" if stat.S_ISBLK(mode) else "a socket"
    raise OSError(errno.EINVAL, f"it is {kind}; it takes a file, a pipe or a character device", str(path))


def write_stream(path: Path, content: bytes) -> None:
    """Write to a stream, behind what it was given before; a FIFO waits for its reader."""
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what was said before stands before it
            output.flush()
    found = open_file(path)
    if found is not None and int(found.split("/")[2]) == os.getpid():
        opened = os.dup(int(os.path.basename(found)))  # opened by its name, a file would be written from its beginning
    else:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
    with open(opened, "wb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]


def open_file(path: Path) -> str | None:
    """The entry among a process's open files that a name stands for: /proc/4321/fd/1 for /dev/stdout, on Linux."""
    name = os.path.abspath(path)
    for _ in range(LINKS):
        folder, last = os.path.realpath(os.path.dirname(name)), os.path.basename(name)
        if last.isdecimal() and re.fullmatch(r"/proc/\d+/(task/\d+/)?fd", folder):
            return os.path.join(folder, last)
        if not os.path.islink(name):
            return None
        name = os.path.join(folder, os.readlink(name))
    return None
