"""Folders that transformers reads: senseless configurations and missing weights are one sentence, at once."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.commands.refusals import one_sentence

from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_folder import check_size, read_by_others, whole
from siamesenorm.interop.huggingface import export
from siamesenorm.models.lm import LanguageModel, LMConfig

SENSELESS = {
    "num_hidden_layers": (10**6, "x", -1, None, [1]),
    "hidden_size": (10**7, -1, 0, 1.5, "x"),
    "vocab_size": (10**9, 0, {}),
    "intermediate_size": (10**9, -5),
    "num_attention_heads": (0, -1, 10**9),
    "max_position_embeddings": (0, -1, "x"),
    "topology": ("x", 3, "hyper:rate=-1"),
    "rope_theta": (0, -1, None),
    "norm_eps": (float("nan"), -1),
    "sliding_window": (-1, 0),
    "moe": ([], {}, {"experts": -1, "top_k": 1, "expert_dim": 1}, {"experts": 2, "top_k": 1, "expert_dim": 4}),
    "model_type": ("llama", "nonsense", None, 3),
    "dtype": ("nonsense", 3),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    config = LMConfig(vocab_size=258, dim=8, blocks=1, heads=2, ffn_dim=8, max_length=32)
    export(LanguageModel(config, seed=0), folder, tokenizer="byte")
    return folder


@pytest.mark.parametrize("field", SENSELESS)
def test_senseless_configurations_are_one_sentence(field, exported, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some text")
    config = json.loads((exported / "config.json").read_text())
    for number, value in enumerate(SENSELESS[field]):
        folder = shutil.copytree(exported, tmp_path / str(number))
        (folder / "config.json").write_text(json.dumps({**config, field: value}))
        one_sentence(["generate", str(folder), "a"], capsys)
        one_sentence(["evaluate", str(folder), "--text", str(tmp_path / "text.txt")], capsys)


def test_weights_that_are_not_there_are_never_drawn_by_chance(exported, tmp_path, capsys):
    folder = shutil.copytree(exported, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    lost = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text("some text")
    assert lost.numel()
    for command in (["generate", str(folder), "a"], ["evaluate", str(folder), "--text", str(tmp_path / "text.txt")]):
        assert "the weights have no model.embed_tokens.weight" in one_sentence(command, capsys)


def test_sizes_are_checked_before_anything_is_made(exported, tmp_path):
    check_size("run", exported)
    folder = shutil.copytree(exported, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 in .* is not allowed"),
        ({"hidden_size": 10**6}, "vocab_size = 258 and hidden_size = 1000000 in .* are not allowed"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InteropError, match=message):
            check_size("run", folder)


def test_whatever_is_raised_inside_is_one_sentence_and_the_log_comes_back(exported, caplog):
    class Panic(BaseException):
        """As Rust's are."""

    def read(error: BaseException) -> None:
        with read_by_others("vae", exported):
            logging.getLogger("others").error("noise")
            raise error

    for error in (ValueError("a\nb"), KeyError("x"), RecursionError(), Panic("panicked")):
        with pytest.raises(InteropError, match=r"^vae: .* cannot be loaded: .+$"):
            read(error)
    with pytest.raises(KeyboardInterrupt):
        read(KeyboardInterrupt())
    assert "noise" not in caplog.text
    logging.getLogger("others").error("heard again")
    assert "heard again" in caplog.text


def test_a_model_is_whole_or_refused():
    model = torch.nn.Identity()
    assert whole((model, {"missing_keys": []})) is model
    with pytest.raises(ValueError, match="the weights have no a and lack 1 more"):
        whole((model, {"missing_keys": {"b", "a"}}))
