"""A trained model of a folder, file or run in another topology: grafted, certified, then written."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.data.reading import read_text
from siamesenorm.data.sources import embedded_documents
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import ConfigError
from siamesenorm.interop.staging import check_target
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.lm.grafting import certify
from siamesenorm.models.lm.transplant import Transplant, transplant
from siamesenorm.opening import is_model, open_source
from siamesenorm.train.folder import GRAFT, RunFolder
from siamesenorm.train.live_graft import LiveRun, open_live
from siamesenorm.train.trained import run_tokenizer

ROW = 256
"""Tokens of a row to certify on."""


@dataclass(frozen=True)
class ModelToGraft:
    """What is to be grafted."""

    folder: Path
    model: LanguageModel
    tokenizer: Tokenizer | None
    generation: Any = None
    live: LiveRun | None = None
    """The run that is to go on, where it is one."""

    def check_target(self, target: Path, overwrite: bool) -> None:
        """Raise where a graft cannot be written, before there is work that would be lost."""
        if target.resolve().is_relative_to(self.folder.resolve()):
            raise ConfigError.refused("target", target, "it lies in the source, which stays as it is")
        if self.live is None:
            check_target(target, overwrite)
        elif os.path.lexists(target):
            raise ConfigError(f"target: {str(target)!r} is there already; a run takes a new folder")

    def tokens(self, text: Path | None, count: int) -> tuple[Tensor, str]:
        """Rows of tokens to certify on, and what they are."""
        config, tokenizer = self.model.config, self.tokenizer
        width = min(ROW, config.max_length, count)
        if tokenizer is None:
            if text is not None:
                raise ConfigError(
                    "--text: the source has no tokenizer to read it with; without --text tokens are random"
                )
            generator = torch.Generator().manual_seed(0)
            return torch.randint(config.vocab_size, (-(-count // width), width), generator=generator), "random tokens"
        documents = embedded_documents("python-docs", "validation") if text is None else [read_text(text, "--text")]
        ids = torch.tensor(list(tokenizer.encode("\n".join(documents)[: 16 * count]))[:count])
        if len(ids) < 2:
            raise ConfigError(f"--text: {len(ids)} tokens are too few; it takes 2 at least")
        width = min(width, len(ids))
        return ids[: len(ids) // width * width].view(-1, width), "python-docs" if text is None else str(text)


def open_model_to_graft(folder: Path, at: int | None = None) -> ModelToGraft:
    """The model of a folder or GGUF file, and whether it is that of a run which goes on."""
    if is_model(folder) and at is not None:
        raise ConfigError.refused("--at", at, f"{str(folder)!r} is a model and no run")
    run = RunFolder(folder)
    if run.exists and not is_model(folder) and (at is not None or run.status().get("state") != "finished"):
        live = open_live(folder, at)
        return ModelToGraft(folder, live.model, run_tokenizer(folder, live.config), live=live)
    found = open_source(folder, "source", as_it_lies=False)
    return ModelToGraft(folder, found.model, found.tokenizer, found.generation)


@dataclass(frozen=True)
class CertifiedGraft:
    """A graft with its certificate, not written yet."""

    source: ModelToGraft
    made: Transplant
    certificate: dict[str, Any]

    @property
    def largest_kl(self) -> float:
        """Of a token in float32, in nats."""
        return float(self.certificate["fp32"]["largest_kl"])

    def write(self, target: Path, *, remote_code: bool = True, overwrite: bool = False) -> None:
        """A Hugging Face folder; of a run that goes on, a run."""
        source, made = self.source, self.made
        beside = {GRAFT: json.dumps(self.certificate, indent=2) + "\n"}
        if source.live is not None:
            averaged = made.again(source.live.averaged_model()) if source.live.averaged else None
            source.live.go_on_as(made.model, made.carried, target, averaged=averaged, beside=beside)
            return
        from siamesenorm.interop.huggingface import export

        options: dict[str, Any] = {"remote_code": remote_code, "overwrite": overwrite, "generation": source.generation}
        export(made.model, target, tokenizer=source.tokenizer, beside=beside, **options)


def certified_graft(
    source: ModelToGraft,
    topology: str,
    text: Path | None = None,
    tokens: int = 2048,
    bound: float = 1e-6,
    **options: Any,
) -> CertifiedGraft:
    """Graft a model and certify it on a text. options: those of `transplant`."""
    ids, of = source.tokens(text, tokens)
    step = {} if source.live is None else {"step": source.live.step}
    made = transplant(source.model, topology, ids, start=step.get("step", 0), **options)
    certificate: dict[str, Any] = {
        "source": str(source.folder),
        "topology": made.model.config.topology,
        "text": of,
        "bound": bound,
        **step,
    }
    if made.stages:
        certificate |= {"stages": {name: asdict(stage) for name, stage in made.stages.items()}, "kept": made.kept}
    return CertifiedGraft(source, made, certificate | certify(source.model, made.model, ids))
