"""Why a layout is not allowed for a run."""

from __future__ import annotations

import functools
from typing import Any

from siamesenorm.errors import ConfigError
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.parallel.pipeline import Division, check_pipeline
from siamesenorm.train.parallel.sequence import divides_tokens
from siamesenorm.train.planning.layouts import Layout, has_vocabulary, has_vocabulary_divided, world_of
from siamesenorm.train.planning.profile import Question, whole_model


def problem_of(config: RunConfig, layout: Layout) -> str | None:
    """Why a layout is not allowed; None where it is."""
    model: Any = config.model
    batch = config.train.batch_size
    if batch < layout.data:
        return f"train.batch_size = {batch} is less than {layout.data} processes"
    if layout.micro_batch > layout.share(batch):
        return f"a process has {layout.share(batch)} samples of a step, fewer than {layout.micro_batch}"
    if mixes_pairs(config):
        if batch % (2 * layout.data):
            return f"samples are mixed in pairs, and train.batch_size = {batch} is no multiple of {2 * layout.data}"
        if layout.micro_batch % 2:
            return f"samples are mixed in pairs, and micro-batches of {layout.micro_batch} are odd"
    if layout.ep > 1:
        experts = getattr(getattr(model, "moe", None), "experts", None)
        if experts is None:
            return "the model has no experts"
        if experts % layout.ep or layout.shards % layout.ep:
            return f"{layout.ep} processes divide neither {experts} experts nor {layout.shards} shards evenly"
    if layout.tensor > 1:
        if not hasattr(model, "heads") or not hasattr(model, "ffn_dim"):
            return "tensor parallelism splits models of siamesenorm"
        counts = {"heads": model.heads, "kv_heads": getattr(model, "num_kv_heads", model.heads)}
        if getattr(model, "moe", None) is None:
            counts["ffn_dim"] = model.ffn_dim
        for name, count in counts.items():
            if count % layout.tensor:
                return f"model.{name} = {count} is no multiple of a tensor group of {layout.tensor}"
        try:
            divides_tokens(config, layout.tensor)
            has_vocabulary_divided(config, layout.tensor)
        except ConfigError as error:
            return str(error)
        if "lora" in config.train.parameters:
            return "tensor parallelism is not there for factors of LoRA"
        if "head_dim" not in type(model).model_fields:
            return "heads of this model have no width of their own to plan with"
    return None if layout.pp == 1 else problem_of_stages(config, layout)


def problem_of_stages(config: RunConfig, layout: Layout) -> str | None:
    """Why a pipeline is not allowed: what `siamesenorm.train.parallel.pipeline` would say."""
    if not has_vocabulary(config):
        return "pipelines take language models"
    try:
        check_pipeline(config, world_of(layout), layout.micro_batch, layout.parts(config.train.batch_size))
    except ConfigError as error:
        return str(error)
    return problem_of_division(Question(config, 1, "", ""), layout.pp, layout.schedule, layout.stages)


@functools.lru_cache(maxsize=64)
def problem_of_division(question: Question, pp: int, schedule: str, stages: int) -> str | None:
    """Why so many stages cannot divide a model; None where they can."""
    try:
        Division(whole_model(question.config), World(0, pp, 0, pp, mode="ddp", pp=pp), schedule, stages)
    except ConfigError as error:
        return str(error)
    return None


def mixes_pairs(config: RunConfig) -> bool:
    """Whether a run's task mixes samples in pairs (mixup, CutMix), which are then computed in even numbers."""
    return bool(getattr(getattr(config, "loss", None), "mixes_pairs", False))
