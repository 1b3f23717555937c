"""Next-token prediction: corpora and model of a run, its loss, perplexity and four-choice arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from siamesenorm.data import BatchLoader, TrainingData, ValidationData
from siamesenorm.data.choices import Choice, arithmetic_choices, score_choices
from siamesenorm.data.packing import IGNORED
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.data.tokens import Tokens
from siamesenorm.errors import DataError, FieldError
from siamesenorm.layers.mlp import GATED
from siamesenorm.models.counts import FLOAT32
from siamesenorm.models.lm import LanguageModel, LMConfig, LMOutput
from siamesenorm.models.lm.counts import count_lm, flops_of_token
from siamesenorm.residual.kernels.eager import planned
from siamesenorm.tasks.base import ALONE, Batch, Loss, Ranks, Task, check_limits
from siamesenorm.tasks.corpora import (
    arithmetic_settings,
    held_out_names,
    open_corpus,
    open_held_out,
    save_tokenizer_of,
    tokenizer_of,
)
from siamesenorm.tasks.language_config import LanguageEvaluationConfig, TextDataConfig
from siamesenorm.tasks.likelihood import log_likelihoods
from siamesenorm.tasks.metrics import FREQUENCY_TOKENS, Metric, Metrics, entropy, harness_metric
from siamesenorm.tasks.sharing import Sharing

FIRST_TOKENS = 2**16
"""Tokens of an array that are looked at before anything is written."""
EVALUATED = 2**14
"""Tokens that are evaluated together, where evaluation.at_once says nothing."""


class LanguageTask(Task):
    """A decoder learns to predict the next token."""

    name = "language"
    sections = {"model": LMConfig, "data": TextDataConfig, "evaluation": LanguageEvaluationConfig}  # noqa: RUF012
    unit = "tokens"
    in_parts = True
    metrics = {  # noqa: RUF012
        "loss": Metric(higher=False, of="tokens", unit="nats"),
        "perplexity": Metric(higher=False, of="tokens"),
        "perplexity/": Metric(higher=False, of="tokens"),
        "bits_per_byte": Metric(higher=False, of="tokens"),
        "arithmetic": Metric(higher=True, of="questions"),
        "arithmetic/": Metric(higher=True, of="questions"),
        "arithmetic_error": Metric(higher=None, of="questions"),
        "lm_eval/": Metric(higher=None, of="documents"),
    }
    chance = "what frequencies of tokens alone give"

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where model and data do not fit each other; reads no data."""
        model: LMConfig = config.model
        data: TextDataConfig = config.data
        check_limits(model, vocab_size=2**22, max_length=2**24)
        if data.sequence_length > model.max_length:
            raise FieldError.not_allowed(
                "data.sequence_length =", data.sequence_length, f"1 to model.max_length = {model.max_length}"
            )
        if data.weights is not None and len(data.weights) != len(data.train):
            raise FieldError.not_allowed("data.weights =", list(data.weights), f"{len(data.train)}, one per corpus")

    def __init__(self, config: Any) -> None:
        self.model_config: LMConfig = config.model
        self.data_config: TextDataConfig = config.data
        self.evaluation: LanguageEvaluationConfig = config.evaluation
        self.seed, self.batch_size = config.train.seed, config.train.batch_size
        data = self.data_config
        corpora = [open_corpus(name, data, "train") for name in data.train]
        for corpus in corpora:
            self._check_vocabulary(corpus)
        held_out = open_held_out(data) if self.evaluation.every is not None else []
        for corpus in held_out:
            self._check_vocabulary(corpus)
        self.data = TrainingData(
            corpora,
            data.sequence_length,
            weights=data.weights,
            seed=self.seed if data.shuffle_seed is None else data.shuffle_seed,
            document_masking=data.document_masking,
        )
        self.held_out = {
            tokens.name: ValidationData(
                tokens,
                data.sequence_length,
                document_masking=data.document_masking,
                sequences=self.evaluation.sequences,
            )
            for tokens in held_out
        }
        self.harness_directions: dict[str, bool] = {}
        tokenizer_of(data)  # it is written beside the weights; what is wrong with it is said before the first step
        if self.evaluation.lm_eval:
            from siamesenorm.tasks.harness import check_tasks

            check_tasks(self.evaluation.lm_eval)

    def _check_vocabulary(self, corpus: Tokens) -> None:
        """Raise where a corpus has ids that the model does not; those of an array are looked at wherever they lie."""
        size = self.model_config.vocab_size
        if corpus.vocab_size is None:
            corpus.vocab_size = size
            corpus.read(0, min(len(corpus), FIRST_TOKENS))
        elif corpus.vocab_size > size:
            raise DataError.not_allowed(
                "model.vocab_size =", size, f"{corpus.vocab_size} or more for the tokens of {corpus.name!r}"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens of the first corpus."""
        return tokenizer_of(self.data_config)

    @classmethod
    def model_of(cls, config: Any) -> LanguageModel:
        """The language model of a configuration."""
        return LanguageModel(config.model)

    @classmethod
    def only_trained_on(cls, config: Any) -> set[str]:
        """Training corpora that no text is held out of."""
        return set(config.data.train) - set(held_out_names(config.data))

    @classmethod
    def sample_loss(cls, config: Any, model: nn.Module, rows: int) -> Tensor:
        """Of sequences of one document, all tokens of which count."""
        ids = torch.zeros(rows, config.data.sequence_length, dtype=torch.long)
        masked = config.data.document_masking and planned() != "cuda"  # a GPU's kernel needs no mask in memory
        loss: Tensor = model(ids, labels=ids, document_ids=ids if masked else None).loss
        return loss

    def build_model(self) -> nn.Module:
        """A language model with its first weights."""
        return LanguageModel(self.model_config, seed=self.seed)

    def notes(self) -> list[str]:
        """How examples were packed."""
        held_out = (data.tokens for data in self.held_out.values())
        return [tokens.note for tokens in (*self.data.corpora, *held_out) if tokens.note]

    def loader(self, *, rank: int, world_size: int, sample: int, pin_memory: bool) -> BatchLoader:
        """A rank's part of each global batch."""
        return BatchLoader(
            self.data,
            self.batch_size,
            rank=rank,
            world_size=world_size,
            sample=sample,
            prefetch=self.data_config.prefetch,
            pin_memory=pin_memory,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Mean cross-entropy of the next token, with the auxiliary losses of experts."""
        output: LMOutput = model(batch["input_ids"], **{k: v for k, v in batch.items() if k != "input_ids"})
        assert output.loss is not None
        assert output.cross_entropy is not None
        metrics = {"loss": output.cross_entropy}
        if output.experts:
            layers = len(output.experts)
            metrics["balance_loss"] = sum(stats.balance_loss.detach() for stats in output.experts) / layers
            metrics["router_entropy"] = sum(stats.router_entropy.detach() for stats in output.experts) / layers
        return Loss(output.loss, metrics)

    def weight(self, batch: Batch) -> Tensor | None:
        """Scored tokens, where document masking or questions leave some out."""
        some = self.data_config.document_masking or self.data.marked
        return (batch["labels"] != IGNORED).sum() if some else None

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ranks: Ranks = ALONE) -> dict[str, float]:
        """Perplexity of the held-out texts, together and each, and arithmetic accuracy where asked for."""
        sums = {name: self._sums(model, data, ranks) for name, data in self.held_out.items()}
        metrics: dict[str, float] = {}
        if sums:
            nats, tokens = (sum(part) for part in zip(*sums.values(), strict=True))
            metrics |= {"loss": nats / tokens, "perplexity": perplexity(nats / tokens)}
        if len(sums) > 1:
            metrics |= {f"perplexity/{name}": perplexity(nats / tokens) for name, (nats, tokens) in sums.items()}
        if self._scored_whole() and sums:
            texts = [data.tokens for data in self.held_out.values()]
            tokens_per_byte = sum(map(len, texts)) / sum(text.text_bytes or 0 for text in texts)
            metrics["bits_per_byte"] = metrics["loss"] / math.log(2) * tokens_per_byte
        sharing = ranks.sharing(model)
        if self.evaluation.arithmetic:
            metrics |= self._arithmetic(model, sharing)
        if ranks.final and self.evaluation.lm_eval:
            from siamesenorm.tasks.harness import run_tasks

            found, self.harness_directions = run_tasks(
                model, self.tokenizer, self.evaluation.lm_eval, self.model_config.max_length, sharing
            )
            metrics |= found
        return metrics

    def _sums(self, model: nn.Module, data: ValidationData, ranks: Ranks) -> tuple[float, float]:
        """Nats and scored tokens, of all ranks together up to a common factor.

        A batch has the same sequences on any number of ranks, so that their losses are the same numbers.
        """
        size = self.evaluation.at_once or max(1, min(self.batch_size, EVALUATED // self.data_config.sequence_length))
        device = next(model.parameters()).device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        tokens = 0
        for batch in data.batches(size, rank=ranks.rank, world_size=ranks.world_size):
            counted = int((batch["labels"] != IGNORED).sum())
            inputs = {name: values.to(device) for name, values in batch.items()}
            nats += self.loss(model, inputs).metrics["loss"].double() * counted
            tokens += counted
        means = ranks.average({"nats": nats.item(), "tokens": tokens})
        return means["nats"], max(means["tokens"], 1e-9)

    def _scored_whole(self) -> bool:
        """Whether every byte of the held-out texts is scored, so that bits can be counted by byte."""
        texts = self.held_out.values()
        return all(data.tokens.text_bytes is not None and data.scored() == len(data.tokens) for data in texts)

    def _questions(self) -> list[Choice]:
        settings = arithmetic_settings(self.data_config)
        return arithmetic_choices(self.evaluation.arithmetic, settings, shots=self.evaluation.shots)

    def _arithmetic(self, model: nn.Module, sharing: Sharing) -> dict[str, float]:
        questions, tokenizer, longest = self._questions(), self.tokenizer, self.model_config.max_length
        score = score_choices(questions, lambda pairs: log_likelihoods(model, tokenizer, pairs, longest, sharing))
        by_digits = {f"arithmetic/{digits}_digits": share for digits, share in score.by_digits.items()}
        return {"arithmetic": score.accuracy, "arithmetic_error": score.standard_error, **by_digits}

    @classmethod
    def init_rule(cls, config: Any) -> str:
        """Without the standard deviation, where the rule does not look at it."""
        rule, model = super().init_rule(config), config.model
        return rule if model.init in ("megatron", "normal") else rule.replace(f", init_std={model.init_std}", "")

    @classmethod
    def metric(cls, name: str) -> Metric | None:
        """Of the harness's numbers, by their own names."""
        return harness_metric(name) if name.startswith("lm_eval/") else super().metric(name)

    def measures(self) -> Metrics:
        """By corpus and by digits too; the harness is asked for the metrics of its tasks."""
        names: list[str] = []
        if self.held_out:
            names += ["loss", "perplexity"]
            names += [f"perplexity/{name}" for name in self.held_out if len(self.held_out) > 1]
            names += ["bits_per_byte"] if self._scored_whole() else []
        if self.evaluation.arithmetic:
            digits = sorted({question.problem.digits for question in self._questions()})
            names += ["arithmetic", "arithmetic_error", *(f"arithmetic/{count}_digits" for count in digits)]
        known = {name: metric for name in names if (metric := self.metric(name)) is not None}
        if self.evaluation.lm_eval:
            from siamesenorm.tasks.harness import directions_of

            asked = directions_of(self.evaluation.lm_eval)
            known |= {name: Metric(higher, "documents") for name, higher in asked.items()}
        return known

    def directions(self, names: Iterable[str]) -> dict[str, bool]:
        """The harness says itself which way its numbers point."""
        return {**super().directions(names), **self.harness_directions}

    def held_out_sizes(self) -> dict[str, int]:
        """Tokens that are scored, and questions."""
        sizes = {
            "tokens": sum(data.scored() for data in self.held_out.values()),
            "questions": self.evaluation.arithmetic,
        }
        return {unit: size for unit, size in sizes.items() if size}

    @property
    def units_per_sample(self) -> int:
        """Tokens of a sequence."""
        return self.data_config.sequence_length

    @property
    def epoch_samples(self) -> int | None:
        """Sequences of all corpora, where none is taken more often than others."""
        return len(self.data) if self.data_config.weights is None else None

    @property
    def parameters(self) -> int:
        """Matrices of blocks, embedding and head; norms are a thousandth."""
        c = self.model_config
        inner, inner_kv = c.heads * c.dim_per_head, c.num_kv_heads * c.dim_per_head
        halves, experts, hidden = 3 if c.activation in GATED else 2, 1, c.ffn_dim
        if c.moe is not None:
            experts, hidden = c.moe.experts, c.moe.expert_dim
        block = c.dim * (2 * inner + 2 * inner_kv) + experts * halves * c.dim * hidden
        return c.blocks * block + c.vocab_size * c.dim * (1 if c.tied else 2)

    def least_activations(self, recomputed: bool) -> float:
        """A stream and a reading per sublayer and token; all that is kept where nothing is recomputed."""
        c = self.model_config
        return self.data_config.sequence_length * (2 * c.blocks * c.dim if recomputed else self._kept_of_token)

    @cached_property
    def _kept_of_token(self) -> float:
        return count_lm(self.model_config).activation_bytes / FLOAT32

    def flops_per_sample(self, model: nn.Module) -> float:
        """Forward and backward over one sequence."""
        length = self.data_config.sequence_length
        return 3 * length * flops_of_token(cast(LanguageModel, model), length)

    def chance_loss(self) -> float | None:
        """Entropy of the frequencies of tokens that are learnt, over the first sequences of training."""
        count = max(1, min(len(self.data), FREQUENCY_TOKENS // self.data_config.sequence_length))
        samples = np.arange(count, dtype=np.int64)
        learnt = self.data.windows(samples).ravel()
        if self.data.marked:
            labels = self.data.batch(samples)["labels"].numpy()
            learnt = labels[labels != IGNORED]
        return entropy(np.bincount(learnt))

    def save_extras(self, folder: Path) -> None:
        """tokenizer.json, so that a run generates and exports wherever its data is."""
        save_tokenizer_of(self.data_config, folder)


def perplexity(nats: float) -> float:
    """exp of a loss, infinite where it overflows."""
    return math.exp(nats) if nats < 700 else math.inf
