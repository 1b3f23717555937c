"""Folders with a config.json and weights that other libraries read: whatever these make of a damaged one is a sentence.

with read_by_others("checkpoint", folder):
    model = whole(AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True))
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from siamesenorm.data.reading import read_object, reason_of
from siamesenorm.data.tensors import tensor_shapes
from siamesenorm.errors import InteropError

LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "layers_per_block")
"""What configurations call a number of layers, each of which has weights."""
MATRICES = (("vocab_size", "hidden_size"), ("intermediate_size", "hidden_size"))
"""Height and width of matrices that every language model has."""
PACKED = 16
"""Weights that one number of a quantised file may stand for, at most."""


@contextlib.contextmanager
def read_by_others(field: str, folder: Path) -> Iterator[None]:
    """A block in which another library reads a foreign folder: whatever it raises, logs or draws is one sentence."""
    check_size(field, folder)
    try:
        with silenced():
            yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, InteropError):
        raise
    except BaseException as error:  # a panic of their Rust code is no Exception
        raise InteropError(f"{field}: {str(folder)!r} cannot be loaded: {reason_of(error)}") from None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """No log, no warning, no bar of transformers."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    bars = sys.modules.get("transformers.utils.logging")
    shown = bars is not None and bars.is_progress_bar_enabled()
    try:
        if bars is not None:
            bars.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if bars is not None and shown:
            bars.enable_progress_bar()


def check_size(field: str, folder: Path) -> None:
    """Raise where a configuration asks for far more than its weights hold: to make it would take hours, or all memory.

    Numbers that no check knows are left to the library, and to `whole`.
    """
    if not folder.is_dir():
        return  # whoever reads a file looks at its sizes
    place = folder / "config.json"
    config = read_object(place, field, strict=False)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return  # whoever reads it says what is missing
    shapes = [shape for file in files for shape in tensor_shapes(file, field).values()]
    check_shapes(field, place, config, shapes)


def check_shapes(field: str, place: Path, fields: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """The same for the fields of a configuration in a place, and the shapes of all its weights."""
    config = {name: value for name, value in fields.items() if isinstance(value, int)}
    held = PACKED * sum(map(math.prod, shapes))
    for name in LAYERS:
        if config.get(name, 0) > len(shapes):
            raise InteropError(
                f"{field}: {name} = {config[name]} in {str(place)!r} is not allowed; "
                f"the weights beside it are {len(shapes)} tensors"
            )
    for pair in MATRICES:
        if math.prod(config.get(name, 0) for name in pair) > held:
            said = " and ".join(f"{name} = {config[name]}" for name in pair)
            raise InteropError(f"{field}: {said} in {str(place)!r} are not allowed; the weights beside it are smaller")


def whole(loaded: tuple[Any, dict[str, Any]]) -> Any:
    """The model of a pair that ``output_loading_info`` gives; raises where the files had not all of its weights.

    Libraries draw what is missing by chance and say so in their log, if at all.
    """
    model, info = loaded
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        more = f" and lack {len(missing) - 1} more" if missing[1:] else ""
        raise ValueError(f"the weights have no {missing[0]}{more}")
    return model
