"""Files from anywhere, read within limits: bytes, text and JSON; what is wrong is one sentence.

facts = read_json(folder / "status.json", "run")
index = read_model(folder / "index.json", Index, "data")

Every JSON file of the package is read here. `field` is what an error begins with: the name of the option, argument or
setting that named the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from siamesenorm.errors import DataError

LARGEST = 2**30
"""Bytes of a file that is read whole."""
DEEPEST = 100
"""Lists and objects within each other; what nests deeper is made to harm."""
DIGITS = 20
"""Of whole numbers, sign included: seeds have as many, counts that arrays could take are smaller."""
HALVES = re.compile("[\ud800-\udfff]")

Model = TypeVar("Model", bound=BaseModel)


class MissingError(DataError):
    """There is no such file."""


def reason_of(error: BaseException, longest: int = 200) -> str:
    """Why a library or the system refused, in a few words on one line."""
    if isinstance(error, ValidationError):
        return first_of(error)[:longest]
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split())[:longest] or type(error).__name__


def first_of(error: ValidationError) -> str:
    """Where the first thing is that pydantic found wrong, and what."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole file'}: {first['msg'].removeprefix('Value error, ')}"


def named_path(name: str | Path, field: str) -> Path:
    """The path of a name, be something there or not, where this system can have such a name at all."""
    try:
        os.lstat(name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # what it is wanted for decides whether it must be there
    except (OSError, ValueError) as error:  # too long, with a NUL, or with what the system has no bytes for
        raise DataError.not_allowed(field, str(name), f"a name that this system can have: {reason_of(error)}") from None
    return Path(name)


def read_bytes(path: Path, field: str, largest: int = LARGEST) -> bytes:
    """The content of a file."""
    try:
        with open(path, "rb") as file:
            content = file.read(largest + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"{field}: {str(path)!r} is not there") from None
    except (OSError, ValueError) as error:  # a name with a NUL or that the system cannot write is no OSError
        raise DataError.failed(field, path, "read", error) from error
    if len(content) > largest:
        raise DataError(f"{field}: {str(path)!r} is too large; it takes up to {largest} bytes")
    return content


def read_text(path: Path, field: str, largest: int = LARGEST) -> str:
    """The text of a file in UTF-8."""
    try:
        return read_bytes(path, field, largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{field}: {str(path)!r} is not UTF-8 text, see byte {error.start}") from None


def read_json(path: Path, field: str, *, strict: bool = True) -> Any:
    """What a JSON file holds; see `parse_json`."""
    content = read_bytes(path, field)
    try:
        return parse_json(content, strict=strict)
    except ValueError as error:
        raise DataError(f"{field}: {str(path)!r} is not sound JSON: {reason_of(error)}") from None


def read_object(path: Path, field: str, *, strict: bool = True) -> dict[str, Any]:
    """What a JSON file holds, where that is an object."""
    value = read_json(path, field, strict=strict)
    if not isinstance(value, dict):
        raise DataError(f"{field}: {str(path)!r} is not sound: it takes a JSON object")
    return value


def read_model(path: Path, kind: type[Model], field: str) -> Model:
    """What a JSON file holds, where that is as its kind demands it."""
    content = read_bytes(path, field)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise DataError(f"{field}: {str(path)!r} is damaged at {first_of(error)}") from None


def parse_json(text: bytes | str, *, strict: bool = True) -> Any:
    """The value of a JSON text; raises ValueError, and nothing else, where it is none or is made to harm.

    strict: refuse what no file of this package holds, but others may: NaN, enormous numbers, halves of characters.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = (_STRICT if strict else _ANY).decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    if (strict and "\\u" in text) or text.count("[") + text.count("{") > DEEPEST:
        _check(value, strict)
    return value


def _check(value: Any, strict: bool) -> None:
    """Refuse what later steps could not go through or write down: endless nests, halves of characters."""
    level = [value]
    for _ in range(DEEPEST):
        for part in level if strict else ():
            if isinstance(part, str) and not part.isascii() and HALVES.search(part):
                raise ValueError(f"{part[:40]!r} holds half a surrogate pair")
        level = [inner for part in level for inner in _inside(part)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inside(part: Any) -> Any:
    if isinstance(part, dict):
        return [*part, *part.values()]
    return part if isinstance(part, list) else ()


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"{text[:40]} is too large")
    return int(text)


_STRICT = json.JSONDecoder(parse_constant=_constant, parse_float=_float, parse_int=_int)
_ANY = json.JSONDecoder()
