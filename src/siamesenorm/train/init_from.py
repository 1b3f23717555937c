"""``train.init_from``: weights that a run begins with, of a run, a folder or a file, and the model that they are of.

They are read once, before the first step: a run that goes on has weights of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from siamesenorm.data.reading import parse_json
from siamesenorm.data.tensors import read_header, read_tensors
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import ConfigError
from siamesenorm.layers.lora import is_factor
from siamesenorm.models.fingerprint import tensors_hash
from siamesenorm.models.stack import current_name
from siamesenorm.opening import is_model, model_config_of, open_language
from siamesenorm.tasks import Task
from siamesenorm.train.checkpoint.state import model_tensors
from siamesenorm.train.config import RunConfig
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.resuming import differing_fields
from siamesenorm.train.tensor_layout import place, row_orders
from siamesenorm.train.trained import open_language_model, open_trained

FIELD = "train.init_from"
FREE = {"dropout", "drop_path", "z_weight", "init", "init_std", "first_logits", "class_dropout", "balance_weight"}
"""Fields of a model that weights do not depend on."""
VOCABULARY = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Starting:
    """Weights by name, in the original order of their rows, that fit the run's model."""

    weights: Mapping[str, Tensor]
    source: Mapping[str, Tensor]
    """As they were read, before rows were cut or added."""
    remarks: tuple[str, ...] = ()
    """What a reader should know of them."""

    @functools.cached_property
    def sha256(self) -> str:
        """By which runs that began with the same weights are known, wherever these lay."""
        return tensors_hash(dict(sorted(self.source.items())))

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        """Give a model, however it is spread over processes, these weights."""
        orders = dict(row_orders(model))
        for name, tensor in model_tensors(model).items():
            if is_factor(name):
                continue  # they start from nothing
            place(self.weights[name].to(tensor.device, tensor.dtype), tensor, orders.get(name))


def starting_weights(config: RunConfig, task: Task) -> Starting | None:
    """The weights that `train.init_from` names, checked against the run's model; None where it names none."""
    if config.train.init_from is None:
        return None
    source = Path(config.train.init_from)
    found, weights, tokenizer = _read(source, config.task)
    resize = config.train.init_vocab == "resize"
    ours = config.model.model_dump(mode="json")
    if found is not None:
        _compare(ours, found, resize)
    if not resize:
        check_tokenizer(task, tokenizer)
    with torch.device("meta"):
        expected = task.model_of(config).state_dict()
    weights = _named_now(weights)
    source_weights = dict(weights)
    if resize:
        weights |= {
            name: resized(weights[name], expected[name].shape[0])
            for name in VOCABULARY
            if name in weights and name in expected
        }
    for name, tensor in expected.items():
        if name not in weights:
            raise ConfigError(f"{FIELD}: {str(source)!r} has no {name}, which the model has")
        if weights[name].shape != tensor.shape:
            raise ConfigError(
                f"{FIELD}: {name} has shape {tuple(weights[name].shape)} in {str(source)!r}; "
                f"the model takes {tuple(tensor.shape)}"
            )
    if more := sorted(weights.keys() - expected.keys()):
        raise ConfigError(f"{FIELD}: {str(source)!r} has {more[0]}, which the model has not")
    return Starting(weights, source_weights, tuple(_other_process(config, source)))


def _other_process(config: RunConfig, source: Path) -> Iterator[str]:
    """A sentence for every field of the section diffusion that the weights were trained with another value of."""
    ours = config.as_dict().get("diffusion")
    if ours is None:
        return
    if (source / "config.yaml").is_file():
        theirs = RunFolder(source).config().as_dict().get("diffusion")
    else:
        theirs = _said(read_header(source, FIELD), "diffusion", source) if source.is_file() else None
    for name, before, now in differing_fields(theirs, ours) if isinstance(theirs, dict) else ():
        yield f"weights of {source} were trained with diffusion.{name} = {before}; this run goes on with {now}"


def starting_hash(config: RunConfig) -> str | None:
    """SHA-256 of the weights that `train.init_from` names as they are now; None where there are none."""
    source = config.train.init_from
    if source is None or not Path(source).exists():
        return None
    weights = _named_now(_read(Path(source), config.task)[1])
    return Starting(weights, weights).sha256


def _named_now(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {current_name(name): tensor for name, tensor in weights.items()}


Found = tuple[dict[str, Any] | None, Mapping[str, Tensor], Tokenizer | None]


def _read(source: Path, task: str) -> Found:
    """Configuration, weights and tokenizer of a run, a Hugging Face folder or a file, as far as they are there."""
    if (source / "config.yaml").is_file():
        if task == "language":
            language = open_language_model(source)
            return _dumped(language.config.model), language.model.state_dict(), language.tokenizer
        trained = open_trained(source, task)
        return _dumped(trained.config.model), trained.model.state_dict(), None
    if is_model(source):
        if task != "language":
            raise ConfigError(f"{FIELD}: {str(source)!r} is a language model; the run is one of {task}")
        model, tokenizer = open_language(source, FIELD)
        return _dumped(model.config), model.state_dict(), tokenizer
    if not source.is_file():
        raise _missing(source)
    weights, header = read_tensors(source, FIELD)
    said, theirs = model_of_header(header, source)
    if theirs not in (None, task):
        raise ConfigError(f"{FIELD}: {str(source)!r} is a model of {theirs!r}; the run is one of {task}")
    return said if isinstance(said, dict) else None, weights, None


def _missing(source: Path | str) -> ConfigError:
    what = "a run, a Hugging Face folder, a GGUF or safetensors file"
    return ConfigError(f"{FIELD}: {str(source)!r} is not there; it takes {what}")


def _dumped(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json")


def _compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], resize: bool, inside: str = "model") -> None:
    """Raise at the first field that decides what weights mean and that differs."""
    for name, value in ours.items():
        if name in FREE or name not in theirs or (name == "vocab_size" and resize):
            continue
        if name == "max_length" and not ours.get("learned_positions"):
            continue  # positions are computed
        other = theirs[name]
        if name == "kv_heads":
            value, other = value or ours["heads"], other or theirs["heads"]
        if name == "head_dim":
            value, other = (v or side["dim"] // side["heads"] for v, side in ((value, ours), (other, theirs)))
        if isinstance(value, dict) and isinstance(other, dict):
            _compare(value, other, resize, f"{inside}.{name}")
        elif value != other:
            more = "; train.init_vocab=resize changes it" if name == "vocab_size" else ""
            raise ConfigError(f"{inside}.{name}: {value!r} does not fit {FIELD}, whose weights take {other!r}{more}")


def check_tokenizer(task: Task, tokenizer: Tokenizer | None) -> None:
    """Raise where tokens of the data mean something else than those of the weights."""
    ours: Tokenizer | None = getattr(task, "tokenizer", None)
    if ours is None or tokenizer is None or ours.fingerprint == tokenizer.fingerprint:
        return
    if _model_of(ours) != _model_of(tokenizer):  # files of others differ in what changes no token
        raise ConfigError(
            f"data.tokenizer: it is another one than that of {FIELD} "
            f"({ours.vocab_size} tokens and {tokenizer.vocab_size}); prepare the data with that one, "
            f"or train.init_vocab=resize takes the weights nevertheless"
        )


def _model_of(tokenizer: Tokenizer) -> Any:
    """Vocabulary and merges of a tokenizer."""
    said = parse_json(tokenizer.to_json())["model"]
    return said.get("vocab"), [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in said.get("merges", ())]


def resized(matrix: Tensor, rows: int) -> Tensor:
    """A matrix of the vocabulary with fewer rows, or with more: new ones are the mean of all."""
    if rows <= len(matrix):
        return matrix[:rows].clone()
    mean = matrix.float().mean(0, keepdim=True).to(matrix.dtype)
    return torch.cat([matrix, mean.expand(rows - len(matrix), -1)])


def source_model(source: Any, task: str) -> dict[str, Any]:
    """The fields of the model of a run, a Hugging Face folder or an exported file; no weight is read."""
    if not isinstance(source, str) or not source:
        raise ConfigError(f"train.init_model: true is not allowed; it takes false unless {FIELD} is given")
    place = Path(source)
    if (place / "config.yaml").is_file():
        config = RunFolder(place).config()
        fields: Any = config.model.model_dump(mode="json")
        theirs: str | None = config.task
    elif is_model(place):
        fields, theirs = model_config_of(place, FIELD).model_dump(mode="json"), "language"
    elif place.is_file():
        fields, theirs = model_of_header(read_header(place, FIELD), place)
    else:
        raise _missing(source)
    if theirs != task:
        raise ConfigError(f"{FIELD}: {source!r} is a model of {theirs}; the run is one of {task}")
    if not isinstance(fields, dict):
        raise ConfigError(f"train.init_model: true is not allowed; {source!r} does not say what its model is")
    return fields


def model_of_header(header: Mapping[str, str], file: Path) -> tuple[Any, str | None]:
    """The model's fields and the task that a file of weights names in its header; None where it names none."""
    return _said(header, "config", file), header.get("task")


def _said(header: Mapping[str, str], name: str, file: Path) -> Any:
    try:
        return parse_json(header.get(name, "null"))
    except ValueError:
        raise ConfigError(f"{FIELD}: {str(file)!r} has a header that is not sound JSON") from None
