"""Held-out text in fixed sequences, in order, every token scored once.

for batch in ValidationData(tokens, 1024).batches(16): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from siamesenorm.data.batches import Batch
from siamesenorm.data.packing import IGNORED, check_corpora, make_batch
from siamesenorm.data.tokens import SCORED, STARTS, Tokens
from siamesenorm.errors import DataError

BLOCK = 1 << 20
"""Tokens that are looked at together."""


class ValidationData:
    """Consecutive sequences of a corpus; see `siamesenorm.data.packing` for what a batch holds.

    The first sequence starts with the end-of-document id, as if a document had ended before, so that the corpus's
    first token is scored too. The last sequence is filled up with places that are not scored. With document masking
    the first token of a document has nothing to be predicted from and is not scored. Of corpora with marks (answers to
    learn) what these say is scored.

    sequences: only so many from the start, for a quick look.
    """

    def __init__(
        self, tokens: Tokens, sequence_length: int, *, document_masking: bool = False, sequences: int | None = None
    ) -> None:
        check_corpora([tokens], sequence_length, document_masking)
        if not len(tokens):
            raise DataError(f"data: {tokens.name!r} has no tokens to validate on; hold out more, or split finer (unit)")
        if sequences is not None and sequences < 1:
            raise DataError.not_allowed("sequences", sequences, "1 or more")
        self.tokens, self.sequence_length, self.document_masking = tokens, sequence_length, document_masking
        whole = -(-len(tokens) // sequence_length) if tokens.marks is None else len(tokens) // sequence_length
        self.sequences = whole if sequences is None else min(whole, sequences)

    def batches(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Batches of one rank: all ranks get as many, and together they have every sequence once.

        Where sequences run out, a batch is filled up with rows that are not scored.
        """
        if batch_size < 1 or not 0 <= rank < world_size:
            raise DataError(f"batches: batch_size = {batch_size}, rank = {rank} of {world_size} is not allowed")
        for first in range(0, self.sequences, batch_size * world_size):
            mine = first + rank * batch_size + np.arange(batch_size)
            yield self._batch(mine)

    def scored(self) -> int:
        """Tokens that are scored."""
        if self.tokens.marks is not None:
            return int((self.tokens.marks[: self.sequences * self.sequence_length] & SCORED != 0).sum())
        count, eos = min(len(self.tokens), self.sequences * self.sequence_length), self.tokens.eos_id
        if eos is None:
            return count - 1
        if not self.document_masking:
            return count
        ends = sum(
            np.count_nonzero(self.tokens.read(start, min(start + BLOCK, count - 1)) == eos)
            for start in range(0, count - 1, BLOCK)
        )
        return count - 1 - int(ends)

    def _batch(self, sequences: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Batch:
        length, total = self.sequence_length, len(self.tokens)
        eos = self.tokens.eos_id
        windows = np.full((sequences.size, length + 1), eos or 0, dtype=self.tokens.dtype)
        marks = None if self.tokens.marks is None else np.full(windows.shape, STARTS, dtype=np.uint8)
        scored = np.zeros((sequences.size, length), dtype=bool)
        for row, sequence in enumerate(sequences.tolist()):
            # the window has the token before the sequence, then the sequence itself: those are the labels
            start, stop = sequence * length, min((sequence + 1) * length, total)
            if sequence >= self.sequences:
                continue
            before = 1 if sequence else 0
            windows[row, 1 - before : 1 + stop - start] = self.tokens.read(start - before, stop)
            if marks is not None and self.tokens.marks is not None:
                marks[row, 1 - before : 1 + stop - start] = self.tokens.marks[start - before : stop]
            scored[row, : stop - start] = True
            if not sequence and eos is None:
                scored[row, 0] = False
        batch = make_batch(windows, eos if self.document_masking else None, marks)
        batch["labels"].numpy()[~scored] = IGNORED
        return batch
