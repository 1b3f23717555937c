"""A folder that `AutoModelForCausalLM.from_pretrained` loads, with or without this package.

::

    export(model, "exported", tokenizer="byte")
    AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from siamesenorm.data.tensor_files import LazyTensors, parse_size, write_shards
from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_folder import silenced
from siamesenorm.interop.huggingface.bundle import AUTO_MAP, bundled_files
from siamesenorm.interop.huggingface.convert import from_language_model
from siamesenorm.interop.huggingface.modeling import SiameseNormForCausalLM
from siamesenorm.interop.huggingface.sharing import transformers_name
from siamesenorm.interop.huggingface.tokenizer import HasTokenizerJson, for_transformers
from siamesenorm.interop.staging import staged
from siamesenorm.models.lm import LanguageModel
from siamesenorm.residual import find_topology, parse_topology


def export(
    model: LanguageModel | SiameseNormForCausalLM,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | HasTokenizerJson | str | None = None,
    remote_code: bool = True,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    weights: LazyTensors | None = None,
    overwrite: bool = False,
    generation: GenerationConfig | None = None,
    beside: Mapping[str, str] | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write config.json, generation_config.json, safetensors, the tokenizer's files and the model's source.

    directory: made anew; an earlier export in its place is replaced with `overwrite`, nothing else is.
    tokenizer: transformers' own, one of `siamesenorm.data`, or ``"byte"`` for a model trained on bytes. Its special
    tokens go into the configs.
    remote_code: whether the source is added, so that ``trust_remote_code=True`` loads the folder anywhere.
    dtype: of the weights on disk; default: as they are.
    max_shard_size: of a file of weights; several have an index, as `from_pretrained` reads them.
    weights: where the model is on ``meta``, its weights by our names; they are read and written one after the other.
    generation: settings of generation; default: what the special tokens say.
    beside: other files by name, with their text.
    chat_template: what the model was taught conversations by, where it was.
    The folder appears when it is complete and not before.
    """
    target = Path(directory)
    topology = find_topology(parse_topology(model.config.topology)[0])
    if remote_code and not topology.__module__.startswith("siamesenorm."):
        raise InteropError(
            f"topology: {topology.name!r} comes from {topology.__module__}, whose source an export does not carry; "
            "it takes remote_code=False, and that package wherever the folder is loaded"
        )
    made = model if isinstance(model, SiameseNormForCausalLM) else from_language_model(model)
    reading = None if tokenizer is None else for_transformers(tokenizer, made.config.vocab_size, chat_template)
    if weights is None and dtype not in (None, made.dtype):
        made = copy.deepcopy(made).to(dtype)
    with staged(target, overwrite) as folder, silenced():
        with described(made, reading, AUTO_MAP if remote_code else None, generation):
            if weights is None:
                made.save_pretrained(folder, max_shard_size=max_shard_size)
            else:
                save_lazily(made, folder, weights.to(dtype), max_shard_size)
        if reading is not None:
            reading.save_pretrained(folder)
        if remote_code:
            for name, source in bundled_files().items():
                (folder / name).write_text(source, encoding="utf-8")
        for name, content in (beside or {}).items():
            (folder / name).write_text(content, encoding="utf-8")
    return target


def save_lazily(model: SiameseNormForCausalLM, folder: Path, weights: LazyTensors, max_shard_size: int | str) -> None:
    """What ``save_pretrained`` writes, of a model on ``meta`` whose weights lie elsewhere under our own names."""
    size = max_shard_size if isinstance(max_shard_size, int) else parse_size(max_shard_size, "max_shard_size")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = next(kind.dtype for kind in weights.kinds.values() if kind.dtype.is_floating_point)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_shards(folder, weights.renamed({name: transformers_name(name) for name in weights.kinds}), size)


@contextlib.contextmanager
def described(
    model: SiameseNormForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    auto_map: dict[str, str] | None,
    generation: GenerationConfig | None = None,
) -> Iterator[None]:
    """Configs as they shall be saved, for a while."""
    before = model.config, model.generation_config
    config = copy.deepcopy(model.config)
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(tokenizer, name) is not None:
                setattr(config, name, getattr(tokenizer, name))
    if auto_map is not None:
        config.auto_map = auto_map
    try:
        model.config = config
        if generation is not None:
            model.generation_config = generation
        elif tokenizer is not None:
            model.generation_config = GenerationConfig.from_model_config(config)
        yield
    finally:
        model.config, model.generation_config = before
