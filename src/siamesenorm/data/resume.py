"""What an earlier run left in a folder: kept where it is of the same plan and its checksums match."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.data.atomic import remove_partial, sha256_matches
from siamesenorm.data.errors import DataError
from siamesenorm.data.index import INDEX, PROGRESS, Index, Shard, read_index
from siamesenorm.data.reading import read_model
from siamesenorm.data.shards import ChunkRecord

SHARD_NAME = re.compile(r"(train|validation)-(\d{5,})\.(npy|csv\.gz)")


@dataclass(frozen=True)
class Earlier:
    """Records of an earlier run, by chunk, and its index if it came to an end."""

    records: dict[int, ChunkRecord]
    index: Index | None = None
    sound: bool = True


def find_earlier(folder: Path, plan: str, *, overwrite: bool, workers: int) -> Earlier:
    """Finished chunks of the same plan whose files still match; raises if the folder holds another plan's work."""
    remove_partial(folder)
    remove_partial(folder / PROGRESS)
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
        clear(folder)
        return Earlier({})
    with ThreadPoolExecutor(workers) as pool:
        sound = list(pool.map(lambda record: all(_sound(folder, shard) for shard in record.shards.values()), records))
    kept = {record.number: record for record, good in zip(records, sound, strict=True) if good}
    return Earlier(kept, index, all(sound))


def clear(folder: Path) -> None:
    """Remove a preparation, the index first: what is left at any moment is never taken for a whole one."""
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder / PROGRESS, ignore_errors=True)
    remove_strays(folder, ())


def remove_strays(folder: Path, kept: Collection[str]) -> None:
    """Remove shards that no record speaks of."""
    for path in list(folder.iterdir()):
        if SHARD_NAME.fullmatch(path.name) and path.name not in kept:
            path.unlink()


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
    for path in sorted((folder / PROGRESS).glob("*.json")):
        try:
            records.append(read_model(path, ChunkRecord, "out"))
        except DataError:
            path.unlink()
    return records
