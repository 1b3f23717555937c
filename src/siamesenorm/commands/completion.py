"""What a shell completes: recipes, fields with their values, topologies with their options, formats of export.

All words come from completion.json beside this file, which `make docs` writes from the code: a shell waits for every
answer, and the code itself would have to import torch.
"""

from __future__ import annotations

import functools
import json
import os
from importlib import resources
from typing import Any

import typer

Words = list[tuple[str, str]]
"""What may stand there, each with what it means."""
FILE = "completion.json"


def complete_recipe(incomplete: str) -> Words:
    """Names of recipes."""
    return _starting(incomplete, {name: recipe["about"] for name, recipe in _known()["recipes"].items()})


def complete_model(incomplete: str) -> Words:
    """Names of model presets."""
    return _starting(incomplete, _known()["models"])


def complete_export(incomplete: str) -> Words:
    """What `export --to` takes."""
    return _starting(incomplete, _known()["exports"])


def _starting(incomplete: str, words: dict[str, str]) -> Words:
    return [(word, about) for word, about in words.items() if word.startswith(incomplete)]


def complete_topology(incomplete: str) -> Words:
    """``name`` or ``name:option=value,…``, however far it is written."""
    return _cut(_topology(_whole(incomplete)), incomplete)


def complete_topologies(incomplete: str) -> Words:
    """Several topologies with commas between them."""
    word = _whole(incomplete)
    before, comma, last = word.rpartition(",")
    found = [(before + comma + name, about) for name, about in _topology(last)]
    if ":" in before.rpartition(",")[2] or ("=" in before and ":" in before):  # a comma may lead to another option
        found += _topology(word)
    return _cut(found, incomplete)


def complete_field(context: typer.Context, incomplete: str) -> Words:
    """``key=value`` of the recipe that stands before it."""
    return _cut(_field(_task(context), _whole(incomplete)), incomplete)


def complete_recipe_or_field(context: typer.Context, incomplete: str) -> Words:
    """What `compare` takes: a recipe first, or fields alone."""
    word = _whole(incomplete)
    names = [] if context.params.get("fields") or "=" in word else complete_recipe(incomplete)
    return names + _cut(_field(_task(context), word), incomplete)


def _field(task: str, word: str) -> Words:
    fields = _known()["fields"][task]
    short: dict[str, str] = {}
    for path in fields:  # the last part of a name is enough where no other field of that depth has it
        end = path.rpartition(".")[2]
        short[end] = "" if end in short else path
    names = {**{path: path for path in fields}, **{end: path for end, path in short.items() if path}}
    key, equals, value = word.partition("=")
    if not equals:
        found = [name for name in names if name.startswith(key)]
        if len(found) != 1:
            return [(f"{name}=", fields[names[name]]["about"]) for name in found]
        key, value = found[0], ""  # with its values, of which the shell takes what they have in common
    if key not in names:
        return []
    if names[key].rpartition(".")[2] == "topology":
        return [(f"{key}={name}", about) for name, about in _topology(value)]
    about = fields[names[key]]["about"]
    values = [(f"{key}={one}", about) for one in fields[names[key]]["values"] if one.startswith(value)]
    return values or ([] if equals else [(f"{key}=", about)])


def _topology(word: str) -> Words:
    topologies = _known()["topologies"]
    name, colon, options = word.partition(":")
    known = topologies.get(name, {}).get("options", {})
    if not colon:
        names = [(one, facts["equation"]) for one, facts in topologies.items() if one.startswith(name)]
        return names + [(f"{name}:{option}=", about["about"]) for option, about in known.items()]
    done, comma, last = options.rpartition(",")
    key, equals, value = last.partition("=")
    front = f"{name}:{done}{comma}"
    if equals:
        option = known.get(key, {"about": "", "values": []})
        return [(f"{front}{key}={one}", option["about"]) for one in option["values"] if one.startswith(value)]
    taken = {part.partition("=")[0] for part in done.split(",")}
    return [(f"{front}{one}=", o["about"]) for one, o in known.items() if one.startswith(key) and one not in taken]


def _task(context: typer.Context) -> str:
    """The task of the recipe that was named; language where it is not known."""
    fields = context.params.get("fields") or [None]
    named = context.params.get("recipe") or context.params.get("name") or context.params.get("run") or fields[0]
    return str(_known()["recipes"].get(str(named), {"task": "language"})["task"])


def _whole(incomplete: str) -> str:
    """The word as it was typed: bash hands it over in parts, cut at every ``=`` and ``:``."""
    if os.environ.get("_SIAMESENORM_COMPLETE") != "complete_bash":
        return incomplete
    words, place = os.environ.get("COMP_WORDS", "").split(), int(os.environ.get("COMP_CWORD", "0"))
    words = words[: place + 1] if place < len(words) else [*words, ""]
    whole = words.pop()
    while words and (whole[:1] in ("=", ":") or words[-1] in ("=", ":")):
        whole = words.pop() + whole
    return whole


def _cut(found: Words, incomplete: str) -> Words:
    """Words as the shell expects them: bash puts them behind the last ``=`` or ``:`` that it has cut at."""
    whole = _whole(incomplete)
    return [(word[len(whole) - len(incomplete) :], about) for word, about in found]


@functools.cache
def _known() -> dict[str, Any]:
    text = (resources.files("siamesenorm.commands") / FILE).read_text(encoding="utf-8")
    known: dict[str, Any] = json.loads(text)
    return known
