"""Sequences of a fixed length from packed documents, as batches of tensors.

A batch is a dict of int64 tensors of shape (batch, sequence):

    input_ids      the tokens
    labels         the token that follows each input, so already shifted; IGNORED (-100) where nothing is scored
    document_ids   with document masking: which document of the row a token is of, from 0
    positions      with document masking: the token's place in its document, from 0 at the row's or document's start

With document masking a token may attend to tokens with its own document id only, and the end of a document has no
label: the next token is another document's first. `attention_mask` turns document ids into the mask itself. Corpora
with marks of their own (answers to learn, see `siamesenorm.data.answers`) have labels where these say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from siamesenorm.data.batches import Batch
from siamesenorm.data.order import Order
from siamesenorm.data.tokenizer import TokenIds
from siamesenorm.data.tokens import SCORED, STARTS, Tokens
from siamesenorm.errors import DataError

IGNORED = -100
BLOCK = 4096
"""Samples whose order is worked out at a time."""


class TrainingData:
    """Training sequences from one or more corpora, in an order that the seed decides.

    data = TrainingData([open_tokens("books"), open_tokens("code")], 2048, weights=[0.7, 0.3], seed=1)
    data.batch(np.arange(8))               # samples 0 to 7, whatever was read before
    """

    def __init__(
        self,
        corpora: Sequence[Tokens] | Tokens,
        sequence_length: int,
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        document_masking: bool = False,
    ) -> None:
        self.corpora = [corpora] if isinstance(corpora, Tokens) else list(corpora)
        self.sequence_length, self.document_masking = sequence_length, document_masking
        check_corpora(self.corpora, sequence_length, document_masking)
        for corpus in self.corpora:
            if len(corpus) <= sequence_length:
                raise DataError(
                    f"data: {corpus.name!r} has {len(corpus)} tokens; a sequence_length of {sequence_length} "
                    f"needs at least {sequence_length + 1}"
                )
        # a sequence reads one token beyond its end, the label of its last
        sizes = [(len(corpus) - 1) // sequence_length for corpus in self.corpora]
        self.order = Order(sizes, weights, seed=seed)
        self._located: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Sequences of all corpora together."""
        return sum(self.order.sizes)

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each corpus has been gone through after so many samples."""
        names = (corpus.name for corpus in self.corpora)
        return dict(zip(names, self.order.epochs(samples), strict=True))

    def windows(self, samples: NDArray[np.int64]) -> TokenIds:
        """One more token than a sequence has, for each sample."""
        return self._windows(samples)[0]

    def _windows(self, samples: NDArray[np.int64]) -> tuple[TokenIds, NDArray[np.uint8] | None]:
        """The same, and their marks where a corpus has some."""
        corpora, sequences = self._locate(samples)
        length = self.sequence_length + 1
        starts = sequences * self.sequence_length
        if len(self.corpora) == 1:
            return self.corpora[0].gather(starts, length), self.corpora[0].gather_marks(starts, length)
        rows: TokenIds = np.empty((samples.size, length), dtype=np.result_type(*(c.dtype for c in self.corpora)))
        marks = np.zeros(rows.shape, dtype=np.uint8) if self.marked else None
        for number in np.unique(corpora):
            mine, corpus = corpora == number, self.corpora[number]
            rows[mine] = corpus.gather(starts[mine], length)
            if marks is not None:
                own = corpus.gather_marks(starts[mine], length)
                marks[mine] = plain_marks(rows[mine], corpus.eos_id, self.document_masking) if own is None else own
        return rows, marks

    @property
    def marked(self) -> bool:
        """Whether some tokens are read but not learnt."""
        return any(corpus.marks is not None for corpus in self.corpora)

    def _locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus and sequence of samples; a block of them costs hardly more than one, so blocks are kept."""
        block = int(samples[0]) // BLOCK if samples.size else 0
        first = block * BLOCK
        if samples.size == 0 or samples.min() < first or samples.max() >= first + BLOCK:
            return self.order.locate(samples)
        located = self._located
        if located is None or located[0] != block:
            located = self._located = (block, *self.order.locate(np.arange(first, first + BLOCK)))
        return located[1][samples - first], located[2][samples - first]

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """The batch of samples, numbered from the start of training."""
        eos_id = self.corpora[0].eos_id if self.document_masking else None
        windows, marks = self._windows(samples)
        return make_batch(windows, eos_id, marks)


def check_corpora(corpora: Sequence[Tokens], sequence_length: int, document_masking: bool) -> None:
    """Raise unless the corpora can be read together in sequences of this length."""
    if not corpora:
        raise DataError("data: no corpus given; one or more are needed")
    if isinstance(sequence_length, bool) or sequence_length < 1:
        raise DataError.not_allowed("sequence_length", sequence_length, "1 or more")
    made = {corpus.fingerprint: corpus.name for corpus in corpora if corpus.fingerprint is not None}
    if len(made) > 1:
        raise DataError(f"data: {' and '.join(list(made.values())[:2])} were made with different tokenizers")
    ends = {corpus.eos_id for corpus in corpora}
    if document_masking and (None in ends or len(ends) > 1):
        raise DataError(f"document_masking: needs one eos_id for all corpora; given are {sorted(map(str, ends))}")


def plain_marks(windows: TokenIds, eos_id: int | None, document_masking: bool) -> NDArray[np.uint8]:
    """Marks of tokens that are all learnt; with document masking, but for the first of a document."""
    starts = np.zeros(windows.shape, dtype=bool)
    if document_masking:
        starts[:, 1:] = windows[:, :-1] == eos_id
    return np.where(starts, STARTS, SCORED).astype(np.uint8)


def make_batch(windows: TokenIds, eos_id: int | None, marks: NDArray[np.uint8] | None = None) -> Batch:
    """Inputs and labels of windows; with an end-of-document id also document ids and positions.

    marks: of the windows' tokens, where they are not what that id says.
    """
    inputs = windows[:, :-1].astype(np.int64)
    labels = windows[:, 1:].astype(np.int64)
    if marks is None and eos_id is not None:
        marks = plain_marks(windows, eos_id, document_masking=True)
    if marks is not None:
        labels[marks[:, 1:] & SCORED == 0] = IGNORED
    if marks is None or eos_id is None:
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
    starts = marks[:, :-1] & STARTS != 0
    starts[:, 0] = False
    places = np.arange(inputs.shape[1])
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    batch = {"input_ids": inputs, "labels": labels, "document_ids": starts.cumsum(axis=1), "positions": positions}
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def attention_mask(document_ids: Tensor) -> Tensor:
    """True where a query (third axis) may see a key (fourth): the same document, and no later place."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
