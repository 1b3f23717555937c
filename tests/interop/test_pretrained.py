"""Models of others, imported: the same logits, in full passes and in cached decoding, here and in a folder of ours."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from siamesenorm.errors import InteropError
from siamesenorm.interop import pretrained
from siamesenorm.interop.huggingface import SiameseNormForCausalLM
from siamesenorm.models.lm import generate

from .pretrained_models import KINDS, saved, their_model

IDS = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(1))
CLOSE = 1e-5
"""Relative to the largest logit."""


def far(ours, theirs):
    """The largest difference, relative to the scale of the logits."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_their_own(kind, tmp_path):
    theirs = their_model(kind)
    shards = {"max_shard_size": "20KB"} if kind in ("llama", "mixtral") else {}
    folder = saved(theirs, tmp_path / "theirs", **shards)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(shards)
    model = pretrained.load(folder).eval()
    assert model.config.topology == KINDS[kind][2]
    with torch.no_grad():
        expected = theirs(IDS).logits
        assert far(model(IDS).logits, expected) < CLOSE
        cache = model.new_cache(2)
        steps = [model(part, cache=cache).logits for part in (IDS[:, :30], *IDS[:, 30:].split(1, dim=1))]
        assert far(torch.cat(steps, dim=1), expected) < CLOSE
        pretrained.convert(folder, tmp_path / "ours", remote_code=False)
        again = SiameseNormForCausalLM.from_pretrained(tmp_path / "ours")
        assert far(again(IDS).logits, expected) < CLOSE
        answer = again.generate(IDS[:1, :30], max_new_tokens=6, do_sample=False, eos_token_id=-1)
        assert answer[0, 30:].tolist() == generate(model, IDS[:1, :30], max_new_tokens=6)[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "t5"}, "model_type 't5' cannot be imported"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' in config.json cannot be carried"),
        ({"intermediate_size": 41}, "its config.json asks for"),
        ({"num_hidden_layers": 5}, "the weights have no model.layers.4."),
        ({"num_hidden_layers": 3}, "tensor model.layers.3."),
        ({"model_type": ["llama"]}, "model_type ['llama'] cannot be imported"),
        ({"tie_word_embeddings": True}, "a head that is not the embedding, though tie_word_embeddings"),
    ],
)
def test_what_cannot_be_carried_is_named_and_nothing_is_written(changes, sentence, tmp_path):
    folder = saved(their_model("llama"), tmp_path / "theirs")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(InteropError) as refused:
        pretrained.convert(folder, tmp_path / "ours")
    assert sentence in str(refused.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda tensor: tensor.fill_(float("nan")), "holds numbers that are not finite"),
        (lambda tensor: tensor.to(torch.int8), "is of int8, which cannot be carried; it takes float32"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), "is of float8_e4m3fn, which cannot be carried"),
    ],
)
def test_weights_that_are_no_plain_numbers_are_named(damage, sentence, tmp_path):
    folder = saved(their_model("llama"), tmp_path / "theirs")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": damage(weights["lm_head.weight"])}, folder / "model.safetensors")
    with pytest.raises(InteropError, match=f"tensor lm_head.weight {sentence}"):
        pretrained.load(folder)


def test_fields_that_transformers_does_not_read_change_nothing(tmp_path):
    theirs = their_model("llama")
    folder = saved(theirs, tmp_path / "theirs")
    file = folder / "config.json"
    more = {"sliding_window": 7, "layer_types": ["sliding_attention"] * 4, "partial_rotary_factor": 0.5}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    with torch.no_grad():
        assert far(pretrained.load(folder).eval()(IDS).logits, theirs(IDS).logits) < CLOSE


def test_nothing_is_written_into_the_source(tmp_path):
    folder = saved(their_model("llama"), tmp_path / "theirs")
    with pytest.raises(InteropError, match="it lies in the source"):
        pretrained.convert(folder, folder / "ours")
    assert not (folder / "ours").exists()
