"""What an earlier run left in a folder: kept where it is of the same plan and its checksums match."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.data.atomic import sha256_matches, sync_folder
from siamesenorm.data.index import INDEX, PROGRESS, Index, Shard, holds_index, read_index
from siamesenorm.data.listing import names_in
from siamesenorm.data.reading import read_model
from siamesenorm.data.removal import (
    Made,
    NotOurs,
    check_removable,
    hidden_names,
    remove_entries,
    remove_file,
    remove_tree,
)
from siamesenorm.data.replacement import Replacement
from siamesenorm.data.shards import ChunkRecord
from siamesenorm.data.tokenizer import FILE
from siamesenorm.errors import DataError

SHARD_NAME = re.compile(r"(train|validation)-(\d{5,})\.(npy|csv\.gz)")
REPLACEMENT = ".replacement"
"""Folder of a preparation that will take the place of the one around it."""
RECORD_NAME = r"\d{5,}\.json"
NAMES = rf"{SHARD_NAME.pattern}|index\.json|tokenizer\.json"
RECORDS = re.compile(rf"{RECORD_NAME}|{hidden_names(RECORD_NAME)}")
MADE = re.compile(rf"{NAMES}|{hidden_names(NAMES)}|\.progress(?:/(?:{RECORDS.pattern}))?")
"""What a preparation writes: records of finished chunks, and all in its folder."""


@dataclass(frozen=True)
class Earlier:
    """Records of an earlier run, by chunk, and its index if it came to an end."""

    records: dict[int, ChunkRecord]
    index: Index | None = None
    sound: bool = True


def refuse_foreign(folder: Path, form: str, records: Made) -> None:
    """Raise where a folder holds something other than work of a form."""
    names = names_in(folder)
    if not names or holds_index(folder, form):
        return
    other: str | None = names[0]
    if INDEX in names:
        other = INDEX
    elif not {PROGRESS, REPLACEMENT}.isdisjoint(names):
        made = names_in(folder / PROGRESS)
        other = next((f"{PROGRESS}/{name}" for name in made if not records.fullmatch(name)), None)
    if other is not None:
        raise DataError(f"out: {str(folder)!r} holds other files, such as {other!r}; name an empty folder")


def find_earlier(folder: Path, plan: str, *, overwrite: bool, workers: int) -> Earlier | None:
    """Finished chunks of the same plan whose files still match; raises if the folder holds another plan's work.

    With `overwrite` it does not raise: unfinished work of another plan is removed, and None says that a whole
    preparation of another plan is there.
    """
    remove_entries(folder, re.compile(hidden_names(NAMES)))
    remove_entries(folder / PROGRESS, re.compile(hidden_names(RECORD_NAME)))
    try:
        index = read_index(folder) if (folder / INDEX).exists() else None
        records = _records_of_index(index) if index else _records_of_progress(folder)
        same = (index is None or index.plan == plan) and all(record.plan == plan for record in records)
    except DataError:
        if not overwrite:
            raise
        index, records, same = None, [], False
    if not same:
        if not overwrite:
            raise DataError(
                f"out: {str(folder)!r} holds another preparation (other sources, tokenizer or settings); "
                f"name another folder, or set overwrite"
            )
        if index is not None:
            return None
        clear(folder)
        return Earlier({})
    with ThreadPoolExecutor(workers) as pool:
        sound = list(pool.map(lambda record: all(_sound(folder, shard) for shard in record.shards.values()), records))
    kept = {record.number: record for record, good in zip(records, sound, strict=True) if good}
    return Earlier(kept, index, all(sound))


def clear(folder: Path) -> None:
    """Remove a preparation, the index first: what is left at any moment is known as an unfinished one."""
    (folder / PROGRESS).mkdir(exist_ok=True)
    remove_file(folder / INDEX)
    remove_strays(folder, ())
    remove_file(folder / FILE)
    remove_tree(folder / PROGRESS, RECORDS)


def discard(folder: Path) -> None:
    """Remove a preparation with its folder; where other files lie in it, these stay."""
    clear(folder)
    with contextlib.suppress(NotOurs):
        remove_tree(folder, MADE)


def check_replaceable(folder: Path, made: Made) -> None:
    """Raise if something in a folder could not be replaced later: a link, say, that has the name of a file of ours."""
    for name in _index_last(folder, made):
        check_removable(folder / name)


def take_place(new: Path, folder: Path, made: Made) -> None:
    """Put a whole preparation in the place of the one around it, all of it or nothing.

    made: fits what either of them consists of. The old index goes first and the new one comes last.
    """
    with Replacement() as swap:
        for name in _index_last(folder, made)[::-1]:
            swap.set_aside(folder / name)
        for name in _index_last(new, made):
            swap.move(new / name, folder / name)
        sync_folder(folder)
    with contextlib.suppress(NotOurs):
        remove_tree(new, made)


def _index_last(folder: Path, made: Made) -> list[str]:
    names = [name for name in names_in(folder) if made.fullmatch(name) and name != PROGRESS]
    return sorted(names, key=lambda name: (name == INDEX, name))


def remove_strays(folder: Path, kept: Collection[str]) -> None:
    """Remove shards that no record speaks of."""
    for name in names_in(folder):
        if SHARD_NAME.fullmatch(name) and name not in kept:
            remove_file(folder / name)


def _sound(folder: Path, shard: Shard) -> bool:
    return sha256_matches(folder / shard.file, shard.sha256) and sha256_matches(
        folder / shard.boundaries, shard.boundaries_sha256
    )


def _records_of_index(index: Index) -> Sequence[ChunkRecord]:
    shards: dict[int, dict[str, Shard]] = {}
    for name, split in index.splits.items():
        for shard in split.shards:
            found = SHARD_NAME.fullmatch(shard.file)
            if found:
                shards.setdefault(int(found[2]), {})[name] = shard
    return [ChunkRecord(number=number, plan=index.plan, skipped={}, shards=made) for number, made in shards.items()]


def _records_of_progress(folder: Path) -> Sequence[ChunkRecord]:
    records = []
    for path in (folder / PROGRESS / name for name in names_in(folder / PROGRESS)):
        try:
            records.append(read_model(path, ChunkRecord, "out"))
        except DataError:
            remove_file(path)
    return records
