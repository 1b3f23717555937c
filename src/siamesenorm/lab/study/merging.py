"""Records of a study from several machines in one results folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from siamesenorm.data.atomic import locked_folder
from siamesenorm.lab.study.record import LEDGER, merged, read_ledger, write_ledger
from siamesenorm.lab.study.running import Study
from siamesenorm.train.errors import ConfigError


def merge_records(study: Study, folders: Sequence[Path]) -> list[str]:
    """Take in the records of other results folders, each cell once; sentences about what came of it."""
    ledgers = []
    for folder in folders:
        if not (folder / LEDGER).is_file():
            raise ConfigError(f"--merge: {str(folder)!r} has no {LEDGER}; it takes the results folder of a study")
        ledgers.append(read_ledger(folder))
    before = len(study.records)
    found, told = merged(study.records, ledgers)
    try:
        study.folder.mkdir(parents=True, exist_ok=True)
        with locked_folder(study.folder, "--out: another study"):
            write_ledger(study.folder, found)
    except OSError as error:
        raise ConfigError(f"--out: {str(study.folder)!r} cannot be written: {error.strerror or error}") from None
    study.records = found
    return [f"{len(found) - before} records were taken in, {len(found)} are there now", *told]
