"""The manifest of a checkpoint: the size and SHA-256 of every file in it, written last.

A folder with a manifest that its files agree with is a complete checkpoint; anything else is not one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from siamesenorm.data.atomic import sha256_of, write_json
from siamesenorm.data.index import Count, FileName
from siamesenorm.data.reading import MissingError, read_model
from siamesenorm.errors import ConfigError, DataError

MANIFEST = "manifest.json"


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written or read; the message is one sentence."""


class Damage(CheckpointError):
    """A file of a checkpoint that is not what was written; the message names it."""


class ManifestEntry(BaseModel):
    """One file, as it was written."""

    model_config = ConfigDict(frozen=True, strict=True)

    size: Count
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint consists of."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: Literal[1]
    run: str
    """Identifies the run; a checkpoint of another run is not resumed from."""
    step: Count
    sequence: Count
    """Counts the checkpoints of a run; the newest has the highest, also after a return to an earlier step."""
    world: Count
    """Processes that wrote it. Any number can read it."""
    files: dict[FileName, ManifestEntry]
    permanent: bool = False
    """Whether it stays when newer ones are there."""

    def write(self, folder: Path) -> None:
        """Make the folder a complete checkpoint."""
        write_json(folder / MANIFEST, self.model_dump())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; raises `Damage`."""
        try:
            return read_model(folder / MANIFEST, cls, "checkpoint")
        except MissingError:
            raise Damage(f"{folder / MANIFEST} is missing") from None
        except DataError as error:
            raise Damage(str(error).removeprefix("checkpoint: ")) from None


def record(folder: Path, names: Iterable[str]) -> dict[str, ManifestEntry]:
    """Size and SHA-256 of files just written."""
    return {name: ManifestEntry(size=(folder / name).stat().st_size, sha256=sha256_of(folder / name)) for name in names}


def check(folder: Path, files: Mapping[str, ManifestEntry]) -> str | None:
    """The first file that is not as recorded, in one sentence; None if all are."""
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry.size:
                return f"{path} has {size} bytes instead of {entry.size}"
            if sha256_of(path) != entry.sha256:
                return f"{path} has another SHA-256 than when it was written"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
    return None
