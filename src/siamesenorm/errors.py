"""What a person can put right: the package's exceptions for it, and the one place that words its sentences.

raise ConfigError.not_allowed("--jobs", 0, "1 or more")     # --jobs: 0 is not allowed; it takes 1 or more
raise ConfigError.unknown("--engine", "rya", ENGINES)       # … is not known; it takes one of local, ray; did you mean …
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from numbers import Number
from pathlib import PurePath
from typing import Any

SHOWN, NAME, REASON = 60, 300, 200
"""Characters that are said again of a refused value, of one that is a name or path, and of another's reason."""


class InputError(ValueError):
    """What a person can put right; the message is one sentence, and says what was probably meant."""

    @classmethod
    def not_allowed(cls, field: str, value: object, allowed: str | Iterable[object], when: str = "") -> InputError:
        """``FIELD: VALUE is not allowed WHEN; it takes ALLOWED``, which is words or a list of names."""
        return cls.refused(field, value, f"it takes {in_words(allowed)}", when)

    @classmethod
    def refused(cls, field: str, value: object, why: str = "", when: str = "") -> InputError:
        """``FIELD: VALUE is not allowed WHEN; WHY``; a field that ends in ``=`` is written ``FIELD = VALUE``."""
        between = " " if field.endswith("=") else ": "
        return cls(f"{field}{between}{named(value)} is not allowed{when and ' ' + when}{why and '; ' + why}")

    @classmethod
    def wrong_kind(cls, field: str, value: object, allowed: str) -> InputError:
        """``FIELD: a TYPE is not allowed; it takes ALLOWED``, of values that say nothing when printed."""
        return cls(f"{field}: a {type(value).__name__} is not allowed; it takes {allowed}")

    @classmethod
    def unknown(cls, field: str, value: object, known: Iterable[object]) -> InputError:
        """``FIELD: VALUE is not known; it takes one of …``."""
        return cls(f"{field}: {named(value)} is not known; it takes {in_words(known)}")

    @classmethod
    def unknown_name(cls, field: str, name: object, known: Iterable[str]) -> InputError:
        """``FIELD: unknown name NAME; known names: …``, of things that a registry lists."""
        return cls(f"{field}: unknown name {shown(name)}; known names: {', '.join(known)}")

    @classmethod
    def failed(cls, field: str, path: object, done: str, error: BaseException) -> InputError:
        """``FIELD: PATH cannot be DONE: REASON``, the reason in the system's or library's words."""
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        return cls(f"{field}: {named(str(path))} cannot be {done}: {reason[:REASON]}")

    @classmethod
    def missing_package(cls, what: str, package: str | None, extra: str) -> InputError:
        """``WHAT needs the package 'p'; install it with pip install 'siamesenorm[EXTRA]'``."""
        name = (package or extra).partition(".")[0]
        return cls(f"{what} needs the package {name!r}; install it with pip install 'siamesenorm[{extra}]'")

    @classmethod
    @contextlib.contextmanager
    def importing(cls, what: str, package: str, extra: str) -> Iterator[None]:
        """A block of imports that an extra brings; what is missing raises as `missing_package`."""
        try:
            yield
        except ImportError as error:
            raise cls.missing_package(what, error.name or package, extra) from None

    @property
    def sentence(self) -> str:
        """What is wrong without what was probably meant, for a sentence that goes on."""
        return super().__str__()

    def __str__(self) -> str:
        return self.sentence + suggestion(self.sentence)


class TopologyError(InputError):
    """A name, option, layout or shape that a topology cannot take; the message is one sentence."""


class NotExact(TopologyError):
    """A topology that cannot compute what another one does, as it is set up."""


class FieldError(InputError):
    """A field that a configuration has not, or a value that it does not take; the message is one sentence."""


class DataError(InputError):
    """A source, setting, token file or tokenizer that cannot be used; the message is one sentence."""


class ConfigError(InputError):
    """A recipe, override or run folder that cannot be used; the message is one sentence."""


class InspectionError(ConfigError):
    """A model, batch, folder or text that cannot be inspected; the message is one sentence."""


class InteropError(InputError):
    """Another library's folder, file, task or missing package; the message is one sentence."""


class OfficialError(InputError):
    """A config or state dict that is not a known official model; the message is one sentence."""


class UnmetNeedsWarning(UserWarning):
    """A topology runs without norms inside sublayers, or without first weights, that it is not itself without."""


def shown(value: Any, most: int = SHOWN) -> str:
    """A refused value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits have no text
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= most else f"{text[:most]}…"


def named(value: object) -> str:
    """A refused value in a sentence: numbers as they print, paths whole, all else as `shown`."""
    if isinstance(value, Number) and not isinstance(value, (int, float)):
        return str(value)  # NumPy's, which would show their type
    return shown(str(value), NAME) if isinstance(value, (str, PurePath)) else shown(value)


def in_words(allowed: str | Iterable[object]) -> str:
    """What is allowed: words as they are, names as ``one of a, b``."""
    return allowed if isinstance(allowed, str) else f"one of {', '.join(map(str, allowed)) or 'none'}"


def suggestion(message: str) -> str:
    """The nearest allowed word, where the refused one looks like a slip of the finger."""
    if "did you mean" in message:
        return ""
    allowed = "names: |kinds: |options are |fields are |takes one of |takes "
    found = re.search(rf"'([^']+)'.*; .*?(?:{allowed})(.+)$", message)
    values = [word for word in found[2].split(", ") if " " not in word] if found else []  # others describe what to give
    near = difflib.get_close_matches(found[1].lower(), values, n=1) if found else []
    return f"; did you mean {near[0]}?" if near else ""


def import_extra(module: str, purpose: str, extra: str = "data") -> Any:
    """A module that an extra brings, or one sentence that says how to install it."""
    with DataError.importing(purpose, module, extra):
        return importlib.import_module(module)


def check_torchvision() -> None:
    """Raise one sentence where torchvision is installed but does not go with torch; before imports that want it."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        raise DataError(
            f"torchvision was built for another torch ({error}); install both from the same place"
        ) from None
