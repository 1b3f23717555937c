"""From another's Hugging Face folder or GGUF file to a folder of ours, with tokenizer and settings of generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_folder import read_by_others
from siamesenorm.interop.gguf.reader import GgufFile
from siamesenorm.interop.gguf.tokenizer import read_tokenizer
from siamesenorm.interop.pretrained.load import is_gguf, load, their_config
from siamesenorm.interop.staging import check_target

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(
    source: Path | str,
    target: Path | str,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
    remote_code: bool = True,
    overwrite: bool = False,
) -> Path:
    """Import a source into a new folder that `siamesenorm.interop.huggingface.export` would write; see `load`.

    tokenizer: whether it comes along. remote_code, overwrite: as in `export`. The folder appears when it is complete
    and not before.
    """
    from siamesenorm.interop.huggingface import export, from_language_model

    folder = Path(source)
    check_target(Path(target), overwrite)
    if Path(target).resolve().is_relative_to(folder.resolve()):
        raise InteropError.refused("target", target, "it lies in the source, which stays as it is")
    theirs = their_config(folder)
    reading, generation = their_tokenizer(folder) if tokenizer else None, their_generation(folder)
    special = {name: getattr(theirs, name, None) for name in SPECIAL}
    model = from_language_model(load(folder, dtype=dtype), **special)
    options: dict[str, Any] = {"remote_code": remote_code, "overwrite": overwrite, "generation": generation}
    return export(model, target, tokenizer=reading, **options)


def their_tokenizer(folder: Path) -> Any:
    """The source's tokenizer, where it has one; no code of a folder is run."""
    from transformers import AutoTokenizer

    if is_gguf(folder):
        return read_tokenizer(GgufFile.open(folder, "source").metadata)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    with read_by_others("source", folder):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def their_generation(folder: Path) -> Any:
    """The folder's settings of generation, where it has some."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return None
    with read_by_others("source", folder):
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)
