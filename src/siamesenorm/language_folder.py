"""A language model from any Hugging Face folder, ours or another's, or GGUF file, with its tokenizer if it has one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siamesenorm.data.tokenizer import Tokenizer
    from siamesenorm.models.lm import LanguageModel, LMConfig

OURS = "siamesenorm"
"""What config.json of a folder that this package wrote says of its model_type."""


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has a config.json, as models of transformers have."""
    return (folder / "config.json").is_file()


def is_model(path: Path) -> bool:
    """Whether a path is a Hugging Face folder or a GGUF file."""
    return is_model_folder(path) or (path.suffix.lower() == ".gguf" and path.is_file())


def open_model_folder(folder: Path, field: str) -> tuple[LanguageModel, Tokenizer | None]:
    """The folder's model in float32, and its tokenizer; `field` is what an error begins with."""
    from siamesenorm.data.tokenizer import FILE, end_token, load_tokenizer

    model = model_of(folder, field)
    if folder.is_file():
        return model, gguf_tokenizer(folder)
    if not (folder / FILE).is_file():
        return model, None
    return model, load_tokenizer(folder / FILE, end_token(folder))


def model_of(folder: Path, field: str, *, as_it_lies: bool = False) -> LanguageModel:
    """The folder's model in float32, or in the precision that it lies in."""
    from siamesenorm.data.reading import read_object

    package, foreign, loading = _rooms(folder, field)
    if folder.is_dir() and read_object(folder / "config.json", field, strict=False).get("model_type") == OURS:
        with foreign.read_by_others(field, folder):
            options = {"local_files_only": True, "output_loading_info": True}
            loaded = foreign.whole(package.SiameseNormForCausalLM.from_pretrained(str(folder), **options))
        ours: LanguageModel = package.to_language_model(loaded)
        return ours if as_it_lies else ours.float()
    import torch

    theirs: LanguageModel = loading.load(folder, dtype=None if as_it_lies else torch.float32)
    return theirs


def gguf_tokenizer(file: Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file, as one of ours."""
    from siamesenorm.data.tokenizer import tokenizer_from_json

    convert = importlib.import_module("siamesenorm.interop.pretrained.convert")
    theirs = convert.their_tokenizer(file)
    return None if theirs is None else tokenizer_from_json(theirs.backend_tokenizer.to_str(), theirs.eos_token)


def model_config_of(folder: Path, field: str) -> LMConfig:
    """The configuration of the folder's model; no weight is read."""
    from siamesenorm.data.reading import read_object

    package, foreign, loading = _rooms(folder, field)
    if folder.is_dir() and read_object(folder / "config.json", field, strict=False).get("model_type") == OURS:
        with foreign.read_by_others(field, folder):
            ours: LMConfig = package.SiameseNormConfig.from_pretrained(str(folder)).to_lm_config()
        return ours
    theirs: LMConfig = loading.config_of(folder)[0]
    return theirs


def _rooms(folder: Path, field: str) -> tuple[Any, Any, Any]:
    """The rooms that know such folders, or one sentence about what is missing."""
    from siamesenorm.errors import DataError

    try:
        names = ("huggingface", "foreign_folder", "pretrained.load")
        first, second, third = (importlib.import_module(f"siamesenorm.interop.{name}") for name in names)
    except ImportError as error:
        what = f"{field}: {str(folder)!r} is a Hugging Face folder and"
        raise DataError.missing_package(what, error.name or "transformers", "hf") from None
    return first, second, third
