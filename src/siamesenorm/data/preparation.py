"""``prepare``: text to token shards, in parallel, resumable, the same bytes whatever interrupts it.

index = prepare(["books/"], "corpus", tokenizer="byte", validation=0.05)

The sources alone decide how they are cut into chunks, and a chunk becomes one shard per split; so neither the number
of workers nor the order in which they finish changes anything. A finished chunk leaves a record with checksums. A
later run of the same preparation keeps the chunks whose files still match and makes the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from siamesenorm.data.atomic import locked_folder, sha256_matches
from siamesenorm.data.documents import SPLITS, Piece, Reading, Source
from siamesenorm.data.held_out import hold_out
from siamesenorm.data.index import (
    FORMAT,
    PROGRESS,
    Index,
    Settings,
    SourceEntry,
    SplitEntry,
    TokenizerEntry,
    check_settings,
    write_index,
)
from siamesenorm.data.listing import names_in
from siamesenorm.data.removal import NotOurs, remove_tree
from siamesenorm.data.resume import (
    MADE,
    RECORDS,
    REPLACEMENT,
    Earlier,
    check_replaceable,
    clear,
    discard,
    find_earlier,
    refuse_foreign,
    remove_strays,
    take_place,
)
from siamesenorm.data.shards import Chunk, ChunkRecord, Work
from siamesenorm.data.sources import find_sources
from siamesenorm.data.tokenizer import FILE, Tokenizer, load_tokenizer, save_tokenizer, token_dtype
from siamesenorm.data.workers import Progress, available_cores, run_chunks
from siamesenorm.errors import DataError

SMALLEST, LARGEST, CHUNKS = 1 << 20, 1 << 28, 64
"""Bytes of a chunk where none are asked for: a 64th of the sources, within these limits."""


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | Tokenizer = "byte",
    eos: str | None = None,
    format: str = "auto",
    pattern: str | None = None,
    field: str = "text",
    unit: str = "file",
    invalid: str = "error",
    subset: str | None = None,
    hub_split: str = "train",
    validation: float = 0.01,
    seed: int = 0,
    shard_bytes: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Turn text into a folder of token shards with an index; run it again to go on after an interruption.

    sources: files, folders, embedded corpora (python-code, python-docs, arithmetic) or ``hf:NAME``.
    out: the folder to write.
    tokenizer, eos: ``byte``, a tokenizer.json or its folder; the token that ends a document, if not a common one.
    format, pattern: auto, text, jsonl or parquet; which files of a folder, such as ``*.txt``.
    field: the JSONL field or column that holds the text.
    unit: what of a text file is one document: file, line or paragraph.
    invalid: error, replace or skip what cannot be read.
    subset, hub_split: of a Hugging Face dataset.
    validation, seed: share of the text that is held out, and what decides which part of it; above 0, at least
        `siamesenorm.data.held_out.AIM` tokens as long as that is no more than a quarter.
    shard_bytes: bytes of text per shard; by default a 64th of all, from 1 MiB to 256 MiB.
    workers: processes; by default one per core.
    overwrite: replace another preparation in the folder, which stays until this one is whole.
    progress: called with what is done; see `siamesenorm.data.workers.Progress`.
    """
    settings = check_settings(
        seed=seed, validation=validation, field=field, unit=unit, invalid=invalid, shard_bytes=shard_bytes
    )
    workers = available_cores() if workers is None else workers
    if workers < 1:
        raise DataError.not_allowed("workers", workers, "1 or more")
    chosen = load_tokenizer(tokenizer, eos) if isinstance(tokenizer, (str, Path)) else tokenizer
    found = find_sources(sources, format=format, pattern=pattern, subset=subset, hub_split=hub_split, seed=seed)
    folder = Path(out)
    _check_folder(folder, found)
    progress = progress or Progress()
    progress.stage("reading sources")
    reading = Reading(settings.field, settings.unit, settings.invalid, settings.seed, settings.validation)
    entries = _source_entries(found, workers)
    if not sum(entry.bytes for entry in entries):
        raise DataError(f"sources: {', '.join(map(str, sources))!r} hold no text; every file is empty")
    reading = hold_out(found, reading, chosen)
    chunks = plan_chunks(found, reading, settings.shard_bytes)
    plan = _fingerprint(settings, reading, chosen, entries, chunks)
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    place, whole = folder, False
    try:
        with locked_folder(folder):
            progress.stage("checking what is there")
            earlier = find_earlier(folder, plan, overwrite=overwrite, workers=workers)
            if earlier is None:  # the other preparation stays until this one is whole
                check_replaceable(folder, MADE)
                place = folder / REPLACEMENT
                place.mkdir(exist_ok=True)
                earlier = find_earlier(place, plan, overwrite=True, workers=workers)
            elif (folder / REPLACEMENT).is_dir():
                discard(folder / REPLACEMENT)
            if earlier is None:
                clear(place)
                earlier = Earlier({})
            index = earlier.index
            if not (index and earlier.sound and sha256_matches(place / FILE, index.tokenizer.sha256)):
                work = Work(place.resolve(), plan, found, reading)
                records = _make(work, chosen, chunks, earlier, workers, progress)
                index = _assemble(settings, chosen, entries, plan, records, earlier)
                if not sum(split.documents for split in index.splits.values()):
                    clear(place)
                    raise DataError(f"sources: no document with text is left; left out were {index.skipped or 'none'}")
                remove_strays(place, [name for name, *_ in index.files()])
                write_index(place, index)
                whole = True
                with contextlib.suppress(NotOurs):
                    remove_tree(place / PROGRESS, RECORDS)
            if place != folder:
                take_place(place, folder, MADE)
            return index
    except DataError:
        begun = whole or any(name.endswith(".json") for name in names_in(place / PROGRESS))
        if not begun and (fresh or place != folder):
            discard(place)  # bad input leaves nothing behind
        raise


def _make(
    work: Work, tokenizer: Tokenizer, chunks: Sequence[Chunk], earlier: Earlier, workers: int, progress: Progress
) -> list[ChunkRecord]:
    (work.folder / PROGRESS).mkdir(exist_ok=True)
    save_tokenizer(tokenizer, work.folder / FILE)
    records = dict(earlier.records)
    todo = [chunk for chunk in chunks if chunk.number not in records]
    progress.begin(sum(chunk.size for chunk in chunks), sum(chunk.size for chunk in todo), len(records))
    for record in run_chunks(work, tokenizer, todo, workers, progress):
        records[record.number] = record
    return [records[chunk.number] for chunk in chunks]


def plan_chunks(sources: Sequence[Source], reading: Reading, shard_bytes: int | None = None) -> list[Chunk]:
    """Cut sources into chunks; a function of the sources alone."""
    total = sum(source.size() for source in sources)
    target = shard_bytes or min(max(total // CHUNKS, SMALLEST), LARGEST)
    pieces = [(number, piece) for number, source in enumerate(sources) for piece in source.pieces(target, reading)]
    chunks: list[Chunk] = []
    held: list[tuple[int, Piece]] = []
    size = 0
    for numbered in pieces:
        if held and size + numbered[1].size > target:
            chunks.append(Chunk(len(chunks), tuple(held)))
            held, size = [], 0
        held.append(numbered)
        size += numbered[1].size
    return [*chunks, Chunk(len(chunks), tuple(held))] if held else chunks


def _check_folder(folder: Path, sources: Sequence[Source]) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"out: {str(folder)!r} is a file; name a folder")
    target = folder.resolve()
    for source in sources:
        path = getattr(source, "path", None)
        if isinstance(path, Path) and target in path.resolve().parents:
            raise DataError(f"out: {str(folder)!r} holds the source {source.name!r}; name another folder")
    refuse_foreign(folder, FORMAT, RECORDS)


def _source_entries(sources: Sequence[Source], workers: int) -> list[SourceEntry]:
    def entry(source: Source) -> SourceEntry:
        try:
            return SourceEntry(name=source.name, kind=source.kind, bytes=source.size(), sha256=source.sha256())
        except OSError as error:
            raise DataError(f"source: {source.name!r} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(entry, sources))


def _fingerprint(
    settings: Settings, reading: Reading, tokenizer: Tokenizer, entries: Sequence[SourceEntry], chunks: Sequence[Chunk]
) -> str:
    value = {
        "settings": settings.model_dump(),
        "held_out": [reading.validation, reading.longest],
        "tokenizer": tokenizer.fingerprint,
        "sources": [entry.model_dump() for entry in entries],
        "chunks": [asdict(chunk) for chunk in chunks],
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _assemble(
    settings: Settings,
    tokenizer: Tokenizer,
    entries: list[SourceEntry],
    plan: str,
    records: Sequence[ChunkRecord],
    earlier: Earlier,
) -> Index:
    skipped: Counter[str] = Counter()
    for record in records:
        skipped.update(record.skipped)
    splits = {}
    for name in SPLITS:
        shards = [record.shards[name] for record in records if name in record.shards]
        splits[name] = SplitEntry(
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            text_bytes=sum(shard.text_bytes for shard in shards),
            shards=shards,
        )
    described = TokenizerEntry(
        file=FILE,
        sha256=hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        eos_token=tokenizer.eos_token,
    )
    return Index(
        dtype=token_dtype(tokenizer.vocab_size).name,  # type: ignore[arg-type]
        plan=plan,
        settings=settings,
        tokenizer=described,
        sources=entries,
        # records read back from an index do not say what their chunks left out
        skipped=earlier.index.skipped if earlier.index else dict(sorted(skipped.items())),
        splits=splits,  # type: ignore[arg-type]
    )
