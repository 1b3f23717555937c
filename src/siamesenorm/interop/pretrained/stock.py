"""A model of ours as a folder of a stock architecture of transformers: no code of ours is needed to run it.

::

    export_stock(model, "exported", "llama", tokenizer=tokenizer)
    LlamaForCausalLM.from_pretrained("exported")
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_folder import silenced
from siamesenorm.interop.pretrained.architectures import ARCHITECTURES, architecture_of
from siamesenorm.interop.pretrained.names import Targets, targets_of
from siamesenorm.interop.pretrained.stock_config import stock_config
from siamesenorm.interop.staging import staged
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.parametrization import depth_ratio, width_ratio

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_stock(
    model: LanguageModel,
    directory: Path | str,
    model_type: str,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    generation: Any = None,
    max_shard_size: int | str = "5GB",
    chat_template: str | None = None,
) -> Path:
    """Write a folder that transformers' own class of `model_type` loads, with the same logits.

    What the architecture cannot carry raises `InteropError` with its name and what can. Arguments as of
    `siamesenorm.interop.huggingface.export`.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    from siamesenorm.interop.huggingface.tokenizer import for_transformers

    theirs, tensors = stock_model(model, model_type, dtype)
    reading = None if tokenizer is None else for_transformers(tokenizer, theirs.vocab_size, chat_template)
    for name in SPECIAL if reading is not None else ():
        setattr(theirs, name, getattr(reading, name))
    with staged(Path(directory), overwrite) as folder, silenced():
        theirs.save_pretrained(folder)
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
        (generation or GenerationConfig.from_model_config(theirs)).save_pretrained(folder)
        if reading is not None:
            reading.save_pretrained(folder)
    return Path(directory)


def stock_model(
    model: LanguageModel, model_type: str, dtype: torch.dtype | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """Their configuration and their tensors by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in ARCHITECTURES:
        raise InteropError.not_allowed("--to", model_type, ARCHITECTURES)
    try:
        theirs, targets, state = carried(model, model_type)
    except InteropError as error:
        fitting = [name for name in ARCHITECTURES if name != model_type and can_carry(model, name)]
        instead = f"it can be {' or '.join(fitting)}" if fitting else "hf carries every model"
        raise InteropError(f"{error.sentence}; {instead}") from None
    dtype = dtype or state["embedding.weight"].dtype
    theirs.architectures, theirs.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], dtype
    taken = {name: tensor.to(dtype, copy=True).contiguous() for name, tensor in each_once(targets, state)}
    return theirs, taken


def carried(model: LanguageModel, model_type: str) -> tuple[Any, Targets, dict[str, Tensor]]:
    """Their configuration, where their tensors lie in ours, and ours; raises where there is no place for something."""
    kind = architecture_of(model_type)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    config, state = standard_parametrization(model.config, state)
    config, state = scaled_embedding(config, state, math.sqrt(config.dim) if kind.plus_one else 1.0)
    theirs = stock_config(config, model_type)
    targets = targets_of(config, kind, theirs)
    check_nothing_is_left(targets, state, model_type)
    return theirs, targets, state


def can_carry(model: LanguageModel, model_type: str) -> bool:
    """Whether a model is of this architecture."""
    try:
        carried(model, model_type)
    except InteropError:
        return False
    return True


def standard_parametrization(c: LMConfig, state: dict[str, Tensor]) -> tuple[LMConfig, dict[str, Tensor]]:
    """The same function without CompleteP's factors: those of branches and of the head go into weights behind them."""
    wide, deep = width_ratio(c), depth_ratio(c)
    last = {"sandwich": r"links\.\d+\.output_norm", "reordered": r"links\.\d+\.norm"}.get(
        c.topology, r"(attention\.out|ffn\.down)\.|ffn\.[wb]_out$"
    )
    if c.parametrization == "standard" or (deep != 1 and "norm" in last and not c.norm_affine):
        return c, state
    changed = {name: tensor / deep if re.search(last, name) else tensor for name, tensor in state.items()}
    if wide != 1:
        changed["head.weight"] = state.get("head.weight", state["embedding.weight"]) / wide
    standard = {"parametrization": "standard", "base_width": None, "base_depth": None}
    return c.model_copy(update={**standard, "tied": c.tied and wide == 1}), changed


def scaled_embedding(c: LMConfig, state: dict[str, Tensor], scale: float) -> tuple[LMConfig, dict[str, Tensor]]:
    """The same function with an embedding that is multiplied by `scale`; a head that was tied to it goes apart."""
    if math.isclose(c.embedding_scale, scale):
        return c, state
    embedding = state["embedding.weight"]
    changed = {"head.weight": embedding, **state, "embedding.weight": embedding * (c.embedding_scale / scale)}
    return c.model_copy(update={"embedding_scale": scale, "tied": False}), changed


def each_once(targets: Targets, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, each under the first of its names."""
    given: set[str] = set()
    for name, target in targets.items():
        if target.place not in given:
            given.add(target.place)
            yield name, target.take(state)


def check_nothing_is_left(targets: Targets, state: dict[str, Tensor], model_type: str) -> None:
    """Raise where a tensor of ours is nowhere in theirs and not zero, such as a bias that they do not have."""
    left = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in state.items()}
    for target in targets.values():
        target.within(left).fill_(False)
    for name, tensor in state.items():
        if bool((left[name] & (tensor != 0)).any()):
            raise InteropError(f"--to: {name} cannot be carried by {model_type}, which has no such weights")
