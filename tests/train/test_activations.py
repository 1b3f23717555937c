"""Activation checkpointing keeps what it says: ``full`` nothing but the streams between blocks, for every topology."""

import gc

import pytest
import torch

from models.families import FAMILIES
from models.small import ALL, config
from residual.stacks import tensors_of
from siamesenorm.models.lm import LanguageModel
from siamesenorm.train.activations import KINDS, checkpoint_activations

IDS = torch.zeros(4, 32, dtype=torch.long)
RANDOM_STATE = torch.get_rng_state().numel()
"""Bytes of the generator that torch keeps with every block, to draw the same again."""


PRODUCTS = 4 * IDS.numel() * (64 + 32 + 32 + 96 + 32) + 2**13
"""Bytes of what a block's projections to q, k, v, attention, and the others give, and of small things beside."""


def live_bytes(run):
    """What memory a call leaves in use while its result is there."""
    gc.disable()  # what others left behind must not be freed meanwhile
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = run()
    finally:
        gc.enable()
    assert result.requires_grad
    # As they were recorded: torch's own sum over them, `key_averages`, takes ten times as long as the run.
    events = profile.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def kept_by_a_block(topology, kind):
    """Bytes that a forward pass keeps for one more block."""
    found = []
    for blocks in (3, 4):
        model = LanguageModel(config(topology, blocks=blocks, dim=32), seed=0)
        checkpoint_activations(model, kind)
        model(IDS, labels=IDS)  # what is made once is there
        found.append(live_bytes(lambda model=model: model(IDS, labels=IDS).loss))
    return found[1] - found[0]


def bytes_of_streams(topology):
    """Of the streams behind a block, as far as they were not there before it, each storage once."""
    model = LanguageModel(config(topology, blocks=2, dim=32), seed=0)
    before = model.residual.open(model.embedding(IDS))
    behind, _ = model.blocks[0](before, model.context(IDS))
    old, new = ({s.data_ptr(): s.nbytes() for s in storages(streams)} for streams in (before, behind))
    return sum(size for address, size in new.items() if address not in old)


def storages(streams):
    return [t.untyped_storage() for t in tensors_of(streams)]


@pytest.mark.parametrize("topology", ALL)
def test_full_keeps_the_streams_between_blocks_alone(topology):
    more = kept_by_a_block(topology, "full") - bytes_of_streams(topology) - RANDOM_STATE
    weights = 4 * IDS.numel() if topology == "attnres" else 0  # the last mixture has one source more to weigh
    assert 0 <= more < 64 + 2 * weights  # single numbers


@pytest.mark.parametrize("topology", ["siamese", "siamese:form=hybrid_pre", "pre", "hyper"])
def test_sublayer_keeps_less_than_none_and_more_than_full(topology):
    none, sublayer, full = (kept_by_a_block(topology, kind) for kind in ("none", "sublayer", "full"))
    assert full < sublayer < 0.75 * none


@pytest.mark.parametrize("topology", ["siamese", "pre"])
def test_selective_keeps_matrix_products_and_attention_beside_the_streams(topology):
    none, selective, full = (kept_by_a_block(topology, kind) for kind in ("none", "selective", "full"))
    assert full < selective <= full + PRODUCTS < none


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_of_several_blocks_one_is_computed_again(kind):
    """Three of four blocks keep everything."""
    kept = {}
    for every in (1, 2, 4, 5):
        model = LanguageModel(config("siamese", blocks=4, dim=32), seed=0)
        checkpoint_activations(model, kind, every)
        kept[every] = saved_tensors(lambda model=model: model(IDS, labels=IDS).loss)
    model = LanguageModel(config("siamese", blocks=4, dim=32), seed=0)
    assert kept[1] < kept[2] < kept[4] < kept[5] == saved_tensors(lambda: model(IDS, labels=IDS).loss)


def saved_tensors(run):
    """How many tensors autograd keeps of a pass."""
    count = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: count.append(1) or tensor, lambda tensor: tensor):
        run()
    return len(count)


@pytest.mark.parametrize("topology", ALL)
def test_selective_is_exact_on_every_topology(topology):
    ids, grads, losses = IDS[:2, :9] + torch.arange(9), [], []
    for kind in ("none", "selective"):
        model = LanguageModel(config(topology), seed=0)
        checkpoint_activations(model, kind)
        losses.append(model(ids[:, :-1], labels=ids[:, 1:]).loss)
        grads.append(torch.autograd.grad(losses[-1], list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_same(family, kind):
    model = FAMILIES[family].model(dtype=torch.float32)
    expected = FAMILIES[family].loss(model, torch.float32)
    grads = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    checkpoint_activations(model, kind)
    loss = FAMILIES[family].loss(model, torch.float32)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    again = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(again, grads, rtol=0, atol=0)
