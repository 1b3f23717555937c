"""The model's source as files that lie beside its weights, for machines without this package.

transformers loads ``modeling_siamesenorm.py`` with ``trust_remote_code=True`` and follows relative imports to its
neighbours. Every file is one of our modules, ``siamesenorm.residual.base`` as ``residual_base.py``, unchanged but for
its imports. Only `LMConfig` is written anew, as a plain dataclass: an exported config has been checked already, and
the machine may not have pydantic.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from siamesenorm.models.lm import LMConfig, MoEConfig, RopeScaling
from siamesenorm.models.lm import config as lm_config
from siamesenorm.version import __version__

PACKAGE = "siamesenorm"
ENTRIES = {
    "siamesenorm.interop.huggingface.configuration": "configuration_siamesenorm",
    "siamesenorm.interop.huggingface.modeling": "modeling_siamesenorm",
}
AUTO_MAP = {
    "AutoConfig": "configuration_siamesenorm.SiameseNormConfig",
    "AutoModel": "modeling_siamesenorm.SiameseNormModel",
    "AutoModelForCausalLM": "modeling_siamesenorm.SiameseNormForCausalLM",
}
HEADER = f"# From siamesenorm {__version__}, Apache License 2.0: the module {{module}}.\n"


def bundled_files() -> dict[str, str]:
    """File names and contents of everything that `SiameseNormForCausalLM` needs."""
    files: dict[str, str] = {}
    waiting = list(ENTRIES)
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name in files:
            continue
        source = plain_config() if module == lm_config.__name__ else source_of(module)
        files[name], needed = resolve_imports(source)
        files[name] = HEADER.format(module=module) + files[name]
        waiting.extend(needed)
    return files


def flat_name(module: str) -> str:
    """The name of a module in a folder without packages."""
    return ENTRIES.get(module) or module.removeprefix(f"{PACKAGE}.").replace(".", "_")


def source_of(module: str) -> str:
    """A module's source, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no source for {module}")
    return Path(spec.origin).read_text(encoding="utf-8")


def resolve_imports(source: str) -> tuple[str, list[str]]:
    """The source with imports from our package made relative, and the modules they name; those for types alone go."""
    lines, needed = source.splitlines(keepends=True), []
    tree = ast.parse(source)
    for_types = {node for block in ast.walk(tree) if _is_for_types(block) for node in ast.walk(block)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] == PACKAGE for alias in node.names):
                raise ValueError(f"line {node.lineno}: write 'from {PACKAGE}... import' to be bundled")
            continue
        module = node.module or ""
        if module.split(".")[0] != PACKAGE:
            continue
        new: list[str] = ["pass"] if node in for_types else []
        for alias in [] if node in for_types else node.names:
            whole = f"{module}.{alias.name}"
            if is_module(whole):
                needed.append(whole)
                # The first line is for transformers' loader, which looks for files but does not see the second.
                new.append(f"from .{flat_name(whole)} import __doc__ as _")
                new.append(f"from . import {flat_name(whole)} as {alias.asname or alias.name}")
            else:
                needed.append(module)
                new.append(f"from .{flat_name(module)} import {ast.unparse(alias)}")
        indent = " " * node.col_offset
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in new]
    return "".join(lines), needed


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_module(name: str) -> bool:
    """Whether a dotted name is a module rather than something inside one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def plain_config() -> str:
    """`LMConfig` and what it nests as dataclasses: the same fields, defaults, properties and methods, no checks."""
    parts = ['"""The language model\'s configuration."""\n', "from __future__ import annotations\n"]
    parts.append("from dataclasses import asdict, dataclass\nfrom typing import Any, ClassVar, Literal\n")
    parts.append("from siamesenorm.layers.rope_scaling import Scaling")
    parts.append("from siamesenorm.layers.rotary import Rotary")
    parts.append("from siamesenorm.residual import NormSpec\n")
    parts += [_dataclass(MoEConfig), _dataclass(RopeScaling), _dataclass(LMConfig)]
    parts.append("    def __post_init__(self) -> None:")
    for name, nested in (("moe", MoEConfig), ("rope_scaling", RopeScaling)):
        parts.append(f"        if isinstance(self.{name}, dict):")
        parts.append(f'            object.__setattr__(self, "{name}", {nested.__name__}(**self.{name}))\n')
    parts.append("    def model_dump(self) -> dict[str, Any]:")
    parts.append('        """All fields by name."""')
    parts.append("        return asdict(self)\n")
    for name, value in vars(LMConfig).items():
        if isinstance(value, property) and value.fget is not None:
            parts.append(inspect.getsource(value.fget))
        elif inspect.isfunction(value) and not name.startswith("_") and value.__module__ == lm_config.__name__:
            parts.append(inspect.getsource(value))
    return "\n".join(parts)


def _dataclass(model: type[BaseModel]) -> str:
    hints = get_type_hints(model)
    lines = ["\n@dataclass(frozen=True, kw_only=True)", f"class {model.__name__}:", f'    """{model.__doc__}"""\n']
    lines.append(f"    model_fields: ClassVar[tuple[str, ...]] = {tuple(model.model_fields)!r}")
    for name, field in model.model_fields.items():
        default = "" if field.default is PydanticUndefined else f" = {field.default!r}"
        lines.append(f"    {name}: {_type_text(hints[name])}{default}")
        lines.append(f'    """{field.description}"""')
    return "\n".join(lines) + "\n"


def _type_text(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return text.replace("typing.", "").replace(f"{lm_config.__name__}.", "")
