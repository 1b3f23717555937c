"""Comparisons that go on from one trained model: unchanged, and grafted to other topologies, each once.

source = open_graft_source("runs/mine")
plan = GraftPlan(source, out, ("pre", "siamese"))
plan.overrides()                          # of the runs of each topology: what they begin with
plan.check(task), plan.write()            # certificates first; then grafts/, for all cells of a comparison

A graft is a file of weights with its certificate beside it. The source's own topology is a copy of its weights, so that
all runs begin alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from siamesenorm.data.atomic import write_json, write_whole
from siamesenorm.data.reading import read_object
from siamesenorm.data.tokenizer import FILE, Tokenizer
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.models.fingerprint import weights_hash
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.lm.grafting import certify, graft, graft_config
from siamesenorm.opening import open_language
from siamesenorm.residual import TopologyError
from siamesenorm.residual.grafts import graft_text
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.train.config import RunConfig
from siamesenorm.train.folder import GRAFT, WEIGHTS
from siamesenorm.train.init_from import FIELD, FREE, check_tokenizer, source_model
from siamesenorm.train.parameters import choose_parameters

FOLDER, RECORD = "grafts", "grafts.json"
BOUND = 1e-6
"""Largest KL of a token in float32, in nats, of what counts as the same function."""
ROW, TOKENS = 256, 2048
"""Of the held-out text that certificates are made on."""


@dataclass(frozen=True)
class GraftSource:
    """A trained language model that a comparison begins with."""

    path: Path
    fields: dict[str, Any]
    """Of its model."""

    @property
    def topology(self) -> str:
        """As it is."""
        return str(self.fields["topology"])

    @cached_property
    def opened(self) -> tuple[LanguageModel, Tokenizer | None]:
        """Its model in float32, to be evaluated, and its tokenizer."""
        return open_language(self.path, "--graft")

    @property
    def model(self) -> LanguageModel:
        """In float32, to be evaluated."""
        return self.opened[0]

    def overrides(self) -> list[str]:
        """Fields of a run on it: the model's, and its tokenizer."""
        fields = {name: value for name, value in self.fields.items() if name != "topology"}
        own = [f"model.{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in fields.items()]
        return [*own, f"data.tokenizer={self.path}"] if (self.path / FILE).is_file() else own


def open_graft_source(path: Path) -> GraftSource:
    """What a folder or a run is; no weight is read."""
    if not path.is_dir():
        raise ConfigError(f"--graft: {str(path)!r} is no folder; it takes a run or a Hugging Face folder")
    try:
        return GraftSource(path.resolve(), source_model(str(path), "language"))
    except (ConfigError, DataError) as error:
        raise ConfigError(str(error).replace(FIELD, "--graft")) from None


def check_field(path: str) -> None:
    """Raise where a field of a comparison is the source's to say."""
    section, _, name = path.partition(".")
    if (section == "model" and name not in FREE) or path in ("train.init_from", "train.init_model"):
        raise ConfigError(f"--set: {path} is not allowed with --graft, whose source says it")


def graft_names(topologies: Sequence[str]) -> tuple[str, ...]:
    """Topologies as grafts to them are made."""
    try:
        return tuple(map(graft_text, topologies))
    except TopologyError as error:
        raise ConfigError(f"--topologies: {error}") from None


def check_awake(source: GraftSource, config: RunConfig) -> None:
    """Raise where a run would train nothing of a graft's own: whatever else it learns, it stays the old topology."""
    with torch.device("meta"):
        model = LanguageModel(cast(LMConfig, config.model))
        choose_parameters(model, config)
    topology, asked = model.config.topology, config.train.parameters
    if topology != source.topology and not any(p.requires_grad for p in model.residual_parameters().values()):
        raise ConfigError(
            f"--parameters: {asked!r} is not allowed with a graft to {topology}, which would stay {source.topology} "
            f"while its own parameters are frozen; it takes {asked}+residual"
        )


@dataclass(frozen=True)
class GraftPlan:
    """A source and the topologies that it is compared in."""

    source: GraftSource
    out: Path
    topologies: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    """What `check` has found, for `write` and for reports."""

    @property
    def starts(self) -> dict[str, str]:
        """What runs of each topology begin with."""
        return {topology: str(self.place(topology) / WEIGHTS) for topology in self.topologies}

    def overrides(self) -> dict[str, tuple[str, ...]]:
        """Of the runs of each topology: what they begin with, and the fields of the model that its graft changes."""
        return {
            topology: (
                f"train.init_from={start}",
                *(f"model.{name}={json.dumps(value)}" for name, value in self._changed(topology).items()),
            )
            for topology, start in self.starts.items()
        }

    def _changed(self, topology: str) -> dict[str, Any]:
        """Fields of the source's model, beside the topology, that its graft has otherwise; with their new values."""
        if topology == self.source.topology:
            return {}
        try:
            made = graft_config(LMConfig.model_validate(self.source.fields), topology).model_dump(mode="json")
        except TopologyError as error:
            raise ConfigError(f"--graft: {error}") from None
        return {n: v for n, v in made.items() if n != "topology" and v != self.source.fields.get(n, v)}

    def place(self, topology: str) -> Path:
        """The folder of a graft, or of the copy."""
        return self.out.resolve() / FOLDER / re.sub(r"[^A-Za-z0-9_.=+-]+", "_", topology)

    def check(self, tasks: Sequence[LanguageTask]) -> None:
        """Graft to every topology and certify it on held-out text; raises where one is not the same function.

        tasks: one for every data section of the comparison; the source is measured on each. What an earlier call of
        the same comparison has found of the same weights is taken from there.
        """
        for task in tasks:
            try:
                check_tokenizer(task, self.source.opened[1])
            except ConfigError as error:
                raise ConfigError(str(error).replace(FIELD, "--graft").partition("; ")[0]) from None
        digest = weights_hash(self.source.model)
        earlier = self._earlier()
        if earlier.get("weights", digest) != digest:
            raise ConfigError(
                f"--graft: {str(self.source.path)!r} is not what it was when this comparison began; give another --out"
            )
        certificates = dict(earlier.get("certificates", {}))
        for topology in self.topologies:
            if topology != self.source.topology and topology not in certificates:
                certificates[topology] = self._certificate(topology, tasks[0])
        self.facts.update(
            source=str(self.source.path),
            topology=self.source.topology,
            weights=digest,
            starts={**earlier.get("starts", {}), **self.starts},
            certificates=certificates,
            fields={
                **earlier.get("fields", {}),
                **{name: self.source.fields[name] for topology in self.topologies for name in self._changed(topology)},
            },
            before=earlier.get("before") or [self._before(task) for task in tasks],
        )

    def _certificate(self, topology: str, task: LanguageTask) -> dict[str, Any]:
        ids, of = certificate_tokens(task, self.source.model.config.max_length)
        found = {"text": of, "bound": BOUND, **certify(self.source.model, self._grafted(topology), ids)}
        largest = found["fp32"]["largest_kl"]
        if not largest <= BOUND:
            raise ConfigError(
                f"--graft: {topology} does not compute what the source does, KL is {largest:.3g} of at most {BOUND:g}; "
                f"siamesenorm graft says more"
            )
        return found

    def _grafted(self, topology: str) -> LanguageModel:
        if topology == self.source.topology:
            return self.source.model
        try:
            return graft(self.source.model, topology)
        except TopologyError as error:
            raise ConfigError(f"--graft: {error}") from None

    @torch.no_grad()
    def _before(self, task: LanguageTask) -> dict[str, Any]:
        found = task.evaluate(self.source.model)
        return {"data": [Path(name).name for name in task.data_config.train], **found}

    def write(self) -> None:
        """The grafts that are not there yet, each whole or not at all, and what was found of them."""
        from safetensors.torch import save

        for topology in self.topologies:
            place, certificate = self.place(topology), self.facts["certificates"].get(topology)
            if (place / WEIGHTS).is_file():
                continue
            grafted = self._grafted(topology)
            place.mkdir(parents=True, exist_ok=True)
            config = json.dumps(grafted.config.model_dump(mode="json"))
            metadata = {"format": "pt", "task": "language", "config": config, "step": "0"}
            if certificate is not None:
                write_json(place / GRAFT, {"source": str(self.source.path), "topology": topology, **certificate})
            weights = {name: tensor.contiguous() for name, tensor in grafted.state_dict().items()}
            write_whole(place / WEIGHTS, save(weights, metadata=metadata))
        (self.out / FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(self.out / FOLDER / RECORD, self.facts)

    def _earlier(self) -> dict[str, Any]:
        """What is on record, of grafts that are still there."""
        try:
            found = read_object(self.out / FOLDER / RECORD, "--graft", strict=False)
        except DataError:
            return {}
        kept = found.get("certificates")
        there = {t: c for t, c in kept.items() if (self.place(t) / WEIGHTS).is_file()} if isinstance(kept, dict) else {}
        return {**found, "certificates": there}


def certificate_tokens(task: LanguageTask, longest: int) -> tuple[Tensor, str]:
    """Rows of held-out tokens, and what they are of."""
    data = next(iter(task.held_out.values()))
    width = min(ROW, longest, len(data.tokens))
    rows = max(1, min(TOKENS, len(data.tokens)) // width)
    ids = data.tokens.read(0, rows * width).astype("int64")
    return torch.from_numpy(ids).view(rows, width), data.tokens.name
