"""Batches of nothing through the models as other libraries know them: right shapes, gradients of zero."""

import pytest
import torch

from models.test_empty import assert_zero

from .huggingface_models import HYBRID, VOCABULARY, causal_lm

STREAMS = ["pre", "siamese", HYBRID, "hyper", "attnres:blocks=0"]
"""A tensor, pairs, rows, and as many as there are sublayers; the other topologies are tried in our own models."""
MOE = {"experts": 3, "top_k": 2, "expert_dim": 6}


@pytest.mark.parametrize("topology", STREAMS)
@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
def test_transformers(topology, moe):
    model = causal_lm(topology, moe=moe)
    for shape in ((0, 5), (2, 0), (0, 0)):
        ids = torch.zeros(shape, dtype=torch.long)
        out = model(ids, labels=ids)  # the loss is a mean over nothing, and transformers' own
        assert out.logits.shape == (*shape, VOCABULARY)
        (out.logits.sum() + out.loss).backward()
        assert_zero(model)


@pytest.mark.parametrize("distilled", ["", "distilled_"])
@pytest.mark.parametrize("topology", ["siamese", "siamese:form=hybrid_pre", "pre", "hyper"])
def test_timm(distilled, topology):
    pytest.importorskip("siamesenorm.interop.timm", exc_type=ImportError)
    import timm

    size = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 7}
    model = timm.create_model(f"deit_tiny_{distilled}patch16_224_siamese", topology=topology, **size)
    for training in (True, False):
        out = model.train(training)(torch.zeros(0, 3, 32, 32))
        for scores in out if isinstance(out, tuple) else (out,):
            assert scores.shape == (0, 7)
            scores.sum().backward(retain_graph=True)
        assert_zero(model)
