"""From what users write to a grid: topologies, learning rates, seeds, depths, and any field with its values.

make_grid(recipe="lm-tiny", topologies=["pre,siamese"], lrs=["4e-3,1.6e-2"], seeds=["0,1,2"], sets=["warmup=0,30"])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.grafts import GraftPlan, GraftSource, check_field, graft_names
from siamesenorm.lab.compare.grid import OPTIMIZER, OWN_OPTIONS, PARAMETERS, AxisValue, Grid, short_name
from siamesenorm.lab.compare.presets import GridPreset
from siamesenorm.train.fields import fields_of
from siamesenorm.train.overrides import find_field
from siamesenorm.train.recipes import config_class, load_recipe, resolve

RECIPE, TOPOLOGIES, LRS, SEEDS = "compare-tiny", "pre,post,siamese", "4e-3,1.6e-2,6.4e-2", "0,1,2"
"""What is compared where nothing is asked for; docs/log.md says how it was chosen."""
GRAFTED, GRAFTED_LRS = "pre,siamese", "1e-4,1e-3"
"""The same where all runs go on from a trained model."""


def make_grid(
    *,
    recipe: str | Mapping[str, Any] | None = None,
    topologies: Sequence[str] = (),
    lrs: Sequence[str] = (),
    seeds: Sequence[str] = (),
    optimizers: Sequence[str] = (),
    parameters: Sequence[str] = (),
    sets: Sequence[str] = (),
    depths: Sequence[str] = (),
    preset: GridPreset | None = None,
    source: GraftSource | None = None,
    out: Path = Path(),
) -> Grid:
    """A grid from what users write; what they leave open is the preset's, or the default's.

    source: what all runs go on from, grafted to the topologies; the grafts lie in the folder `out`.
    """
    default_recipe = preset.recipe if preset is not None and preset.recipe is not None else RECIPE
    name = default_recipe if recipe is None else recipe
    fixed: list[str] = []
    axes = []
    if optimizers:
        sets = [*sets, f"{OPTIMIZER}={','.join(optimizers)}"]
    if parameters:
        sets = [*sets, f"{PARAMETERS}={','.join(parameters)}"]
    if source is not None:
        _check_grafting(name, sets, depths, preset)
        fixed += source.overrides()
    for axis in {**_by_field(name, preset.sets if preset else ()), **_by_field(name, sets)}.values():
        if len(axis) == 1:
            fixed += axis[0].overrides
        else:
            axes.append(axis)
    blocks = parse_numbers(depths, "--depths", int) if depths else preset.depths if preset else ()
    if blocks:
        axes.append(depth_axis(name, fixed, blocks))
    default = preset.topologies if preset else parse_topologies([TOPOLOGIES if source is None else GRAFTED])
    chosen = parse_topologies(topologies) if topologies else default
    chosen = chosen if source is None else graft_names(chosen)
    return Grid(
        name,
        chosen,
        parse_numbers(lrs, "--lrs", float) if lrs else preset.lrs if preset else _default_lrs(name, fixed, source),
        parse_numbers(seeds, "--seeds", int) if seeds else preset.seeds if preset else parse_numbers([SEEDS], "", int),
        tuple(fixed),
        tuple(axes),
        preset.name if preset else None,
        {} if source is None else GraftPlan(source, out, chosen).overrides(),
    )


def _check_grafting(
    recipe: str | Mapping[str, Any], sets: Sequence[str], depths: Sequence[str], preset: GridPreset | None
) -> None:
    """Raise where an option does not go with a source that all runs go on from."""
    task = load_recipe(recipe).get("task")
    if task != "language":
        raise ConfigError(f"--graft: a recipe of {task} is not allowed; it takes one of language")
    for option, given in (("--depths", depths), ("--preset", preset)):
        if given:
            raise ConfigError(f"{option}: is not allowed with --graft, whose source has the shape that it has")
    for path in _by_field(recipe, sets):
        check_field(path)


def _default_lrs(
    recipe: str | Mapping[str, Any], overrides: Sequence[str], source: GraftSource | None = None
) -> tuple[float, ...]:
    """Rates that suit the default recipe would not suit another, which has its own, nor a model that is trained."""
    if source is not None and recipe == RECIPE:
        return parse_numbers([GRAFTED_LRS], "", float)
    return parse_numbers([LRS], "", float) if recipe == RECIPE else (resolve(recipe, overrides).optimizer.lr,)


def _by_field(recipe: str | Mapping[str, Any], texts: Sequence[str]) -> dict[str, tuple[AxisValue, ...]]:
    """Values of every field that is set."""
    found: dict[str, tuple[AxisValue, ...]] = {}
    for text in texts:
        axis = parse_setting(recipe, text)
        field = axis[0].overrides[0].partition("=")[0]
        if field in found:
            raise ConfigError(f"--set: {field} is given twice; write all its values behind one =")
        found[field] = axis
    return found


def parse_topologies(texts: Iterable[str]) -> tuple[str, ...]:
    """``pre,siamese:form=plain,input_norm=true`` in parts: what has an = before any colon belongs to the one before."""
    found: list[str] = []
    for text in texts:
        for number, part in enumerate(text.split(",")):
            equals, colon = part.find("="), part.find(":")
            if number and equals >= 0 and not 0 <= colon < equals:
                found[-1] += f",{part.strip()}"
            else:
                found.append(part.strip())
    return tuple(found)


def parse_numbers(texts: Iterable[str], option: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """``1e-3,4e-3`` as numbers."""
    found = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        try:
            number = kind(part)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            what = "whole numbers, such as 0,1,2" if kind is int else "numbers, such as 1e-3,4e-3"
            raise ConfigError.not_allowed(option, part, what)
        found.append(number)
    return tuple(found)


def parse_setting(recipe: str | Mapping[str, Any], text: str) -> tuple[AxisValue, ...]:
    """``warmup=0,30`` as the values of an axis; a single value is the same for all cells."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError.not_allowed("--set", text, "field=value,value (a recipe: --recipe)")
    fields = {field.path: field for field in fields_of(config_class(load_recipe(recipe).get("task")))}
    path = find_field(key.strip(), fields).path
    if path in OWN_OPTIONS:
        raise ConfigError(f"--set: {path} has an option of its own; use {OWN_OPTIONS[path]}")
    parts = split_values(values)
    return tuple(AxisValue(f"{short_name(path)}={part}", (f"{path}={part}",)) for part in parts)


def split_values(text: str) -> list[str]:
    """Parts between commas that no bracket encloses."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def depth_axis(
    recipe: str | Mapping[str, Any], overrides: Sequence[str], depths: Sequence[int]
) -> tuple[AxisValue, ...]:
    """Numbers of blocks with the width that keeps the number of parameters nearest to the recipe's."""
    model = resolve(recipe, overrides).model
    names = ("vocab_size", "dim", "blocks", "heads", "ffn_dim")
    if not all(hasattr(model, name) for name in names):
        raise ConfigError.wrong_kind("--depths", model, "a language model")
    vocabulary, dim, blocks, heads, ffn_dim = (int(getattr(model, name)) for name in names)

    def parameters(blocks: int, dim: int) -> int:
        return blocks * (4 * dim**2 + 3 * dim * round(dim * ratio)) + 2 * vocabulary * dim

    ratio = ffn_dim / dim
    wanted, unit = parameters(blocks, dim), 2 * heads
    axis = []
    for depth in depths:
        if depth < 1:
            raise ConfigError.not_allowed("--depths", depth, "numbers of blocks, such as 6,12,24")
        widths = range(unit, max(2 * unit, dim * (2 + math.isqrt(blocks))), unit)
        width = min(widths, key=lambda width: abs(parameters(depth, width) - wanted))
        shape = {"blocks": depth, "dim": width, "ffn_dim": round(width * ratio)}
        overrides = tuple(f"model.{name}={value}" for name, value in shape.items())
        axis.append(AxisValue(f"blocks={depth}", overrides))
    return tuple(axis)
