"""Packed documents in blocks, as on a GPU: the dense mask's numbers, in one graph, and nothing read from the device."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex

from siamesenorm.layers import attention
from siamesenorm.layers.mask import takes_blocks, visibility
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.lm import model as lm
from siamesenorm.train.activations import checkpoint_activations
from waiting import never_read

TOKENS = 150  # more than a block of 128, and no multiple of one
IDS = torch.randint(0, 32, (2, TOKENS + 1), generator=torch.Generator().manual_seed(0))


def packed(seed: int) -> torch.Tensor:
    """Documents of some 20 tokens; the last of a row sees its first, whose number it has."""
    documents = (torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.05).cumsum(1)
    documents[1, -10:] = 0
    return documents


@pytest.fixture
def blocks(monkeypatch):
    """FlexAttention on the CPU, with the reference backward that it has and offers to nobody there.

    Its code is not generated: inductor would take half a minute.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    compiled = functools.cache(lambda: torch.compile(flex.flex_attention, backend="aot_eager"))
    monkeypatch.setattr(attention, "_compiled_flex", compiled)
    return lambda: monkeypatch.setattr(lm, "takes_blocks", lambda device, head_dim: True)


def model_of(**changes) -> LanguageModel:
    sizes = {"vocab_size": 32, "dim": 32, "blocks": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 256}
    return LanguageModel(LMConfig(**{**sizes, "topology": "siamese:form=hybrid_pre", **changes}), seed=0)


def gradients(model: LanguageModel, seed: int) -> list[torch.Tensor]:
    """The loss, and what it gives every parameter."""
    model.zero_grad()
    loss = model(IDS[:, :-1], labels=IDS[:, 1:], document_ids=packed(seed)).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("window", [None, 1, 20])
def test_blocks_say_what_the_mask_says(window):
    documents = packed(1)
    arguments = {"window": window, "document_ids": documents, "device": documents.device}
    dense, said = visibility(TOKENS, TOKENS, **arguments), visibility(TOKENS, TOKENS, **arguments, blocks=True)
    assert said.mask is None
    row, query, key = torch.meshgrid(torch.arange(2), torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    assert torch.equal(said.blocks.mask_mod(row, 0, query, key), dense.mask[:, 0])
    kept = said.blocks.to_dense()[:, 0].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :TOKENS, :TOKENS]
    assert not (dense.mask[:, 0] & (kept == 0)).any()


def test_where_blocks_are_taken():
    cuda = torch.device("cuda")
    assert takes_blocks(cuda, 16)
    assert not takes_blocks(cuda, 8)
    assert not takes_blocks(torch.device("cpu"), 64)
    torch.func.grad(lambda x: (x, pytest.fail("no blocks for torch.func") if takes_blocks(cuda, 64) else 0)[0])(
        torch.ones(())
    )
    assert visibility(8, 8, device=cuda, blocks=True).is_causal
    padded = visibility(4, 4, document_ids=packed(1)[:, :4], padding=torch.tensor([0, 1]), blocks=True)
    assert padded.blocks is None


@pytest.mark.parametrize(("checkpointing", "compiled"), [("none", False), ("full", False), ("sublayer", True)])
def test_gradients_are_the_dense_masks(blocks, checkpointing, compiled):
    """Compiled, two blocks and two batches share one graph."""
    torch._dynamo.reset()
    counters.clear()
    model = model_of(window=20)
    expected = [gradients(model, seed) for seed in range(2)]
    blocks()
    checkpoint_activations(model, checkpointing)
    if compiled:
        model.compile_blocks(backend="aot_eager")
    for seed in range(2):
        for mine, theirs in zip(gradients(model, seed), expected[seed], strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_heads_come_in_the_dtype_of_autocast(blocks):
    """As SDPA takes them: norms on heads would leave some in float32."""
    torch._dynamo.reset()
    model = model_of(blocks=1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(IDS[:, :-1], document_ids=packed(0)).logits
        blocks()
        found = model(IDS[:, :-1], document_ids=packed(0)).logits
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_blocks_are_found_without_reading_the_device(blocks):
    model = model_of()
    blocks()
    with never_read(model):
        assert model.context(IDS[:, :-1], document_ids=packed(0)).visible.blocks is not None
