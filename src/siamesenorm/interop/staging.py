"""Exported folders: whole or absent, and replaced only where an export made all that lies in them.

A folder is written beside its place and then renamed. ``export.json`` in it names every other file with its size and
SHA-256; by this, a later export knows what it may replace.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from siamesenorm.data.atomic import named, sha256_of, sync_folder, write_json
from siamesenorm.data.listing import files_below, names_in
from siamesenorm.data.reading import read_object
from siamesenorm.data.removal import NOTHING, Made, NotOurs, check_removable, scratch_folder
from siamesenorm.data.replacement import Replacement
from siamesenorm.errors import InteropError

RECORD = "export.json"


@contextlib.contextmanager
def staged(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end, or vanishes with an error."""
    made = check_target(target, overwrite)
    place = Path(os.path.realpath(target))
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(place.parent, place.name) as folder:
        try:
            with named(target):
                yield folder
        except SafetensorError as error:  # its way to say that the disk is full
            raise InteropError.failed("target", target, "written", error) from None
        names = [path.relative_to(folder).as_posix() for path in files_below(folder)]
        write_json(folder / RECORD, {"files": {name: asdict(ExportedFile.of(folder / name)) for name in names}})
        for name in names:  # safetensors' own writer makes files that nobody else may read
            os.chmod(folder / name, (folder / RECORD).stat().st_mode)
        with Replacement() as swap:
            swap.set_aside(place, made)
            swap.move(folder, place)
    sync_folder(place.parent)


@dataclass(frozen=True)
class ExportedFile:
    """A file, as it was exported."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> ExportedFile:
        """What it is now."""
        return cls(path.stat().st_size, sha256_of(path))


def check_target(target: Path, overwrite: bool = False) -> Made:
    """Raise unless a folder may be written there; what of it an earlier export made, for those who replace it."""
    place = Path(os.path.realpath(target))
    if not os.path.lexists(place):
        return NOTHING
    if not place.is_dir():
        raise InteropError.not_allowed("target", str(target), "a folder")
    if not overwrite and names_in(place):
        raise InteropError(f"target: {str(target)!r} is there already and is not empty; overwrite replaces an export")
    made = _made(place)
    try:
        check_removable(place, made)
    except NotOurs as error:
        raise InteropError(f"target: {str(target)!r} is not replaced: {error}") from None
    return made


def _made(folder: Path) -> Made:
    """Everything in a folder that is as an export wrote it."""
    if not os.path.lexists(folder / RECORD):
        return NOTHING
    try:
        files = {name: ExportedFile(**entry) for name, entry in read_object(folder / RECORD, "export")["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InteropError(f"target: {str(folder / RECORD)!r} is no record of an export; move it away") from None
    for name, file in files.items():
        if (folder / name).is_file() and ExportedFile.of(folder / name) != file:
            raise InteropError(f"target: {str(folder / name)!r} was changed after the export; move it away")
    parents = {parent.as_posix() for name in files for parent in Path(name).parents} - {"."}
    return re.compile("|".join(map(re.escape, (RECORD, *files, *sorted(parents)))))
