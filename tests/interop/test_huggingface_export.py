"""Exported folders: complete or absent, and loaded where this package is not."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from closeness import assert_same_but_for_rounding
from siamesenorm.data import ByteTokenizer, train_bpe
from siamesenorm.errors import InteropError
from siamesenorm.interop.huggingface import SiameseNormForCausalLM, byte_tokenizer, export, from_language_model
from siamesenorm.interop.huggingface.bundle import bundled_files
from siamesenorm.layers.rope_scaling import Scaling
from siamesenorm.layers.rotary import Rotary
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual.kernels import native

from .huggingface_models import HYBRID, language_model, lm_config, tokens

ELSEWHERE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("siamesenorm", "pydantic"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
results = {}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    ids = torch.arange(3, 15)[None]
    results[folder] = model(ids).logits.detach()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 15)
    model.train()(ids, labels=ids).loss.backward()
    model.save_pretrained(folder + "-again")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert tokenizer("é").input_ids == [0xC3, 0xA9]
assert "siamesenorm" not in sys.modules
save_file({name.replace("/", "|"): value for name, value in results.items()}, "logits.safetensors")
"""
BYTES = {"vocab_size": 258}
IMPORTED = {
    "activation": "geglu_tanh",
    "qkv_bias": True,
    "query_factor": 1.5,
    "embedding_scale": 3.0,
    "rope_scaling": {"kind": "llama3", "factor": 4.0, "original_length": 16},
    "rotary_dim": 4,
    "learned_positions": True,
    "window": 5,
    "full_every": 2,
    "window_rope_theta": 100.0,
}
"""What only imported models have."""


def test_a_machine_without_the_package_computes_the_same(tmp_path):
    models = {
        "siamese": language_model(HYBRID, **BYTES),
        "experts": language_model("hyper", tied=True, moe={"experts": 4, "top_k": 2, "expert_dim": 12}, **BYTES),
        "imported": language_model("sandwich", **IMPORTED, **BYTES),
    }
    for name, model in models.items():
        export(model, tmp_path / name, tokenizer="byte")
    folders = [str(tmp_path / name) for name in models]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ELSEWHERE, *folders]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "logits.safetensors")
    ids = torch.arange(3, 15)[None]
    for name, model in models.items():
        logits = found[str(tmp_path / name).replace("/", "|")]
        with native.disabled():  # the compiled kernels are not exported: they round otherwise
            expected = model(ids).logits
        assert_same_but_for_rounding(logits, expected)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-again").eval()
        assert type(again).__module__.startswith("siamesenorm.")
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_source_is_ours_but_for_its_imports():
    files = bundled_files()
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level:
                imported = [node.module] if node.module else [alias.name for alias in node.names]
                assert {f"{module}.py" for module in imported} <= set(files), name
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                first = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                known = {*sys.stdlib_module_names, "torch", "transformers"}
                assert str(first).split(".")[0] in known, (name, first)
    assert "class Siamese(Topology):" in files["residual_siamese.py"]
    assert "pydantic" not in files["models_lm_config.py"]


def test_the_plain_config_is_the_checked_ones_twin():
    source = re.sub(r"(?m)^from \.\w+ import \w+$", "", bundled_files()["models_lm_config.py"])
    module = type(sys)("plain")
    module.__dict__.update(Rotary=Rotary, Scaling=Scaling)
    sys.modules["plain"] = module  # dataclasses look their module up
    try:
        exec(compile(source, "models_lm_config.py", "exec"), module.__dict__, None)
    finally:
        del sys.modules["plain"]
    scaling = {"kind": "linear", "factor": 2.0}
    for config in (
        lm_config(),
        lm_config(moe={"experts": 4, "top_k": 1, "expert_dim": 8}, kv_heads=None),
        lm_config(rope_scaling=scaling, window=3, full_every=2, window_rope_theta=9.0),
    ):
        plain = module.LMConfig(**config.model_dump())
        assert plain.model_dump() == config.model_dump()
        assert plain.model_fields == tuple(LMConfig.model_fields)
        assert (plain.num_kv_heads, plain.dim_per_head) == (config.num_kv_heads, config.dim_per_head)
        assert (plain.rotary, plain.window_rotary) == (config.rotary, config.window_rotary)
        assert [plain.is_windowed(block) for block in (0, 1)] == [config.is_windowed(block) for block in (0, 1)]


def test_what_lies_in_the_folder(tmp_path):
    model = language_model(**BYTES)
    folder = export(model, tmp_path / "new" / "model", tokenizer="byte", dtype=torch.bfloat16)
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_siamesenorm.SiameseNormForCausalLM"
    assert (config["eos_token_id"], config["pad_token_id"], config["dtype"]) == (256, 257, "bfloat16")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 256
    assert model.embedding.weight.dtype == torch.float32
    plain = export(model, tmp_path / "plain", remote_code=False)
    assert sorted(path.name for path in plain.iterdir()) == [
        "config.json",
        "export.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert "auto_map" not in json.loads((plain / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(plain).eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_exporting_leaves_a_transformers_model_as_it_was(tmp_path):
    model = from_language_model(language_model(**BYTES))
    before = model.config.to_dict()
    export(model, tmp_path / "model", tokenizer="byte")
    assert model.config.to_dict() == before


def test_nothing_is_overwritten_or_left_half_written(tmp_path, monkeypatch):
    model = language_model(**BYTES)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InteropError, match="is not empty"):
        export(model, tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"

    def fail():
        raise OSError("disk full")

    with pytest.raises(InteropError, match=r"notes\.txt' was not made by this program"):
        export(model, tmp_path / "full", overwrite=True)
    monkeypatch.setattr("siamesenorm.interop.huggingface.exporter.bundled_files", fail)
    with pytest.raises(OSError, match="disk full"):
        export(model, tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_wrong_tokenizers_are_refused(tmp_path):
    for model, tokenizer, words in (
        (language_model(), "byte", "bytes take at least 256"),
        (language_model(**BYTES), "word", "'word' is not known"),
        (language_model(), byte_tokenizer(), "258 tokens, more than"),
    ):
        with pytest.raises(InteropError, match=words):
            export(model, tmp_path / "model", tokenizer=tokenizer)
        assert not list(tmp_path.iterdir())


# The byte tokenizer --------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "plain",
    "  two  spaces\t\r\n",
    "ünïcödé 😀 日本",
    "<|endoftext|><|padding|>",
    "".join(map(chr, range(1, 300))),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_is_a_token_and_every_text_comes_back(text):
    tokenizer = byte_tokenizer()
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_of_bytes(tmp_path):
    tokenizer = byte_tokenizer()
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256, 257)
    assert tokenizer.decode([104, 105, 256, 257], skip_special_tokens=True) == "hi"
    batch = tokenizer(["a", "abc"], padding=True)
    assert batch.input_ids == [[257, 257, 97], [97, 98, 99]]
    assert batch.attention_mask == [[0, 0, 1], [1, 1, 1]]
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("<|endoftext|>é").input_ids == list("<|endoftext|>é".encode())
    assert loaded.eos_token_id == 256
    assert len(byte_tokenizer(256)) == 256
    assert byte_tokenizer(256).eos_token_id is None


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_the_tokenizers_of_the_data_room(tmp_path, name):
    texts = ["the cat sat on the mat, the rat sat on the cat", *TEXTS]
    tokenizer = ByteTokenizer() if name == "byte" else train_bpe(texts * 4, 280)
    folder = export(language_model(vocab_size=300), tmp_path / "model", tokenizer=tokenizer)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert [loaded(text).input_ids for text in texts] == tokenizer.encode_batch(texts)
    assert [loaded.decode(loaded(text).input_ids) for text in texts] == texts
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == tokenizer.eos_id
    assert loaded.pad_token_id is not None


@pytest.mark.parametrize("topology", ["siamese:prores=5", "pre:prores=5"])
def test_branches_that_grow_are_exported_as_far_as_they_have_grown(tmp_path, topology):
    fields = {"dim": 8, "blocks": 3, "heads": 2, "ffn_dim": 12, "vocab_size": 11, "max_length": 16}
    model = LanguageModel(LMConfig(**fields, topology=topology), seed=0).eval()
    model.residual.set_step(4)
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    export(model, tmp_path / "model")
    loaded = SiameseNormForCausalLM.from_pretrained(tmp_path / "model").eval()
    for same in (from_language_model(model), loaded, loaded.to_language_model().eval()):
        torch.testing.assert_close(same(ids).logits, expected)
