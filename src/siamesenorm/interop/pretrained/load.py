"""From another's Hugging Face folder or GGUF file to a `LanguageModel` with the same logits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.data.reading import read_object
from siamesenorm.data.tensors import each_tensor
from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_folder import check_shapes, read_by_others
from siamesenorm.interop.gguf.reader import GgufFile
from siamesenorm.interop.gguf.translation import folder_tensors, their_fields
from siamesenorm.interop.pretrained.architectures import Architecture, architecture_of, read_config
from siamesenorm.interop.pretrained.names import IGNORED, PLUS_ONE, Targets, targets_of
from siamesenorm.models.lm import LanguageModel, LMConfig

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
HEADS = ("lm_head.weight", "embed_out.weight")
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load(source: Path | str, *, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of a Hugging Face folder of Llama, Mistral, Qwen, OLMo, Gemma, GPT-2 or one of their kin.

    source: the folder, or a GGUF file of Llama, Qwen 2 and 3 or OLMo 2.
    dtype: of its weights; default: as they lie there (Gemma: float32, since its gains are stored less one; float32
    too where a file is quantised).
    What cannot be carried raises `InteropError` with its name. Weights are read one tensor at a time.
    """
    place = Path(source)
    config, kind, theirs = config_of(place)
    if is_gguf(place):
        file = GgufFile.open(place, "source")
        tensors, dtype = folder_tensors(file, theirs), dtype or file.dtype
    else:
        tensors = (pair for path in shard_files(place) for pair in each_tensor(path, "source"))
    return fill(config, targets_of(config, kind, theirs), tensors, dtype)


def config_of(source: Path) -> tuple[LMConfig, Architecture, Any]:
    """Our configuration of a source's model, its kind, and their configuration."""
    theirs = their_config(source)
    kind = architecture_of(theirs.model_type)
    return read_config(theirs, kind), kind, theirs


def is_gguf(source: Path) -> bool:
    """Whether a source is to be read as a GGUF file."""
    return source.suffix.lower() == ".gguf" and not source.is_dir()


def their_config(source: Path) -> Any:
    """The source's configuration as transformers reads it, every default resolved; no code of a folder is run."""
    from transformers import CONFIG_MAPPING

    if is_gguf(source):
        file = GgufFile.open(source, "source")
        fields = their_fields(file)
        check_shapes("source", source, fields, [entry.shape for entry in file.entries.values()])
        with read_by_others("source", source):
            return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    if not source.is_dir():
        raise InteropError(
            f"source: {str(source)!r} is not a folder; it takes a Hugging Face model folder or a GGUF file"
        )
    fields = read_object(source / "config.json", "source", strict=False)
    architecture_of(fields.get("model_type"))
    with read_by_others("source", source):
        return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


def fill(
    config: LMConfig, targets: Targets, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> LanguageModel:
    """A model of these tensors, each put where it belongs; what is missing or unknown raises with its name."""
    with torch.device("meta"):
        model = LanguageModel(config)
    state: dict[str, Tensor] = {}
    given: set[str] = set()
    head: Tensor | None = None
    for name, tensor in tensors:
        if name not in targets:
            if name.endswith(IGNORED):
                continue
            if config.tied and name in HEADS:
                head = tensor
                continue
            name = f"transformer.{name}" if f"transformer.{name}" in targets else name  # GPT-2's first files
        if name not in targets:
            raise InteropError(f"source: tensor {name} is none that such a model has")
        check_numbers(name, tensor)
        if not state:
            changed = any(target.change is PLUS_ONE for target in targets.values())
            wanted = dtype or (torch.float32 if changed else tensor.dtype)
            state = {ours: torch.zeros(place.shape, dtype=wanted) for ours, place in model.state_dict().items()}
        targets[name].put(tensor, name, state)
        given.add(targets[name].place)
    missing = [name for name, target in targets.items() if target.place not in given]
    if missing:
        more = f" and lack {len(missing) - 1} more" if missing[1:] else ""
        raise InteropError(f"source: the weights have no {missing[0]}{more}")
    if head is not None and not torch.equal(head.to(state["embedding.weight"]), state["embedding.weight"]):
        raise InteropError(
            "source: the weights have a head that is not the embedding, though tie_word_embeddings in config.json says "
            "so; it takes false there, or weights without a head"
        )
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(True)


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise where a tensor is none of plain, finite numbers."""
    if tensor.dtype not in PRECISIONS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in PRECISIONS)
        found = str(tensor.dtype).removeprefix("torch.")
        raise InteropError(f"source: tensor {name} is of {found}, which cannot be carried; it takes {known}")
    if not torch.isfinite(tensor).all():
        raise InteropError(f"source: tensor {name} holds numbers that are not finite; the weights are damaged")


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, as its index names them."""
    if (folder / INDEX).is_file():
        listed = read_object(folder / INDEX, "source").get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise InteropError(f"source: {str(folder / INDEX)!r} is damaged: it takes a weight_map of names to files")
        names = sorted(set(listed.values()))
        for name in names:
            if name != Path(name).name:
                raise InteropError(
                    f"source: {name!r} in {str(folder / INDEX)!r} is not allowed; it takes a file's name"
                )
    elif (folder / WHOLE).is_file():
        names = [WHOLE]
    else:
        raise InteropError(f"source: {str(folder)!r} has neither {WHOLE} nor {INDEX}; it takes safetensors files")
    for name in names:
        if not (folder / name).is_file():
            raise InteropError(f"source: {str(folder / name)!r} is not there; {INDEX} names it")
    return [folder / name for name in names]
