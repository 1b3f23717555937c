"""What the command line inspects: the model of a run or of a Hugging Face folder, and a text or images for it."""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from siamesenorm.data import ValidationData
from siamesenorm.data.packing import make_batch
from siamesenorm.data.reading import read_object
from siamesenorm.data.texts import embedded_tokens
from siamesenorm.data.tokenizer import FILE, ByteTokenizer, Tokenizer
from siamesenorm.data.tokens import Tokens, tokens_in_memory
from siamesenorm.errors import DataError, InspectionError
from siamesenorm.lab.inspection.subject import LossFunction
from siamesenorm.models.dit import DiT
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.vit import VisionTransformer
from siamesenorm.opening import OURS, open_language
from siamesenorm.tasks import find_task
from siamesenorm.tasks.corpora import open_held_out
from siamesenorm.tasks.images import ImageTask
from siamesenorm.train.facts import warn_of_changed_data
from siamesenorm.train.folder import CONFIG, RunFolder
from siamesenorm.train.trained import open_language_model, open_trained

LONGEST = 1024
"""Tokens of a sequence where the folder does not say how the model was trained."""
BYTES_PER_TOKEN = 64
"""Of a text, so many bytes are read for every token wanted: more than enough."""
EMBEDDED_TEXT = "python-docs"


@dataclass(frozen=True)
class InspectionSource:
    """A model, a batch of text or images, and what both are."""

    model: nn.Module
    batch: dict[str, Tensor]
    facts: dict[str, Any]
    loss: LossFunction | None = None
    """Where the kind of model does not say it."""


@dataclass(frozen=True)
class OpenedModel:
    """A model with what its folder says about it."""

    model: LanguageModel
    tokenizer: Tokenizer
    sequence_length: int
    document_masking: bool
    held_out: Any
    """Gives the model's own held-out texts; None where the folder names none."""
    facts: dict[str, Any]


def open_inspected(folder: Path, text: Path | None, tokens: int) -> InspectionSource:
    """The model in a folder and about so many tokens of a text file, or of the text the model was validated on."""
    task = RunFolder(folder).config().task if (folder / CONFIG).is_file() else "language"
    if task != "language":
        if text is not None:
            raise InspectionError.refused("--text", text, f"the run in {str(folder)!r} reads images")
        return open_images_of(folder, task, tokens)
    found = open_folder(folder)
    if text is not None:
        texts = [read_text(text, found.tokenizer, tokens)]
    elif found.held_out is not None:
        warn_of_changed_data(folder, RunFolder(folder).config())
        texts = found.held_out()
    else:
        texts = [embedded_tokens(EMBEDDED_TEXT, "validation", tokenizer=found.tokenizer)]
    size = found.model.config.vocab_size
    for each in texts:
        if each.vocab_size is not None and each.vocab_size > size:
            raise InspectionError(f"text: {each.name!r} has {each.vocab_size} kinds of tokens; the model knows {size}")
    length = max(1, min(found.sequence_length, tokens, max(map(len, texts))))
    share, masking = tokens // len(texts), found.document_masking
    batches = [_batch(each, length, share, masking, spread=text is None) for each in texts]
    batch = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
    ids = batch["input_ids"].numpy()
    facts = {
        **found.facts,
        "text": ", ".join(each.name for each in texts),
        "sequences": ids.shape[0],
        "sequence_length": length,
        "ids_sha256": hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
    }
    return _on_device(found.model, batch, facts)


def _on_device(
    model: nn.Module, batch: dict[str, Tensor], facts: dict[str, Any], loss: LossFunction | None = None
) -> InspectionSource:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return InspectionSource(model.to(device), batch, {**facts, "parameters": parameters, "device": device.type}, loss)


def open_images_of(folder: Path, task_name: str, tokens: int) -> InspectionSource:
    """The model of a run, held-out images of about so many tokens, what both are, and the loss of a diffusion."""
    trained = open_trained(folder, task_name)
    model, config = trained.model, trained.config
    assert isinstance(model, (DiT, VisionTransformer))
    count = max(1, round(tokens / model.config.tokens))
    spread = config.evaluation.model_copy(update={"images": count})
    task = find_task(task_name).for_evaluation(config.model_copy(update={"evaluation": spread}))
    assert isinstance(task, ImageTask)
    if task.held_out is None:
        raise InspectionError(f"run: {str(folder)!r} has no held-out images")
    warn_of_changed_data(folder, config)
    batch = next(task.held_out.batches(count))
    facts = {
        "kind": "run",
        "folder": str(folder),
        "step": trained.step,
        "images": len(batch["label"]),
        "image_set": task.held_out.images.name,
        "images_sha256": task.held_out.images.fingerprint,
    }
    # A classifier's loss and predictions are known by its kind; how a diffusion is trained is the task's to say.
    loss = None if isinstance(model, VisionTransformer) else lambda model, batch: task.loss(model, batch).total
    return _on_device(model, batch, facts, loss)


def open_folder(folder: Path) -> OpenedModel:
    """The language model and tokenizer of a run, or of a folder that this package exported."""
    if not folder.is_dir():
        raise InspectionError(f"run: {str(folder)!r} is not a folder; it takes a run or an exported model")
    if (folder / CONFIG).is_file():
        trained = open_language_model(folder)
        data: Any = trained.config.data
        facts = {"kind": "run", "folder": str(folder), "step": trained.step}
        held_out = partial(open_held_out, data)
        shape = data.sequence_length, data.document_masking
        return OpenedModel(trained.model, trained.tokenizer, *shape, held_out, facts)
    if not is_exported(folder):
        raise InspectionError(
            f"run: {str(folder)!r} is neither a run, which has a {CONFIG}, nor an exported model, whose config.json "
            f"says model_type {OURS!r}"
        )
    model, tokenizer = open_language(folder, "run")
    if tokenizer is None and model.config.vocab_size != ByteTokenizer.vocab_size:
        raise InspectionError(f"run: {str(folder)!r} has no {FILE} to read a text with")
    length = min(model.config.max_length, LONGEST)
    facts = {"kind": "huggingface", "folder": str(folder)}
    return OpenedModel(model, tokenizer or ByteTokenizer(), length, False, None, facts)


def is_exported(folder: Path) -> bool:
    """Whether a folder holds a model that this package exported."""
    try:
        return read_object(folder / "config.json", "run", strict=False).get("model_type") == OURS
    except DataError:
        return False


def read_text(file: Path, tokenizer: Tokenizer, tokens: int) -> Tokens:
    """The start of a text file, no longer than needed."""
    try:
        with open(file, "rb") as opened:
            raw = opened.read(BYTES_PER_TOKEN * tokens)
    except OSError as error:
        raise DataError.failed("text", file, "read", error) from None
    try:
        # A sign that is cut off at the end of what was read is left out.
        text = codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) < BYTES_PER_TOKEN * tokens)
    except UnicodeDecodeError as error:
        raise DataError(f"text: {str(file)!r} is not UTF-8 at byte {error.start}; it takes a text file") from None
    if not text.strip():
        raise DataError(f"text: {str(file)!r} holds no text")
    return tokens_in_memory([text], tokenizer, str(file))


def _batch(tokens: Tokens, length: int, wanted: int, document_masking: bool, spread: bool) -> dict[str, Tensor]:
    """Sequences from the start of a text, or spread evenly over it where it has more than are wanted."""
    sequences = max(1, round(wanted / length))
    if spread and len(tokens) > sequences * length:
        starts = np.arange(sequences) * (len(tokens) - length - 1) // max(1, sequences - 1)
        return make_batch(tokens.gather(starts, length + 1), tokens.eos_id if document_masking else None)
    data = ValidationData(tokens, length, document_masking=document_masking, sequences=sequences)
    (batch,) = data.batches(data.sequences)
    return batch
