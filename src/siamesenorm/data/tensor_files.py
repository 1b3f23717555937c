"""safetensors files written a tensor at a time: no more than one of them need lie in memory.

::

    tensors = LazyTensors({"w": Kind(torch.float32, (4, 4))}, read=lambda name: ...)
    with whole_file(path) as file:
        write_tensors(file, tensors, {"format": "pt"})
    write_shards(folder, tensors, shard_size=5 * 10**9)      # model-00001-of-00007.safetensors, …, and their index
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from siamesenorm.data.atomic import whole_file, write_json
from siamesenorm.errors import DataError

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
"""In the order of safetensors' own files, last first."""
ALIGNED = 8
"""Bytes of which the header's length is a multiple."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
"""As transformers counts them."""


class Kind(NamedTuple):
    """What a tensor is, beside its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LazyTensors:
    """Named tensors that are read, or gathered from other processes, when they are asked for."""

    kinds: Mapping[str, Kind]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> LazyTensors:
        """Tensors that are in memory."""
        kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls(kinds, tensors.__getitem__)

    def to(self, dtype: torch.dtype | None) -> LazyTensors:
        """The same with numbers that are not whole in another precision; None: as they are."""
        if dtype is None:
            return self
        kinds = {
            name: kind._replace(dtype=dtype) if kind.dtype.is_floating_point else kind
            for name, kind in self.kinds.items()
        }
        return LazyTensors(kinds, lambda name: self.read(name).to(kinds[name].dtype))

    def renamed(self, names: Mapping[str, str]) -> LazyTensors:
        """Those that `names` has, under its names for them."""
        old = {new: name for name, new in names.items()}
        return LazyTensors({new: self.kinds[name] for new, name in old.items()}, lambda new: self.read(old[new]))

    def only(self, names: Iterable[str]) -> LazyTensors:
        """Some of them."""
        return replace(self, kinds={name: self.kinds[name] for name in names})


def file_order(kinds: Mapping[str, Kind]) -> list[str]:
    """Names in the order in which a file has their tensors, so that every one is aligned."""
    places = {dtype: -place for place, dtype in enumerate(DTYPES)}
    for name, kind in kinds.items():
        if kind.dtype not in places:
            raise DataError(f"{name}: a safetensors file of ours takes no {kind.dtype}")
    return sorted(kinds, key=lambda name: (places[kinds[name].dtype], name))


def write_tensors(file: BinaryIO, tensors: LazyTensors, metadata: Mapping[str, str]) -> None:
    """A whole file, byte for byte as safetensors' own `save` writes it."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end, order = 0, file_order(tensors.kinds)
    for name in order:
        kind, start = tensors.kinds[name], end
        end += kind.size
        header[name] = {"dtype": DTYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNED)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor, kind = tensors.read(name), tensors.kinds[name]
        if (tensor.dtype, tuple(tensor.shape)) != (kind.dtype, kind.shape):
            raise DataError(
                f"{name}: it is {tensor.dtype} {tuple(tensor.shape)}, and {kind.dtype} {kind.shape} was said"
            )
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_shards(folder: Path, tensors: LazyTensors, shard_size: int) -> None:
    """``model.safetensors`` if one file can hold all within `shard_size` bytes, else numbered ones and an index."""
    shards = split(tensors.kinds, shard_size)
    files = [WHOLE] if len(shards) == 1 else [shard_name(number, len(shards)) for number in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        with whole_file(folder / file) as out:
            write_tensors(out, tensors.only(names), {"format": "pt"})
    if len(shards) > 1:
        total = sum(kind.size for kind in tensors.kinds.values())
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def split(kinds: Mapping[str, Kind], size: int) -> list[list[str]]:
    """Names in their own order, as many together as fit; a tensor that is larger stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, kind in kinds.items():
        if shards[-1] and filled + kind.size > size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += kind.size
    return shards


def shard_name(number: int, count: int) -> str:
    """A file's name as `from_pretrained` knows it."""
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def parse_size(text: str, field: str) -> int:
    """Bytes of a text such as 5GB, 500MB or 2GiB."""
    match = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", text)
    size = int(match[1]) * UNITS.get(match[2].upper(), 0) if match else 0
    if not 1 <= size < 2**63:
        raise DataError.not_allowed(field, text, "a size such as 5GB, 500MB or 2GiB")
    return size
