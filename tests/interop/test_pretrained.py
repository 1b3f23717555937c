"""Models of others, imported: the same logits, in full passes and in cached decoding, here and in a folder of ours."""

from __future__ import annotations

import json

import pytest
import torch

from siamesenorm.interop import pretrained
from siamesenorm.interop.errors import InteropError
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
