"""A run in one call of Python, and where a run lies that nobody has named a folder for.

result = siamesenorm.train("lm-tiny", topology="siamese", steps=200)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siamesenorm.train.display import ConsoleDisplay, Display
from siamesenorm.train.loop import train
from siamesenorm.train.overrides import as_overrides
from siamesenorm.train.progress import Result
from siamesenorm.train.recipes import resolve

LONGEST = 80
"""Characters of a folder's name that overrides may take."""


def train_recipe(
    recipe: str | Path,
    /,
    *,
    folder: Path | str | None = None,
    restart: bool = False,
    quiet: bool = False,
    at: int | None = None,
    **fields: Any,
) -> Result:
    """Train a recipe; the same call again goes on where it was interrupted.

    ::

        result = siamesenorm.train("lm-tiny", topology="siamese", lr=3e-3, steps=200)
        result.state, result.loss, result.evaluation, result.folder

    recipe: a name that `siamesenorm recipes` lists, a YAML file, or the folder of a run.
    folder: of the run; by default runs/ with the names of recipe and fields. restart: begin anew there.
    at: of a run's folder, go on from its checkpoint of this step, and not from the newest.
    fields: what differs from the recipe, as on the command line; ``**{"model.blocks": 8}`` where a name has a dot.
    """
    overrides = as_overrides(fields)
    config = resolve(str(recipe), overrides)
    title = config.about or " ".join([str(recipe), *overrides])
    out = default_folder(str(recipe), overrides, at is not None) if folder is None else Path(folder)
    display = Display() if quiet else ConsoleDisplay(_console(), f"{title}\n{out}")
    return train(config, out, mode="restart" if restart else "auto", display=display, at=at)


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def default_folder(recipe: str, overrides: Sequence[str], resume: bool = False) -> Path:
    """A folder of the command's own; the run itself where it is resumed, or nothing but its folder is given."""
    path = Path(recipe)
    return path if path.is_dir() and (resume or not overrides) else Path("runs") / folder_name(recipe, overrides)


def folder_name(recipe: str, overrides: Sequence[str]) -> str:
    """A name that the same command has again, and no other one: lm-tiny-topology=pre-lr=3e-3."""
    path = Path(recipe)
    stem = path.parent.name if path.name == "config.yaml" else path.name if path.is_dir() else path.stem
    name = recipe if path.suffix not in (".yaml", ".yml") and not path.is_dir() else stem
    text = "-".join([name, *overrides])
    plain = re.sub(r"[^\w.=+,-]+", "_", text)
    if plain == text and len(plain) <= LONGEST:
        return plain
    return f"{plain[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
