"""How a kind of model is asked: for its loss on a batch, for predictions from hidden states, for tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.data.batches import to_device
from siamesenorm.data.packing import IGNORED
from siamesenorm.errors import InspectionError
from siamesenorm.layers.cross_entropy import chunk_tokens, linear_cross_entropy
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.vit import VisionTransformer

LossFunction = Callable[[nn.Module, Any], Tensor]
Head = Callable[[Tensor], Tensor]


class Subject:
    """Any model built on the library, with the functions that its owner gives.

    loss: from the model and the batch to a scalar; without it, gradients and removals are left out.
    head: from hidden states (tokens, dim) to scores (tokens, classes); without it, the logit lens is left out.
    """

    rows_at_once = 256
    """Hidden states that the head sees together."""
    counted: Tensor | None = None
    """True for the tokens that count, of the batch's shape; None: all do."""

    def __init__(self, model: nn.Module, batch: Any, loss: LossFunction | None, head: Head | None) -> None:
        self.model, self.loss, self.head = model, loss, head
        self.batch: Any = to_device(batch, device_of(model))

    def run(self) -> Tensor | None:
        """One pass over the batch: its loss, where there is one."""
        if self.loss is not None:
            return self.loss(self.model, self.batch)
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


class LanguageSubject(Subject):
    """A `LanguageModel`: next-token cross-entropy without auxiliary losses, its own head.

    The batch is ids of whole sequences, or a dictionary as data loaders give it.
    """

    def __init__(self, model: LanguageModel, batch: Any, loss: LossFunction | None, head: Head | None) -> None:
        super().__init__(
            model, _language_batch(batch, model.config.vocab_size), loss or _next_token_loss, head or _logits_of(model)
        )
        self.rows_at_once = chunk_tokens(model.config.vocab_size)
        self.counted = self.batch["labels"] != IGNORED


class VisionSubject(Subject):
    """A `VisionTransformer`: cross-entropy of labels; its head, where it has one, asked of every token."""

    def __init__(self, model: VisionTransformer, batch: Any, loss: LossFunction | None, head: Head | None) -> None:
        if not isinstance(batch, dict) or not {"image", "label"} <= batch.keys():
            raise InspectionError("batch: a vision Transformer takes a dictionary with image and label")
        own = (lambda hidden: model.head(model.for_head(hidden))) if model.config.classes else None
        super().__init__(model, batch, loss or _label_loss, head or own)


def _language_batch(batch: Any, vocabulary: int) -> dict[str, Tensor]:
    """Inputs and labels; raises where the model cannot take them."""
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2:
            raise InspectionError(f"batch: shape {tuple(batch.shape)} is not allowed; ids are (rows, 2 or more)")
        batch = {"input_ids": batch[:, :-1], "labels": batch[:, 1:]}
    if not isinstance(batch, dict) or not {"input_ids", "labels"} <= batch.keys():
        raise InspectionError("batch: a language model takes ids, or a dictionary with input_ids and labels")
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.dim() != 2 or ids.shape != labels.shape:
        shapes = f"{tuple(ids.shape)} and {tuple(labels.shape)}"
        raise InspectionError(f"batch: input_ids and labels of shapes {shapes} are not allowed; both are (rows, n)")
    if not bool((labels != IGNORED).any()):
        raise InspectionError(f"batch: no label counts; all are {IGNORED}")
    highest = max(int(ids.max()), int(labels.max()))
    if highest >= vocabulary or int(ids.min()) < 0:
        raise InspectionError(f"batch: id {highest} is not allowed; the model's vocabulary is 0 to {vocabulary - 1}")
    return batch


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    assert isinstance(model, LanguageModel)
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    hidden = model(**inputs, logits_to_keep=0).hidden
    return linear_cross_entropy(model.for_head(hidden), model.head_weight, batch["labels"])


def _logits_of(model: LanguageModel) -> Head:
    return lambda hidden: F.linear(hidden, model.head_weight)


def _label_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def make_subject(model: nn.Module, batch: Any, loss: LossFunction | None, head: Head | None) -> Subject:
    """The subject for a model's kind, the plain one for others."""
    if isinstance(model, LanguageModel):
        return LanguageSubject(model, batch, loss, head)
    if isinstance(model, VisionTransformer):
        return VisionSubject(model, batch, loss, head)
    return Subject(model, batch, loss, head)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
