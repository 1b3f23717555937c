"""The sections of a language run: corpora, and what is measured on held-out text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from siamesenorm.tasks.base import HOW, AsTuple, Section

Texts = Annotated[tuple[str, ...], AsTuple]
Weights = Annotated[tuple[float, ...], AsTuple]
Corpora = Annotated[Texts, BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]


class TextDataConfig(Section):
    """What a language model reads."""

    train: Corpora = Field(
        min_length=1,
        description="Corpora: text files or folders of them, folders from `siamesenorm data prepare`, .npy arrays of "
        "tokens or folders of them, JSONL of examples (prompt and answer, or messages) whose answers alone are learnt, "
        "or embedded ones: python-code, python-docs, arithmetic.",
    )
    weights: Weights | None = Field(
        default=None, description="Share of each corpus in training; null: every sequence of all of them equally often."
    )
    validation: Corpora | None = Field(
        default=None, description="Held-out text; null: what the training corpora themselves hold out."
    )
    tokenizer: str = Field(
        default="byte",
        min_length=1,
        description="Of texts, examples, embedded corpora and .npy arrays: byte, a tokenizer.json or its folder.",
    )
    template: Literal["auto", "chat", "plain", "verbatim"] = Field(
        default="auto",
        description="How examples are written: chat: by the tokenizer's chat template; plain: User: … Assistant: …; "
        "verbatim: prompt and answer alone; auto: chat where the tokenizer's folder has a template, else plain.",
    )
    sequence_length: int = Field(ge=1, le=2**24, description="Tokens of a sequence.")
    document_masking: bool = Field(
        default=False, description="Whether documents in one sequence are hidden from each other."
    )
    dtype: Literal["uint16", "uint32"] = Field(default="uint16", description="Of .npy arrays without a header.")
    eos_id: int | None = Field(default=None, ge=0, description="Id that ends a document in .npy arrays.")
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**63, description="Order of data; null: train.seed.")
    prefetch: Annotated[int, HOW] = Field(default=2, ge=0, le=1024, description="Batches made ahead.")


class LanguageEvaluationConfig(Section):
    """What is measured on held-out text."""

    every: int | None = Field(default=1000, ge=1, description="Steps between evaluations, also at the end; null: none.")
    sequences: int | None = Field(default=None, ge=1, description="Sequences of each held-out text; null: all.")
    at_once: int | None = Field(
        default=None, ge=1, description="Sequences that a rank takes at a time; null: up to 16384 tokens of them."
    )
    arithmetic: int = Field(default=0, ge=0, le=10**6, description="Four-choice arithmetic questions; 0: none.")
    shots: int = Field(default=0, ge=0, le=64, description="Solved problems that stand before each question.")
    lm_eval: Texts = Field(default=(), description="Tasks of the lm-evaluation-harness (extra: eval), at the end.")
