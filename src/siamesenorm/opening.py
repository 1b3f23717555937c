"""A trained model from wherever it lies: a run, a Hugging Face folder of ours or another's, a GGUF file.

::

    model, tokenizer = siamesenorm.load("runs/lm-tiny")
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from siamesenorm.data.tokenizer import Tokenizer
    from siamesenorm.models.lm import LanguageModel, LMConfig

OURS = "siamesenorm"
"""What config.json of a folder that this package wrote says of its model_type."""


def is_model(path: Path) -> bool:
    """Whether a path is a Hugging Face folder or a GGUF file."""
    return (path / "config.json").is_file() or (path.suffix.lower() == ".gguf" and path.is_file())


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a run."""
    from siamesenorm.train.folder import CONFIG

    return (path / CONFIG).is_file() and not is_model(path)


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
    from siamesenorm.data.reading import named_path
    from siamesenorm.errors import DataError

    place = named_path(path, "path")
    if is_run(place):
        from siamesenorm.train.trained import open_trained, run_tokenizer

        opened = open_trained(place)
        tokenizer = run_tokenizer(place, opened.config) if opened.config.task == "language" else None
        return Loaded(opened.model.to(dtype), tokenizer)
    if not is_model(place):
        raise DataError(f"path: {str(path)!r} is no model; it takes a run, a Hugging Face folder, or a GGUF file")
    model, tokenizer = open_language(place, "path")
    return Loaded(model.to(dtype), tokenizer)


def open_language(path: Path, field: str) -> tuple[LanguageModel, Tokenizer | None]:
    """The language model of a run, folder or file in float32, to be evaluated; `field` is what an error begins with."""
    from siamesenorm.data.tokenizer import FILE, end_token, load_tokenizer, tokenizer_from_json

    if is_run(path):
        from siamesenorm.train.trained import open_language_model

        trained = open_language_model(path)
        return trained.model, trained.tokenizer
    model, tokenizer = model_of(path, field).eval(), None
    if path.is_file():
        from siamesenorm.interop.pretrained.convert import their_tokenizer

        theirs = their_tokenizer(path)
        if theirs is not None:
            tokenizer = tokenizer_from_json(theirs.backend_tokenizer.to_str(), theirs.eos_token)
    elif (path / FILE).is_file():
        tokenizer = load_tokenizer(path / FILE, end_token(path))
    return model, tokenizer


def model_of(path: Path, field: str, *, as_it_lies: bool = False) -> LanguageModel:
    """The model of a Hugging Face folder or GGUF file in float32, or in the precision that it lies in."""
    if _is_ours(path, field):
        from siamesenorm.interop.foreign_folder import read_by_others, whole
        from siamesenorm.interop.huggingface import SiameseNormForCausalLM

        with read_by_others(field, path):
            options = {"local_files_only": True, "output_loading_info": True}
            ours = whole(SiameseNormForCausalLM.from_pretrained(str(path), **options)).to_language_model()
        return ours if as_it_lies else ours.float()
    import torch

    from siamesenorm.interop.pretrained.load import load as load_theirs

    return load_theirs(path, dtype=None if as_it_lies else torch.float32)


def model_config_of(path: Path, field: str) -> LMConfig:
    """The configuration of the model of a Hugging Face folder or GGUF file; no weight is read."""
    if _is_ours(path, field):
        from siamesenorm.interop.foreign_folder import read_by_others
        from siamesenorm.interop.huggingface import SiameseNormConfig

        with read_by_others(field, path):
            return SiameseNormConfig.from_pretrained(str(path)).to_lm_config()
    from siamesenorm.interop.pretrained.load import config_of

    return config_of(path)[0]


def _is_ours(path: Path, field: str) -> bool:
    """Whether this package wrote a folder; one sentence where transformers is missing."""
    from siamesenorm.data.reading import read_object
    from siamesenorm.errors import DataError

    with DataError.importing(f"{field}: {str(path)!r} is a Hugging Face folder and", "transformers", "hf"):
        import siamesenorm.interop.huggingface  # noqa: F401
    return path.is_dir() and read_object(path / "config.json", field, strict=False).get("model_type") == OURS


@dataclass(frozen=True)
class SourceModel:
    """A language model to be written elsewhere: with a tokenizer of ours or of transformers, settings of generation."""

    model: LanguageModel
    tokenizer: Any
    generation: Any = None


def open_source(path: Path, field: str, *, as_it_lies: bool = True) -> SourceModel:
    """The language model of a run, of a Hugging Face folder or of a GGUF file; `field` begins an error."""
    if not is_model(path):
        from siamesenorm.train.trained import open_language_model

        trained = open_language_model(path)
        return SourceModel(trained.model, trained.tokenizer)
    model = model_of(path, field, as_it_lies=as_it_lies)
    from siamesenorm.interop.pretrained.convert import their_generation, their_tokenizer

    return SourceModel(model, their_tokenizer(path), their_generation(path))
