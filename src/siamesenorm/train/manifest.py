"""The manifest of a checkpoint: the size and SHA-256 of every file in it, written last.

A folder with a manifest that its files agree with is a complete checkpoint; anything else is not one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from siamesenorm.data.atomic import sha256_of, write_json
from siamesenorm.data.reading import MissingError, read_object
from siamesenorm.errors import ConfigError, DataError

MANIFEST = "manifest.json"
VERSION = 1


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written or read; the message is one sentence."""


class Damage(CheckpointError):
    """A file of a checkpoint that is not what was written; the message names it."""


@dataclass(frozen=True)
class Entry:
    """One file, as it was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    run: str
    """Identifies the run; a checkpoint of another run is not resumed from."""
    step: int
    sequence: int
    """Counts the checkpoints of a run; the newest has the highest, also after a return to an earlier step."""
    world: int
    """Processes that wrote it. Any number can read it."""
    files: dict[str, Entry]
    permanent: bool = False
    """Whether it stays when newer ones are there."""

    def write(self, folder: Path) -> None:
        """Make the folder a complete checkpoint."""
        write_json(folder / MANIFEST, {"version": VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; raises `Damage`."""
        path = folder / MANIFEST
        try:
            value = read_object(path, "checkpoint")
        except MissingError:
            raise Damage(f"{path} is missing") from None
        except DataError as error:
            raise Damage(str(error).removeprefix("checkpoint: ")) from None
        try:
            return cls._parse(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damage(f"{path} is not a manifest of version {VERSION} ({error})") from None

    @classmethod
    def _parse(cls, value: Any) -> Manifest:
        if value["version"] != VERSION:
            raise ValueError(f"version {value['version']!r}")
        files = {name: Entry(_count(e["size"]), str(e["sha256"])) for name, e in value["files"].items()}
        for name in files:
            if name != Path(name).name or name in ("", ".", "..", MANIFEST):
                raise ValueError(f"file name {name!r}")
        step, sequence, world = (_count(value[name]) for name in ("step", "sequence", "world"))
        return cls(str(value["run"]), step, sequence, world, files, value.get("permanent", False) is True)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def record(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Size and SHA-256 of files just written."""
    return {name: Entry((folder / name).stat().st_size, sha256_of(folder / name)) for name in names}


def check(folder: Path, files: dict[str, Entry]) -> str | None:
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
