"""How a kind of model is asked: for its loss on a batch, for predictions from hidden states, for tokens that count.

A new kind of model is a subclass of `Subject` and a line in `SUBJECTS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.data.packing import IGNORED
from siamesenorm.errors import InspectionError
from siamesenorm.lab.inspection.watch import replaced
from siamesenorm.layers.cross_entropy import chunk_tokens, linear_cross_entropy
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.stack import run_block
from siamesenorm.models.vit import VisionTransformer

LossFunction = Callable[[nn.Module, Any], Tensor]
Head = Callable[[Tensor], Tensor]


class Subject:
    """Any model built on the library, with the functions that its owner gives.

    loss: from the model and the batch to a scalar; without it, gradients and removals are left out.
    head: from hidden states (tokens, dim) to scores (tokens, classes); without it, the logit lens is left out.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: LossFunction | None, head: Head | None) -> None:
        self.model, self.given_loss, self.head = model, loss, head
        self.batch = self.prepare(moved(batch, device_of(model)))

    def prepare(self, batch: Any) -> Any:
        """The batch as it will be used; raises where the model cannot take it."""
        return batch

    @property
    def has_loss(self) -> bool:
        """Whether `run` gives a loss."""
        return self.given_loss is not None

    @property
    def has_head(self) -> bool:
        """Whether `predict` can be called."""
        return self.head is not None

    @property
    def counted(self) -> Tensor | None:
        """True for the tokens that count, of the batch's shape; None: all do."""
        return None

    def run(self) -> Tensor | None:
        """One pass over the batch: its loss, where there is one."""
        if self.given_loss is not None:
            return self.given_loss(self.model, self.batch)
        if isinstance(self.batch, dict):
            self.model(**self.batch)
        else:
            self.model(*(self.batch if isinstance(self.batch, (tuple, list)) else (self.batch,)))
        return None

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The likeliest class of each hidden state (tokens, dim), in pieces that need little memory."""
        assert self.head is not None
        return torch.cat([self.head(rows).argmax(-1) for rows in hidden.split(self.rows_at_once)])

    @property
    def rows_at_once(self) -> int:
        """Hidden states that the head sees together."""
        return 256

    def asked(self) -> contextlib.AbstractContextManager[None]:
        """Entered around all passes."""
        return contextlib.nullcontext()


class LanguageSubject(Subject):
    """A `LanguageModel`: next-token cross-entropy without auxiliary losses, its own head."""

    model: LanguageModel

    def prepare(self, batch: Any) -> dict[str, Tensor]:
        """Ids of whole sequences, or a batch as data loaders give it."""
        if isinstance(batch, Tensor):
            if batch.dim() != 2 or batch.shape[1] < 2:
                raise InspectionError(f"batch: shape {tuple(batch.shape)} is not allowed; ids are (rows, 2 or more)")
            batch = {"input_ids": batch[:, :-1], "labels": batch[:, 1:]}
        if not isinstance(batch, dict) or not {"input_ids", "labels"} <= batch.keys():
            raise InspectionError("batch: a language model takes ids, or a dictionary with input_ids and labels")
        ids, labels, vocabulary = batch["input_ids"], batch["labels"], self.model.config.vocab_size
        if ids.dim() != 2 or ids.shape != labels.shape:
            shapes = f"{tuple(ids.shape)} and {tuple(labels.shape)}"
            raise InspectionError(f"batch: input_ids and labels of shapes {shapes} are not allowed; both are (rows, n)")
        if not bool((labels != IGNORED).any()):
            raise InspectionError(f"batch: no label counts; all are {IGNORED}")
        highest = max(int(ids.max()), int(labels.max()))
        if highest >= vocabulary or int(ids.min()) < 0:
            raise InspectionError(
                f"batch: id {highest} is not allowed; the model's vocabulary is 0 to {vocabulary - 1}"
            )
        return batch

    @property
    def has_loss(self) -> bool:
        """Always."""
        return True

    @property
    def has_head(self) -> bool:
        """Always."""
        return True

    @property
    def counted(self) -> Tensor:
        """Tokens with a label."""
        return self.batch["labels"] != IGNORED

    def run(self) -> Tensor:
        """Mean cross-entropy of the next token."""
        if self.given_loss is not None:
            return self.given_loss(self.model, self.batch)
        inputs = {name: values for name, values in self.batch.items() if name != "labels"}
        hidden = self.model(**inputs, logits_to_keep=0).hidden
        return linear_cross_entropy(self.model.for_head(hidden), self.model.head_weight, self.batch["labels"])

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The likeliest next token."""
        if self.head is not None:
            return super().predict(hidden)
        weight = self.model.head_weight
        return torch.cat([F.linear(rows, weight).argmax(-1) for rows in hidden.split(self.rows_at_once)])

    @property
    def rows_at_once(self) -> int:
        """As many as the cross-entropy takes."""
        return chunk_tokens(self.model.config.vocab_size)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Blocks run plainly: those that run again in backward would be watched twice."""
        with replaced(self.model, "run", run_block):
            yield


class VisionSubject(Subject):
    """A `VisionTransformer`: cross-entropy of labels; its head asked of every token."""

    model: VisionTransformer

    def prepare(self, batch: Any) -> dict[str, Tensor]:
        """A batch as image loaders give it."""
        if not isinstance(batch, dict) or not {"image", "label"} <= batch.keys():
            raise InspectionError("batch: a vision Transformer takes a dictionary with image and label")
        return batch

    @property
    def has_loss(self) -> bool:
        """Always."""
        return True

    @property
    def has_head(self) -> bool:
        """Unless it gives features."""
        return self.head is not None or self.model.config.classes > 0

    def run(self) -> Tensor:
        """Mean cross-entropy of the labels."""
        if self.given_loss is not None:
            return self.given_loss(self.model, self.batch)
        return F.cross_entropy(self.model(self.batch["image"]), self.batch["label"])

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The likeliest class."""
        if self.head is not None:
            return super().predict(hidden)
        return self.model.head(self.model.for_head(hidden)).argmax(-1)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Blocks run plainly: those that run again in backward would be watched twice."""
        with replaced(self.model, "run", run_block):
            yield


SUBJECTS: dict[type[nn.Module], type[Subject]] = {LanguageModel: LanguageSubject, VisionTransformer: VisionSubject}


def make_subject(model: nn.Module, batch: Any, loss: LossFunction | None, head: Head | None) -> Subject:
    """The subject for a model's kind, the plain one for others."""
    for kind, subject in SUBJECTS.items():
        if isinstance(model, kind):
            return subject(model, batch, loss, head)
    return Subject(model, batch, loss, head)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def moved(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on a device."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), batch)
