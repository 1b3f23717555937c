"""GGUF files: read with the logits of the model that they hold, written and read back, damaged ones in one sentence."""

from __future__ import annotations

import json
import re
import struct
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import siamesenorm
from siamesenorm.cli import main
from siamesenorm.data.bpe import train_bpe
from siamesenorm.errors import InteropError
from siamesenorm.interop import pretrained
from siamesenorm.interop.gguf.exporter import export_gguf, is_gguf_export
from siamesenorm.interop.gguf.reader import GgufFile
from siamesenorm.interop.gguf.tokenizer import CUTS, read_tokenizer, tokenizer_metadata
from siamesenorm.interop.huggingface.tokenizer import as_fast
from siamesenorm.interop.pretrained.stock_config import differences
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.train.init_from import starting_weights
from siamesenorm.train.recipes import resolve

from .gguf_files import BF16, F16, F32, Q4_0, Q4_1, Q8_0, write_gguf
from .pretrained_models import LLAMA3, SHAPE, saved, their_model
from .test_pretrained import IDS, far

NAMES = {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NAMES |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
NAMES |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("up", "gate", "down")}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PUBLISHED = {**LLAMA3, "original_max_position_embeddings": 8192, "factor": 8.0, "rope_theta": 5e5}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 96,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
}


def llama(**changes):
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "intermediate_size": 64, **changes})).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def file_name(name: str) -> str:
    module, leaf = name.rsplit(".", 1)
    if module in OUTER:
        return f"{OUTER[module]}.{leaf}"
    _, _, block, inner = module.split(".", 3)
    return f"blk.{block}.{NAMES[inner]}.{leaf}"


def side_by_side(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head as llama.cpp has them: 0, 4, 1, 5, … of 8."""
    width = rows.shape[0] // heads
    order = [head * width + i + half for head in range(heads) for i in range(width // 2) for half in (0, width // 2)]
    return rows[order]


def as_file(path, model, layout, **metadata):
    """The file of a Llama, and the model with the values that it holds."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        place = file_name(name)
        if "attn_q" in place or "attn_k" in place:
            tensor = side_by_side(tensor, 4 if "attn_q" in place else 2)
        tensors[place] = (tensor, F32 if tensor.dim() == 1 else layout)
    values = write_gguf(path, {**METADATA, **metadata}, tensors)
    for name, tensor in model.state_dict().items():
        place, kept = file_name(name), values[file_name(name)]
        if "attn_q" in place or "attn_k" in place:
            heads = 4 if "attn_q" in place else 2
            back = torch.empty_like(kept)
            back[side_by_side(torch.arange(len(kept)), heads)] = kept
            kept = back
        tensor.copy_(kept)
    return path


@pytest.mark.parametrize("layout", [F32, F16, BF16, Q8_0, Q4_0, Q4_1])
def test_a_file_has_the_logits_of_its_model(layout, tmp_path):
    theirs = llama()
    file = as_file(tmp_path / "model.gguf", theirs, layout)
    model = pretrained.load(file)
    assert model.embedding.weight.dtype == {F16: torch.float16, BF16: torch.bfloat16}.get(layout, torch.float32)
    model = pretrained.load(file, dtype=torch.float32).eval()
    with torch.no_grad():
        assert far(model(IDS).logits, theirs(IDS).logits) < 1e-5


def test_a_file_is_grafted_and_trained_on_as_it_is(tmp_path):
    theirs = llama()
    file = as_file(tmp_path / "model.gguf", theirs, Q8_0)
    command = ["graft", str(file), str(tmp_path / "out"), "--to", "attnres", "--tokens", "64", "--no-remote-code"]
    assert main(command) == 0
    config = resolve("lm-tiny", [f"init_from={file}", "init_model=true"])  # and runs begin with it
    start = starting_weights(config, SimpleNamespace(model_of=lambda config: LanguageModel(config.model)))
    assert torch.equal(start.weights["head.weight"], theirs.lm_head.weight)
    model, tokenizer = siamesenorm.load(tmp_path / "out")
    assert (model.config.topology, tokenizer) == ("attnres:sum=true", None)
    with torch.no_grad():
        assert far(model(IDS).logits, theirs(IDS).logits) < 1e-5


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"general.architecture": "bert"}, "general.architecture = 'bert' cannot be imported"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window = 8 cannot be carried"),
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "cannot be carried; head_dim is 4"),
        ({"llama.block_count": 5}, "the weights have no model.layers.4."),
        ({"llama.block_count": 10**9}, "the weights beside it are 39 tensors"),
        ({"llama.feed_forward_length": 65}, "has shape"),
        ({"tokenizer.ggml.model": "llama"}, "model 'llama' with pre None, cannot be carried"),
        ({"llama.attention.head_count": "four"}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_carried_is_named(metadata, sentence, tmp_path):
    file = as_file(tmp_path / "model.gguf", llama(), F32, **metadata)
    with pytest.raises(InteropError, match=re.escape(sentence)) as refused:
        pretrained.convert(file, tmp_path / "ours")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ours").exists()


def test_damaged_files_are_one_sentence(tmp_path):
    whole = as_file(tmp_path / "whole.gguf", llama(), F16).read_bytes()
    huge = struct.pack("<Q", 2**62)
    broken = [whole[:size] for size in (0, 3, 4, 23, 30, 200, 1000, len(whole) - 40)]
    broken += [b"GGML" + whole[4:], whole[:4] + struct.pack(">I", 3) + whole[8:]]
    broken += [whole[:8] + huge + whole[16:], whole[:16] + huge + whole[24:], whole[:24] + huge + whole[32:]]
    first = b"token_embd.weight" + struct.pack("<I", 2)
    broken += [whole.replace(first + struct.pack("<Q", 32), first + struct.pack("<Q", 2**60))]
    broken += [whole.replace(b"token_embd.weight", b"token_\xff\xfebd.weight")]
    broken += [whole.replace(b"blk.0.attn_q", b"blk.0.attn_k")]
    for number, content in enumerate(broken):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        with pytest.raises(InteropError, match=r"^source: .* cannot be read as GGUF: ") as refused:
            GgufFile.open(file, "source")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cut", CUTS)
def test_a_tokenizer_comes_back(cut, tmp_path):
    texts = [
        "The year 2026 isn't 1984; naïve café ſ\n\n\tdef f(x):  return x**2\r\n",
        "don't  stop 12345 <|endoftext|>",
    ]
    trained = Tokenizer.from_str(train_bpe(texts * 5, 300).to_json())
    known = json.loads(trained.to_str())
    known["pre_tokenizer"], known["normalizer"] = CUTS[cut].pre_tokenizer, CUTS[cut].normalizer
    known["model"]["ignore_merges"] = CUTS[cut].ignore_merges
    tokenizer = as_fast(json.dumps(known), "<|endoftext|>")
    metadata = dict(tokenizer_metadata(tokenizer, 310))
    assert metadata["tokenizer.ggml.pre"] == cut
    assert len(metadata["tokenizer.ggml.tokens"]) == 310
    write_gguf(tmp_path / "model.gguf", metadata, {})
    again = read_tokenizer(GgufFile.open(tmp_path / "model.gguf", "source").metadata)
    for text in texts[:1]:
        assert again(text).input_ids == tokenizer(text).input_ids
        assert again.decode(again(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert (again.eos_token, again.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)


@pytest.mark.parametrize("kind", ["llama", "llama, attention biased", "qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_read_back(kind, dtype, tmp_path):
    gguf = pytest.importorskip("gguf")
    theirs = their_model(kind)
    model = pretrained.load(saved(theirs, tmp_path / "theirs"), dtype=dtype)
    file = export_gguf(model, tmp_path / "model.gguf")
    assert is_gguf_export(file)
    again = pretrained.load(file)
    assert again.embedding.weight.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    ours = GgufFile.open(file, "source")
    for tensor in gguf.GGUFReader(file).tensors:  # another's reader sees the same
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours.tensor(tensor.name).float(), values)


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": PUBLISHED}])
def test_transformers_reads_what_is_written(changes, tmp_path):
    pytest.importorskip("gguf")
    theirs = llama(tie_word_embeddings=True, **changes)
    model = pretrained.load(saved(theirs, tmp_path / "theirs"))
    export_gguf(model, tmp_path / "model.gguf")
    again = pretrained.load(tmp_path / "model.gguf").eval()
    assert not list(differences(again.config, model.config))
    with torch.no_grad():
        assert far(again(IDS).logits, theirs(IDS).logits) < 1e-5
        if not changes:  # it knows nothing of the factors of angles
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
            assert far(loaded(IDS).logits, theirs(IDS).logits) < 1e-5


def test_factors_of_a_parametrization_go_into_the_file(tmp_path):
    pytest.importorskip("gguf")
    scaled = {"parametrization": "completep", "base_width": 16, "base_depth": 2}
    model = LanguageModel(LMConfig(vocab_size=61, dim=32, blocks=3, heads=4, ffn_dim=40, topology="pre", **scaled))
    export_gguf(model.eval(), tmp_path / "model.gguf")
    with torch.no_grad():
        assert far(pretrained.load(tmp_path / "model.gguf").eval()(IDS).logits, model(IDS).logits) < 1e-5


def test_what_gguf_cannot_carry_is_named(tmp_path):
    pytest.importorskip("gguf")
    gemma = pretrained.load(saved(their_model("gemma2"), tmp_path / "theirs"))
    refused = r"topology = 'sandwich' cannot be carried by llama, .* can be gemma2; gguf takes models that are llama"
    with pytest.raises(InteropError, match=refused):
        export_gguf(gemma, tmp_path / "model.gguf")
    model = pretrained.load(saved(llama(vocab_size=300), tmp_path / "llama"))
    with pytest.raises(InteropError, match="this tokenizer cannot be carried by gguf"):
        export_gguf(model, tmp_path / "model.gguf", tokenizer="byte")
    assert not (tmp_path / "model.gguf").exists()
