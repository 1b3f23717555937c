"""Senseless values for every parameter of every command, found by the commands' own signatures."""

import functools
import itertools
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from siamesenorm.cli import app
from siamesenorm.commands import data

from .sound_inputs import Invocation

LONG, LONGER = "a" * 300, "a" * 5000
UNREADABLE = "\udcff\udc80"
"""What Python makes of bytes on the command line that are no UTF-8."""
TEXTS = ["", " ", "nonsense", LONG, LONGER, UNREADABLE, "a\nb\x1b[31m", "-1", "nan", "./.", "[1", "%s{}"]
WHOLE = ["", "x", "-1", "0", "1.5", "1e3", "nan", "9" * 30, "9" * 5000, "-9" + "0" * 30, f"{2**63}", UNREADABLE, LONG]
NUMBERS = ["", "x", "nan", "inf", "-inf", "1e999", "-1", "1e308", "9" * 5000, "1,5", UNREADABLE, LONG]
PATHS = ["", "nowhere/at/all", LONG, LONGER, f"{LONG}/x", UNREADABLE, "empty", "file", "file/inside", "a\nb"]
"""`empty` is a folder and `file` a file where the command is called."""
READ = ["nowhere", "/dev/null", "/dev/zero"]
"""For what is read: these must never be written to."""
WRITTEN = ("out", "target", "output", "save_stats", "filmstrip", "individually", "cache")
OVERRIDES = [
    *TEXTS, "=", "=1", "lr", "lr=", "lr=x", "lr=nan", "lr=1e999", "lr=[", "lr=!!bool maybe", "lr=!!int ''", "blocks=-1",
    "lr=!!timestamp x", "steps=!!python/object:x {}", "steps=" + "9" * 5000, "blocks=1000000000", "dim=1000000000000",
    "vocab_size=99999999999999999999", "max_length=999999999999999", "data.train=" + LONG, "data.train=" + LONGER,
    f"data.train={UNREADABLE}", "data.train=[]", "data.train=[[1]]", "data.train=/dev/zero", "data.train=empty",
    "data.tokenizer=" + LONG, "topology=", f"topology={LONG}", "topology=\udcff", "about=\udcff", "seed=-1", "seed=1.5",
    "seed=99999999999999999999", "betas=[1]", "moe={}", "moe=[]", "moe={experts: -1}", "task=x", "model=1", "train=[]",
    "batch_size=1000000000000", "sequence_length=1000000000000000", "lr=&a [*a]", "lr=" + "[" * 5000, "ema=inf",
    "steps=1000000000000000000000", "device=x", "device=cuda:99", "precision=x", "workers=1000000", "model.=1", ".=1",
]  # fmt: skip


class Parameter(NamedTuple):
    """A parameter of a command: how it is written on the command line, and the type of its values."""

    command: tuple[str, ...]
    name: str
    option: str | None = None
    """None for one that has only its place."""
    kind: Any = None


@functools.cache
def parameters() -> tuple[Parameter, ...]:
    """Every parameter of every command."""
    return tuple(_parameters())


def _parameters() -> Iterator[Parameter]:
    groups = {(): app.registered_commands, ("data",): data.app.registered_commands}
    for prefix, registered in ((prefix, command) for prefix, commands in groups.items() for command in commands):
        function = registered.callback
        command = (*prefix, registered.name or function.__name__.replace("_", "-"))
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            if typing.get_origin(hint) is not typing.Annotated:
                continue
            kind, info = typing.get_args(hint)[:2]
            if typing.get_origin(kind) in (types.UnionType, typing.Union):
                (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
            if typing.get_origin(kind) is list:
                (kind,) = typing.get_args(kind)
            given = [text for text in (info.default, *(info.param_decls or ())) if str(text).startswith("--")]
            option = (given[0] if given else "--" + name.strip("_").replace("_", "-")) if is_option(info) else None
            yield Parameter(command, name, option, kind)


def is_option(info: Any) -> bool:
    return type(info).__name__ == "OptionInfo"


def values(parameter: Parameter) -> list[str]:
    """What a parameter may be given that makes no sense, or hardly."""
    if parameter.name in ("overrides", "fields", "set_"):
        return OVERRIDES
    if parameter.name in WRITTEN or (*parameter.command, parameter.name) == ("train", "run"):
        return PATHS
    texts = list(dict.fromkeys(TEXTS + PATHS + READ))  # most may be names of files too
    return {int: WHOLE, float: NUMBERS, Path: PATHS + READ}.get(parameter.kind, texts)


def spoilt(invocation: Invocation, parameter: Parameter, value: str) -> Invocation | None:
    """The invocation with this value for the parameter; None where it has no place for it."""
    arguments = list(invocation.arguments)
    if parameter.option is not None:
        if parameter.option in arguments:
            arguments[arguments.index(parameter.option) + 1] = guarded(value)
            return Invocation(tuple(arguments))
        return Invocation((*arguments, f"{parameter.option}={guarded(value)}"))
    places = positions(invocation)
    order = [p.name for p in parameters() if p.command == parameter.command and p.option is None]
    number = order.index(parameter.name)
    if number < len(places):
        arguments[places[number]] = guarded(value)
        return Invocation(tuple(arguments))
    if value.startswith("-"):
        return None
    return Invocation((*arguments, guarded(value)))


def guarded(value: str) -> str:
    """A value that is taken as it is, not as a template."""
    return value.replace("{", "{{").replace("}", "}}")


def positions(invocation: Invocation) -> list[int]:
    """Where the arguments stand that have no name."""
    depth = 2 if invocation.arguments[0] == "data" else 1
    found, skip = [], False
    for number, argument in enumerate(invocation.arguments[depth:], start=depth):
        if skip or argument.startswith("-"):
            skip = not skip and argument not in ("--json", "--no-removal") and "=" not in argument
            continue
        found.append(number)
    return found


def command_of(invocation: Invocation) -> tuple[str, ...]:
    """Which command it calls."""
    return invocation.arguments[: 2 if invocation.arguments[0] == "data" else 1]


def bad_invocations(sound: list[Invocation]) -> Iterator[tuple[Invocation, Parameter, str]]:
    """Every parameter of the sound invocations with every senseless value."""
    first = {command_of(invocation): invocation for invocation in reversed(sound)}
    for parameter in parameters():
        if parameter.kind is bool or parameter.command not in first or parameter[:2] == (("compare",), "metric"):
            continue  # report asks the same of a metric, and trains nothing first
        for value in values(parameter):
            made = spoilt(first[parameter.command], parameter, value)
            if made is not None:
                yield made, parameter, value
    for command, invocation in first.items():
        yield Invocation((*invocation.arguments, "--nonsense")), Parameter(command, "--nonsense"), ""
        if command != ("compare",):  # which asks for nothing
            yield Invocation(command), Parameter(command, "(nothing)"), ""
        flags = [p for p in parameters() if p.command == command and p.kind is bool and p.option != "--open"]
        for one, other in itertools.combinations(flags, 2):
            both = (*invocation.arguments, str(one.option), str(other.option))
            yield Invocation(both), one, str(other.option)
