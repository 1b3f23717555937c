"""Records of a study from several machines in one results folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from siamesenorm.errors import ConfigError
from siamesenorm.lab.study.record import LEDGER, merged, read_ledger, write_ledger
from siamesenorm.lab.study.running import Study, begun, writing


def merge_records(study: Study, folders: Sequence[Path]) -> list[str]:
    """Take in the records of other results folders, each cell once; sentences about what came of it."""
    ledgers = []
    for folder in folders:
        if not (folder / LEDGER).is_file():
            raise ConfigError(f"--merge: {str(folder)!r} has no {LEDGER}; it takes the results folder of a study")
        ledgers.append(read_ledger(folder))
    with begun(study):
        before = len(study.records)
        study.records, conflicts = merged(study.records, ledgers)
        with writing(study.folder):
            write_ledger(study.folder, study.records)
    return [f"{len(study.records) - before} records were taken in, {len(study.records)} are there now", *conflicts]
