"""Tensors of a safetensors file; what is wrong with one is one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from siamesenorm.data.reading import named_path
from siamesenorm.data.tensor_files import DTYPES, Kind
from siamesenorm.errors import DataError


def read_tensors(path: Path | str, field: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and the texts of its header."""
    with _opened(path, field) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def tensor_shapes(path: Path | str, field: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a file by name; nothing but the header is read."""
    with _opened(path, field) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def tensor_kinds(path: Path | str, field: str) -> dict[str, Kind]:
    """What the tensors of a file are, by name; nothing but the header is read."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found = {}
    with _opened(path, field) as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            found[name] = Kind(dtypes[part.get_dtype()], tuple(part.get_shape()))
    return found


def read_tensor(path: Path | str, name: str, field: str) -> Tensor:
    """One tensor of a file."""
    with _opened(path, field) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def each_tensor(path: Path | str, field: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file, one after the other."""
    with _opened(path, field) as file:
        names = list(file.keys())
    for name in names:
        with _opened(path, field) as file:
            tensor = file.get_tensor(name)
        yield name, tensor


def read_header(path: Path | str, field: str) -> dict[str, str]:
    """The texts of a file's header."""
    with _opened(path, field) as file:
        return file.metadata() or {}


@contextlib.contextmanager
def _opened(path: Path | str, field: str) -> Iterator[Any]:
    from safetensors import safe_open

    if not named_path(path, field).is_file():
        raise DataError(f"{field}: {str(path)!r} is not a file; it takes a safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # a forged header fails here and there, in kinds of its own
        raise DataError.failed(field, path, "read", error) from None
