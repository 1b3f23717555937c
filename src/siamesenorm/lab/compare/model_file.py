"""A user's own model from a file of Python: ``my_model.py:make_model``.

The file is code that its user runs, named on the command line or in a call; nothing else ever names one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from siamesenorm.errors import ConfigError
from siamesenorm.tasks.own import Given

ALLOWED = "it takes FILE.py:NAME, such as my_model.py:make_model"


def open_model_file(text: str) -> Given:
    """The function of that name; and, where the file has them, its ``data``, ``validation`` and ``loss``."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"--model: {text!r} is not allowed; {ALLOWED}")
    module = import_file(Path(place))
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        there = "is no function" if hasattr(module, name) else "is not there"
        raise ConfigError(f"--model: {name!r} {there} in {place!r}; it takes one of {', '.join(known) or 'none'}")
    more = {part: getattr(module, part, None) for part in ("data", "validation", "loss")}
    if more["loss"] is not None and not callable(more["loss"]):
        raise ConfigError(f"--model: loss of {place!r} is no function; it takes loss(model, batch)")
    return Given(function, **more)


def import_file(file: Path) -> ModuleType:
    """A file as a module, once a process; what it imports from its own folder is found."""
    if not file.is_file():
        raise ConfigError(f"--model: {str(file)!r} is not a file; {ALLOWED}")
    path = file.resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--model: {str(file)!r} is no file of Python; {ALLOWED}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"--model: {str(file)!r} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
