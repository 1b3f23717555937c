"""The one exception of the data room, and the imports that an extra brings."""

from __future__ import annotations

import importlib
from typing import Any

from siamesenorm.suggestion import Suggesting


class DataError(Suggesting):
    """A source, setting, token file or tokenizer that cannot be used; the message is one sentence."""


def import_extra(module: str, purpose: str, extra: str = "data") -> Any:
    """A module that an extra brings, or one sentence that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {package!r}; install it with pip install 'siamesenorm[{extra}]'"
        ) from None
