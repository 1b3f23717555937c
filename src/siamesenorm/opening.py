"""A trained model from wherever it lies: a run, a Hugging Face folder of ours or another's, a GGUF file.

::

    model, tokenizer = siamesenorm.load("runs/lm-tiny")
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from siamesenorm.language_folder import is_model

if TYPE_CHECKING:
    import torch
    from torch import nn

    from siamesenorm.data.tokenizer import Tokenizer
    from siamesenorm.models.lm import LanguageModel


class Loaded(NamedTuple):
    """A model in evaluation mode, and its tokenizer where it has one."""

    model: nn.Module
    tokenizer: Tokenizer | None


def load(path: Path | str, *, dtype: torch.dtype | None = None) -> Loaded:
    """The model at a path, ready for use, and its tokenizer.

    path: the folder of a run of any task, a Hugging Face folder that this package wrote (exported, imported, grafted)
    or another's of a kind that it can import, or a GGUF file. dtype: of its weights; default: float32.
    What cannot be loaded raises a `ValueError` of one sentence.
    """
    place = Path(path)
    if is_run(place):
        from siamesenorm.train.trained import open_trained, run_tokenizer

        opened = open_trained(place)
        tokenizer = run_tokenizer(place, opened.config) if opened.config.task == "language" else None
        return Loaded(opened.model.to(dtype), tokenizer)
    from siamesenorm.language_folder import open_model_folder

    model, tokenizer = open_model_folder(check_model(place, "path"), "path")
    return Loaded(model.to(dtype).eval(), tokenizer)


@dataclass(frozen=True)
class SourceModel:
    """A language model to be written elsewhere: with a tokenizer of ours or of transformers, settings of generation."""

    model: LanguageModel
    tokenizer: Any
    generation: Any


def open_source(path: Path, field: str) -> SourceModel:
    """The language model of a run, of a Hugging Face folder or of a GGUF file; `field` begins an error."""
    if not is_model(path):
        from siamesenorm.train.trained import open_language_model

        trained = open_language_model(path)
        return SourceModel(trained.model, trained.tokenizer, None)
    from siamesenorm.language_folder import model_of

    model = model_of(path, field, as_it_lies=True)
    from siamesenorm.interop.pretrained.convert import their_generation, their_tokenizer

    return SourceModel(model, their_tokenizer(path), their_generation(path))


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run."""
    from siamesenorm.train.folder import CONFIG

    return (path / CONFIG).is_file() and not is_model(path)


def check_model(path: Path, field: str) -> Path:
    """Raise unless there is a model at a path."""
    from siamesenorm.data.reading import named_path
    from siamesenorm.errors import DataError

    if not is_model(named_path(path, field)):
        raise DataError(f"{field}: {str(path)!r} is no model; it takes a run, a Hugging Face folder, or a GGUF file")
    return path
