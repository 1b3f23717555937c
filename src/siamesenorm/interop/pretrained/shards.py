"""The tensors of a Hugging Face folder, one after the other: no more than one lies in memory beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from siamesenorm.data.reading import read_object
from siamesenorm.data.tensors import each_tensor
from siamesenorm.errors import InteropError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, as its index names them."""
    if (folder / INDEX).is_file():
        listed = read_object(folder / INDEX, "source").get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise InteropError(f"source: {str(folder / INDEX)!r} is damaged: it takes a weight_map of names to files")
        names = sorted(set(listed.values()))
        for name in names:
            if name != Path(name).name:
                raise InteropError(
                    f"source: {name!r} in {str(folder / INDEX)!r} is not allowed; it takes a file's name"
                )
    elif (folder / WHOLE).is_file():
        names = [WHOLE]
    else:
        raise InteropError(f"source: {str(folder)!r} has neither {WHOLE} nor {INDEX}; it takes safetensors files")
    for name in names:
        if not (folder / name).is_file():
            raise InteropError(f"source: {str(folder / name)!r} is not there; {INDEX} names it")
    return [folder / name for name in names]


def tensors_of(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all files."""
    for path in files:
        yield from each_tensor(path, "source")
