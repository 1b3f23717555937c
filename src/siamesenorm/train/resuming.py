"""What of a run may be changed when it is resumed, and what not.

Fields that say how a run is computed, shown or saved (`siamesenorm.tasks.base.HOW`) may. Fields that decide its losses
may not; only its length may, as far as the learning rates of the steps already done stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from siamesenorm.train.config import RunConfig
from siamesenorm.train.fields import as_written
from siamesenorm.train.schedule import steady_until

LENGTH = ("steps", "tokens", "epochs")
"""Fields of the section train that say how long it is."""


def refused_change(there: RunConfig, here: RunConfig, done: int) -> str | None:
    """What of a run that has done so many steps cannot be changed as asked for, in words; None if all can."""
    old, new = there.decisive(), here.decisive()
    if there.steps != here.steps:
        problem = refused_length(there, here, done)
        if problem is not None:
            return problem
    for values in (old, new):
        values["train"] = {name: value for name, value in values["train"].items() if name not in LENGTH}
    for field, before, now in differing_fields(old, new):
        return f"{field} is {as_written(before)} instead of {as_written(now)}"
    return None


def refused_length(there: RunConfig, here: RunConfig, done: int) -> str | None:
    """Why a run cannot be as long as is asked for; None if it can."""
    words = f"train.steps is {there.steps} instead of {here.steps}"
    if here.steps < done:
        return f"{words}, and {done} steps are done"
    steady = min(steady_until(there.schedule, there.steps), steady_until(here.schedule, here.steps))
    if done > steady:
        return f"{words}, and the learning rates of {done} steps that are done depend on it ({there.schedule.kind})"
    return None


def changes(there: RunConfig, here: RunConfig) -> list[str]:
    """Every field that differs by name, with both values, in words; what is said about a run does not count."""
    return [
        f"{field} is {as_written(now)} instead of {as_written(before)}"
        for field, before, now in differing_fields(there.as_dict(), here.as_dict())
        if field != "about"
    ]


def differing_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The fields by dotted name that two configurations differ in, with both values."""
    pairs = [(name, one.get(name), other.get(name)) for name in {**one, **other}]
    while pairs:
        path, first, second = pairs.pop(0)
        if isinstance(first, dict) and isinstance(second, dict):
            pairs[:0] = [(f"{path}.{name}", first.get(name), second.get(name)) for name in {**first, **second}]
        elif first != second:
            yield path, first, second
