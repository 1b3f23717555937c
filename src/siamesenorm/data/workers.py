"""Chunks over processes: the same records from one worker or many, and no worker outlives its parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from siamesenorm.data.shards import Chunk, ChunkRecord, Work, write_chunk
from siamesenorm.data.tokenizer import Tokenizer, tokenizer_from_json

REFRESH = 0.2
"""Seconds between two looks at the workers' counters."""


ProgressCallback = Callable[[int], None]
"""Called with the number of items that were finished since the last call."""


class Progress:
    """What a preparation tells of itself; subclass it to show it. This one is silent."""

    def stage(self, text: str) -> None:
        """Something begins that has no measure."""

    def begin(self, total: int, todo: int, kept: int) -> None:
        """Bytes of all chunks and of those to make, and the number of chunks kept from an earlier run."""

    def update(self, size: int, tokens: int) -> None:
        """Bytes read and tokens made so far in this run."""

    def chunk(self, record: ChunkRecord) -> None:
        """A chunk is finished and on the disk."""


class Stopped(Exception):
    """A worker gives up its chunk because another one failed."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_chunks(
    work: Work, tokenizer: Tokenizer, chunks: Sequence[Chunk], workers: int, progress: Progress
) -> Iterator[ChunkRecord]:
    """Write chunks and give their records as they finish."""
    if workers == 1 or len(chunks) <= 1:
        yield from _run_here(work, tokenizer, chunks, progress)
    else:
        yield from _run_pool(work, tokenizer, chunks, min(workers, len(chunks)), progress)


def _run_here(work: Work, tokenizer: Tokenizer, chunks: Sequence[Chunk], progress: Progress) -> Iterator[ChunkRecord]:
    size = tokens = 0

    def count(more_bytes: int, more_tokens: int) -> None:
        nonlocal size, tokens
        size, tokens = size + more_bytes, tokens + more_tokens
        progress.update(size, tokens)

    for chunk in chunks:
        record = write_chunk(work, tokenizer, chunk, count)
        progress.chunk(record)
        yield record


def _run_pool(
    work: Work, tokenizer: Tokenizer, chunks: Sequence[Chunk], workers: int, progress: Progress
) -> Iterator[ChunkRecord]:
    methods = multiprocessing.get_all_start_methods()
    # never a plain fork: the progress display and `tokenizers` have threads
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])
        start_fork_server()
    counters = context.Array("q", 3)  # bytes, tokens, stop
    state = (work, tokenizer.to_json(), tokenizer.eos_token, counters)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=state)
    with pool:
        pending: set[Future[ChunkRecord]] = set()
        try:
            pending = {pool.submit(_write_here, chunk) for chunk in chunks}
            while pending:
                done, pending = wait(pending, timeout=REFRESH, return_when=FIRST_COMPLETED)
                progress.update(counters[0], counters[1])
                for future in done:
                    record = future.result()
                    progress.chunk(record)
                    yield record
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died, perhaps for want of memory; finished shards are kept, run it again to go on"
            ) from None
        except BaseException:
            with contextlib.suppress(OSError):
                counters[2] = 1
            for future in pending:
                future.cancel()
            raise


def start_fork_server() -> None:
    """Start what processes are forked from, unless it runs. It and they never receive Ctrl-C or a closed terminal.

    Both reach every process of a terminal; the first one tells the others when to stop.
    """
    from multiprocessing import forkserver, resource_tracker  # not on every system

    resource_tracker.ensure_running()  # it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Work, Tokenizer, Any] | None = None


def _start_worker(work: Work, tokenizer: str, eos: str, counters: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (work, tokenizer_from_json(tokenizer, eos), counters)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _write_here(chunk: Chunk) -> ChunkRecord:
    assert _worker is not None
    work, tokenizer, counters = _worker

    def count(size: int, tokens: int) -> None:
        if counters[2]:
            raise Stopped
        with counters.get_lock():
            counters[0] += size
            counters[1] += tokens

    return write_chunk(work, tokenizer, chunk, count)
