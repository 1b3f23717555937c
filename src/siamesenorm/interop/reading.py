"""Folders that other libraries read: whatever these raise or log becomes one sentence."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from siamesenorm.data.reading import reason_of
from siamesenorm.interop.errors import InteropError


@contextlib.contextmanager
def read_by_others(field: str, folder: object) -> Iterator[None]:
    """A block in which another library reads somebody's folder: whatever it raises or logs becomes one sentence."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, InteropError):
        raise
    except BaseException as error:  # a panic of their Rust code is no Exception
        raise InteropError(f"{field}: {str(folder)!r} cannot be loaded: {reason_of(error)}") from None
    finally:
        logging.disable(level)
