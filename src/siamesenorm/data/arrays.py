"""NumPy's .npy and .npz files, read within what they really hold: no header is believed, no pickle is opened.

array = map_array(path, "latents")                  # stays on the disk until it is touched
arrays = read_arrays(path, ("mu", "sigma"), "statistics")
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from siamesenorm.data.reading import LARGEST, reason_of
from siamesenorm.errors import DataError

KINDS = "biuf"
"""Truth values, whole numbers, floats."""
MOST_DIMENSIONS = 32
ENDING = ".npy"


class Header(NamedTuple):
    """What an array is, as far as its file can hold it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_columns: bool
    offset: int
    """Bytes of the file before the array."""

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: IO[bytes], size: int) -> Header:
    """The header at the start of an .npy file of `size` bytes; raises ValueError where it is not true."""
    readers = {(1, 0): numpy_format.read_array_header_1_0, (2, 0): numpy_format.read_array_header_2_0}
    try:
        shape, by_columns, dtype = readers[numpy_format.read_magic(file)](file)
    except Exception as error:  # a header is text that Python parses: damaged, it fails in many ways
        raise ValueError(f"its header cannot be read ({reason_of(error, 60)})") from None
    found = Header(tuple(shape), dtype, by_columns, file.tell())
    if dtype.kind not in KINDS:
        raise ValueError(f"its header says {dtype}; it takes numbers")
    if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0 or found.size > size - found.offset:
        raise ValueError(f"its header says {dtype} {shape!s:.80}, which is not what {size} bytes can hold")
    return found


def array_header(path: Path, field: str) -> Header:
    """The header of a file."""
    with _reading(path, field), open(path, "rb") as file:
        return read_header(file, path.stat().st_size)


def map_array(path: Path, field: str) -> NDArray[Any]:
    """The array of a file, read only and only when touched."""
    header = array_header(path, field)
    if not header.size:
        return np.empty(header.shape, header.dtype)
    with _reading(path, field):
        order: Any = "F" if header.by_columns else "C"
        return np.memmap(path, header.dtype, mode="r", offset=header.offset, shape=header.shape, order=order)


def read_array(path: Path, field: str, largest: int = LARGEST) -> NDArray[Any]:
    """The array of a file, in memory."""
    mapped = map_array(path, field)
    if mapped.nbytes > largest:
        raise DataError(f"{field}: {str(path)!r} has {mapped.nbytes} bytes; it takes up to {largest}")
    return np.array(mapped)


def array_names(path: Path) -> list[str]:
    """Names of the arrays in an .npz; none where it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(ENDING) for name in archive.namelist() if name.endswith(ENDING)]
    except Exception:  # damaged archives fail in many ways; who reads one says how
        return []


def read_arrays(path: Path, names: Collection[str], field: str, largest: int = LARGEST) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that an .npz has, in memory."""
    found = {}
    for name in set(names) & {*array_names(path)}:
        with open_member(path, name, field) as (file, header):
            if header.size > largest:
                raise DataError(f"{field}: {name} of {str(path)!r} has {header.size} bytes; it takes up to {largest}")
            order: Any = "F" if header.by_columns else "C"
            found[name] = np.frombuffer(take(file, header.size), header.dtype).reshape(header.shape, order=order).copy()
    return found


@contextlib.contextmanager
def open_member(path: Path, name: str, field: str) -> Iterator[tuple[IO[bytes], Header]]:
    """An array of an .npz behind its header, to be read with `take`, and that header."""
    with _reading(path, field), zipfile.ZipFile(path) as archive:
        member = f"{name}{ENDING}"
        with archive.open(member) as file:
            yield file, read_header(file, archive.getinfo(member).file_size)


def take(file: IO[bytes], size: int) -> bytes:
    """So many bytes; raises ValueError where the file ends before."""
    data = file.read(size)
    if len(data) < size:
        raise ValueError("it ends before its array does")
    return data


@contextlib.contextmanager
def _reading(path: Path, field: str) -> Iterator[None]:
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # zipfile and its unpackers raise many kinds for damaged files
        raise DataError(f"{field}: {str(path)!r} is not a sound NumPy file: {reason_of(error)}") from None
