"""A model of ours as a GGUF file, where it is an architecture that llama.cpp has (extra: gguf)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from siamesenorm.data.atomic import named, whole_file
from siamesenorm.data.removal import scratch_folder
from siamesenorm.errors import InteropError
from siamesenorm.interop.gguf.reader import GgufFile
from siamesenorm.interop.gguf.tokenizer import tokenizer_metadata
from siamesenorm.interop.gguf.translation import (
    ARCHITECTURES,
    SCALED_ANGLES,
    SPECIAL,
    angle_factors,
    file_metadata,
    file_name,
    permuted_rows,
)
from siamesenorm.interop.pretrained.stock import can_carry, stock_model
from siamesenorm.models.lm import LanguageModel
from siamesenorm.version import __version__

MARK = "siamesenorm.version"
"""By this, a later export knows a file that it may replace."""


def export_gguf(
    model: LanguageModel, file: Path | str, *, tokenizer: Any = None, dtype: torch.dtype | None = None
) -> Path:
    """Write a GGUF file; vectors in float32, matrices in `dtype` (default: as they are). It is whole or not there.

    A model that is none of the architectures raises `InteropError`; so does a tokenizer that GGUF has no name for.
    """
    import gguf
    import numpy as np

    from siamesenorm.interop.huggingface.tokenizer import for_transformers

    name = next((name for name, theirs in ARCHITECTURES.items() if can_carry(model, theirs)), "llama")
    try:
        theirs, tensors = stock_model(model, ARCHITECTURES[name], dtype)
    except InteropError as error:
        raise InteropError(f"{error.sentence}; gguf takes models that are {', '.join(ARCHITECTURES)}") from None
    metadata: dict[str, Any] = {MARK: __version__, f"{gguf.Keys.Tokenizer.MODEL}": "none"}
    reading = None if tokenizer is None else for_transformers(tokenizer, theirs.vocab_size)
    for field in SPECIAL if reading is not None else ():
        setattr(theirs, field, getattr(reading, field))
    metadata |= dict(file_metadata(theirs, name))
    if reading is not None:
        metadata |= dict(tokenizer_metadata(reading, theirs.vocab_size))
    target = Path(file)
    with named(target), scratch_folder(target.absolute().parent, target.name) as folder:
        writer = gguf.GGUFWriter(folder / "model.gguf", name)
        for key, value in metadata.items():
            add_value(writer, key, value)
        if theirs.rope_parameters["rope_type"] == "llama3":
            factors = angle_factors(theirs.rope_parameters, metadata[f"{name}.rope.dimension_count"] // 2)
            writer.add_tensor(SCALED_ANGLES, factors.numpy().astype(np.float32))
        heads = theirs.num_attention_heads, theirs.num_key_value_heads
        for folder_tensor, tensor in tensors.items():
            place = file_name(folder_tensor, name)
            add_tensor(writer, place, permuted_rows(tensor, place, name, *heads))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with (folder / "model.gguf").open("rb") as made, whole_file(target) as out:
            shutil.copyfileobj(made, out)
    return target


def add_value(writer: Any, key: str, value: Any) -> None:
    """A value of metadata in the kind that llama.cpp expects."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_tensor(writer: Any, name: str, tensor: torch.Tensor) -> None:
    """A tensor: vectors in float32, which engines expect; bfloat16 as its bits."""
    import gguf

    tensor = tensor.float() if tensor.dim() == 1 else tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())


def is_gguf_export(file: Path) -> bool:
    """Whether a file was written by `export_gguf`."""
    try:
        return MARK in GgufFile.open(file, "target").metadata
    except InteropError:
        return False
