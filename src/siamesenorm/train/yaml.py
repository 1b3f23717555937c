"""YAML as recipes use it: plain data only, ``1e-3`` is a number, ``no`` is a word, no name is given twice."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from siamesenorm.errors import ConfigError

LARGEST = 2**20
"""Bytes of a recipe; anything longer is another kind of file."""


class _Loader(yaml.SafeLoader):
    """Safe, with the scalars of YAML 1.2's core, without tags and aliases."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own way to say it)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, a few lines of which unfold to gigabytes, and tags, which make values of any kind."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"tags ({event.tag[:40]}) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse names that are given twice, of which YAML would take the last."""
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, name in enumerate(names):
            if not isinstance(name, str):
                raise yaml.YAMLError(f"{name!r} is not allowed as a name")
            if name in names[:number]:
                raise yaml.YAMLError(f"{name!r} is given twice")
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]{0,30})$"), [*"-+0123456789"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,5})?|[-+]?\.inf|\.nan)$"),
    [*"-+.0123456789"],
)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever `_Loader` or an ordinary loader would read as something else; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write in full what is there twice."""
        return True

    def represent_text(self, text: str) -> yaml.Node:
        """Double quotes where text would be read as a number, and around line breaks of all kinds."""
        resolvers = [pair for pairs in _Loader.yaml_implicit_resolvers.values() for pair in pairs]
        is_plain = text.isprintable() and not any(pattern.match(text) for _, pattern in resolvers)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def read_yaml(text: str, name: str) -> Any:
    """The data of a YAML text; `name` is said in errors."""
    if len(text) > LARGEST:
        raise ConfigError(f"{name}: {len(text)} characters are too many for a recipe; it takes up to {LARGEST}")
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{name}: is not YAML: {one_line(error.problem)}{where}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: is not YAML: {one_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{name}: is not YAML of a recipe: it is nested too deeply") from None


def write_yaml(value: Any) -> str:
    """A YAML text that `read_yaml` reads back to the same."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def one_line(error: object) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
