"""Text that every machine with Python has: the standard library's code and the language's documentation.

for name, text in python_code(): ...
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.data.documents import Document, Piece, Reading, Source, pieces_by_size
from siamesenorm.errors import DataError

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
"""Folders that are no library code, or that the documentation corpus holds."""

MACHINE_MADE = ("_sysconfigdata", "config-")
"""Starts of names that the build of this very Python wrote."""


@functools.lru_cache(maxsize=1)
def python_code() -> tuple[tuple[str, str], ...]:
    """Name and text of every module of the standard library, without its tests, in the order of their names."""
    root = sysconfig.get_paths()["stdlib"]
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in LEFT_OUT and not name.startswith(MACHINE_MADE)]
        for file in files:
            if file.endswith(".py") and not file.startswith(MACHINE_MADE):
                path = Path(folder, file)
                found.append((path.relative_to(root).as_posix(), path))
    texts = []
    for name, path in sorted(found):
        text = _source_text(path)
        if text.strip():
            texts.append((name, text))
    if not texts:
        raise DataError("source: 'python-code' is empty, because this Python keeps no source of its standard library")
    return tuple(texts)


def _source_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
            return file.read()  # another encoding, which the file names itself
    except OSError:
        pass
    return ""


@functools.lru_cache(maxsize=1)
def python_documentation() -> tuple[tuple[str, str], ...]:
    """Name and text of every documentation topic that ``help()`` knows, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("source: 'python-docs' is missing, because this Python has no pydoc_data.topics") from None
    return tuple(sorted((str(name), str(text)) for name, text in topics.items()))


@dataclass(frozen=True)
class PythonCorpus(Source):
    """``python-code`` or ``python-docs``: a document is a module or a topic, and what is held out is held out whole."""

    name: str
    kind = "embedded"

    def texts(self) -> tuple[tuple[str, str], ...]:
        """Name and text of the documents."""
        return python_code() if self.name == "python-code" else python_documentation()

    def size(self) -> int:
        """Bytes of UTF-8 text."""
        return sum(self._sizes())

    def sha256(self) -> str:
        """Of all names and texts."""
        digest = hashlib.sha256()
        for name, text in self.texts():
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()

    def pieces(self, target: int, reading: Reading) -> list[Piece]:
        """Runs of documents."""
        return pieces_by_size(self._sizes(), target)

    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The documents of a run."""
        for name, text in self.texts()[piece.start : piece.stop]:
            yield Document(text, name)

    def _sizes(self) -> list[int]:
        return [len(text.encode()) for _, text in self.texts()]
