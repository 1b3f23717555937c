"""``index.json``: what a folder of token shards holds, checked when it is read.

index = read_index("corpus")
index.splits["train"].tokens
verify("corpus")                       # the names of damaged files; none is good
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from siamesenorm.data.atomic import sha256_matches, write_json
from siamesenorm.data.documents import Invalid, Unit
from siamesenorm.data.reading import MissingError, read_model
from siamesenorm.errors import DataError

INDEX = "index.json"
PROGRESS = ".progress"
"""Folder of an unfinished preparation's records."""


def _plain_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError("must be the name of a file in the same folder")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]


class IndexPart(BaseModel):
    """A part of the index; nothing unknown is taken silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Shard(IndexPart):
    """One token file and its document boundaries (``start,end,id,source,place`` a line, gzipped)."""

    file: FileName
    tokens: Count
    documents: Count
    text_bytes: Count
    sha256: Hash
    boundaries: FileName
    boundaries_sha256: Hash


class SplitEntry(IndexPart):
    """The shards of a split in order, with their sums."""

    tokens: Count
    documents: Count
    text_bytes: Count
    shards: list[Shard]


class SourceEntry(IndexPart):
    """What was read."""

    name: str
    kind: str
    bytes: Count
    sha256: Hash


class TokenizerEntry(IndexPart):
    """What made the tokens; the file lies in the same folder."""

    file: FileName
    sha256: Hash
    fingerprint: Hash
    vocab_size: Annotated[int, Field(ge=1)]
    eos_id: Count
    eos_token: str


class Settings(IndexPart):
    """What decides the shards, besides the sources and the tokenizer."""

    seed: int = 0
    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    field: Annotated[str, Field(min_length=1)] = "text"
    unit: Unit = "file"
    invalid: Invalid = "error"
    shard_bytes: Annotated[int, Field(ge=1)] | None = None


FORMAT = "siamesenorm-tokens"


class IndexedFile(NamedTuple):
    """A file beside an index, with its size in bytes where the index says it."""

    name: str
    sha256: str
    size: int | None = None


class Index(IndexPart):
    """Everything about a prepared folder."""

    format: Literal["siamesenorm-tokens"] = "siamesenorm-tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    plan: Hash
    settings: Settings
    tokenizer: TokenizerEntry
    sources: list[SourceEntry]
    skipped: dict[str, Count]
    splits: dict[Literal["train", "validation"], SplitEntry]

    def files(self) -> Iterator[IndexedFile]:
        """Every file beside the index."""
        yield IndexedFile(self.tokenizer.file, self.tokenizer.sha256)
        for split in self.splits.values():
            for shard in split.shards:
                yield IndexedFile(shard.file, shard.sha256, shard.tokens * np.dtype(self.dtype).itemsize)
                yield IndexedFile(shard.boundaries, shard.boundaries_sha256)


def check_settings(**values: object) -> Settings:
    """Settings, or one sentence about the first value that is not allowed."""
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"][0].lower() + first["msg"][1:]
        raise DataError.refused(str(first["loc"][0]), first["input"], message) from None


def read_index(folder: str | Path) -> Index:
    """The index of a prepared folder."""
    path = Path(folder) / INDEX
    try:
        return read_model(path, Index, "data")
    except MissingError:
        if (path.parent / PROGRESS).is_dir():
            raise DataError(f"data: {str(folder)!r} is unfinished; run the same preparation again to go on") from None
        if path.parent.is_file():
            raise DataError(f"data: {str(folder)!r} is a file; name the folder that holds {INDEX}") from None
        raise DataError(f"data: {str(folder)!r} is not a prepared folder; it has no {INDEX}") from None


def holds_index(folder: Path, form: str) -> bool:
    """Whether a folder's index was written by this program for a form, be it whole or damaged since."""
    try:
        with open(folder / INDEX, "rb") as file:
            return f'"format": "{form}"'.encode() in file.read(1000)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def write_index(folder: Path, index: IndexPart) -> None:
    """Write the index, whole or not at all."""
    write_json(folder / INDEX, index.model_dump())


def verify(
    folder: str | Path, *, workers: int = 4, done: Callable[[str, bool], None] = lambda name, sound: None
) -> list[str]:
    """Names of the files whose size or SHA-256 is not what the index says; `done` is called with every file."""
    return damaged_files(Path(folder), list(read_index(folder).files()), workers=workers, done=done)


def damaged_files(
    root: Path,
    files: Sequence[IndexedFile],
    *,
    workers: int = 4,
    done: Callable[[str, bool], None] = lambda name, sound: None,
) -> list[str]:
    """The same of any files."""

    def check(file: IndexedFile) -> bool:
        sound = sha256_matches(root / file.name, file.sha256, file.size)
        done(file.name, sound)
        return sound

    with ThreadPoolExecutor(max(1, workers)) as pool:
        return [file.name for file, sound in zip(files, pool.map(check, files), strict=True) if not sound]
