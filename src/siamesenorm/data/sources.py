"""From what a user names to sources: files, folders, embedded corpora, Hugging Face datasets."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from siamesenorm.data.arithmetic import Arithmetic, ArithmeticCorpus
from siamesenorm.data.columns import HubDataset, ParquetFile
from siamesenorm.data.documents import SPLITS, Document, Reading, Source
from siamesenorm.data.files import JsonLinesFile, TextFile
from siamesenorm.data.held_out import split_document
from siamesenorm.data.listing import walk
from siamesenorm.data.reading import named_path
from siamesenorm.data.stdlib import PythonCorpus
from siamesenorm.errors import DataError

HUB = "hf:"
EMBEDDED = ("python-code", "python-docs", "arithmetic")
FORMATS: dict[str, Callable[[str, Path], Source]] = {
    "text": TextFile,
    "jsonl": JsonLinesFile,
    "parquet": ParquetFile,
}
ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Formats by the end of a file's name, ``.gz`` taken off; every other file is text."""

UNREADABLE = (".zst", ".xz", ".bz2", ".zip", ".tar", ".7z", ".npy", ".npz", ".safetensors", ".pt", ".bin", ".pdf")


def find_sources(
    names: Sequence[str | Path],
    *,
    format: str = "auto",
    pattern: str | None = None,
    subset: str | None = None,
    hub_split: str = "train",
    seed: int = 0,
) -> list[Source]:
    """The sources of names, in the order of the names; a folder's files come in the order of their paths.

    A name is a file, a folder, an embedded corpus (python-code, python-docs, arithmetic, or arithmetic:digits=2),
    or ``hf:NAME`` for a Hugging Face dataset.
    """
    if format != "auto" and format not in FORMATS:
        raise DataError.not_allowed("format", format, f"auto, {', '.join(FORMATS)}")
    if not names:
        raise DataError("sources: none given; name a file, a folder, an embedded corpus or hf:NAME")
    found: list[Source] = []
    for name in map(str, names):
        path = named_path(name, "source")
        if name.startswith(HUB):
            found.append(HubDataset(name, name.removeprefix(HUB), subset, hub_split))
        elif path.is_dir():
            found += _folder(path, format, pattern)
        elif path.exists():
            found.append(_file(path, path.name, format))
        elif name.partition(":")[0] in EMBEDDED:
            found.append(_embedded(name, seed))
        else:
            raise DataError(
                f"source: {name!r} is neither a file nor a folder nor one of {', '.join(EMBEDDED)}; "
                f"a Hugging Face dataset is named {HUB}NAME"
            )
    return found


def embedded_documents(name: str, split: str, *, seed: int = 0, validation: float = 0.05) -> Iterator[str]:
    """The texts of an embedded corpus in one split, with no file written."""
    if name.partition(":")[0] not in EMBEDDED:
        raise DataError.unknown("corpus", name, EMBEDDED)
    if split not in SPLITS:
        raise DataError.not_allowed("split", split, ", ".join(SPLITS))
    source = _embedded(name, seed)
    if isinstance(source, ArithmeticCorpus):
        return source.settings.documents(split)
    documents = read_documents([source], Reading(seed=seed, validation=validation))
    return (document.text for document in documents if document.split == split)


def read_documents(sources: Iterable[Source], reading: Reading) -> Iterator[Document]:
    """Every document of sources with its split, in order, in this process."""
    skipped = Counter[str]()
    for source in sources:
        for piece in source.pieces(1 << 40, reading):
            for document in source.read(piece, reading, skipped):
                yield from split_document(document, reading)


def _embedded(name: str, seed: int) -> Source:
    base, colon, options = name.partition(":")
    if base == "arithmetic":
        return ArithmeticCorpus(name, Arithmetic.parse(options, seed))
    if colon:
        raise DataError.refused("source", name, f"{base} has no options")
    return PythonCorpus(base)


def _folder(root: Path, format: str, pattern: str | None) -> list[Source]:
    found: list[tuple[str, Path]] = []
    for folder, inner, files in walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            if not file.startswith(".") and (pattern is None or fnmatch.fnmatch(name, pattern)):
                found.append((name, path))
    if not found:
        what = f"no file that matches pattern = {pattern!r}" if pattern else "no file"
        raise DataError(f"source: folder {str(root)!r} holds {what}")
    return [_file(path, f"{root.resolve().name}/{name}", format) for name, path in sorted(found)]


def _file(path: Path, name: str, format: str) -> Source:
    if not path.is_file():
        raise DataError(f"source: {str(path)!r} is neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise DataError(f"source: {str(path)!r} cannot be read: permission denied")
    ending = Path(path.name.removesuffix(".gz")).suffix.lower()
    if format == "auto":
        if ending in UNREADABLE:
            raise DataError(
                f"source: {str(path)!r} ends in {ending}, which is not read; "
                f"allowed are text, .jsonl (both also .gz) and .parquet; a folder takes a pattern such as '*.txt'"
            )
        format = ENDINGS.get(ending, "text")
    return FORMATS[format](name, path)
