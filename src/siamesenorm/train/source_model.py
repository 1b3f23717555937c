"""The model's configuration where weights to begin with lie, for runs that take it from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siamesenorm.data.reading import parse_json
from siamesenorm.data.tensors import read_header
from siamesenorm.errors import ConfigError
from siamesenorm.language_folder import is_model, model_config_of

FIELD = "train.init_from"


def source_model(source: Any, task: str) -> dict[str, Any]:
    """The fields of the model of a run, a Hugging Face folder or an exported file; no weight is read."""
    if not isinstance(source, str) or not source:
        raise ConfigError(f"train.init_model: true is not allowed; it takes false unless {FIELD} is given")
    place = Path(source)
    if (place / "config.yaml").is_file():
        from siamesenorm.train.folder import RunFolder  # which reads its configuration by way of recipes

        config = RunFolder(place).config()
        fields: Any = config.model.model_dump(mode="json")
        theirs: str | None = config.task
    elif is_model(place):
        fields, theirs = model_config_of(place, FIELD).model_dump(mode="json"), "language"
    elif place.is_file():
        fields, theirs = model_of_header(read_header(place, FIELD), place)
    else:
        raise ConfigError(
            f"{FIELD}: {source!r} is not there; it takes a run, a Hugging Face folder, a GGUF or safetensors file"
        )
    if theirs != task:
        raise ConfigError(f"{FIELD}: {source!r} is a model of {theirs}; the run is one of {task}")
    if not isinstance(fields, dict):
        raise ConfigError(f"train.init_model: true is not allowed; {source!r} does not say what its model is")
    return fields


def model_of_header(header: Mapping[str, str], file: Path) -> tuple[Any, str | None]:
    """The model's fields and the task that a file of weights names in its header; None where it names none."""
    try:
        return parse_json(header.get("config", "null")), header.get("task")
    except ValueError:
        raise ConfigError(f"{FIELD}: {str(file)!r} has a header that is not sound JSON") from None
