"""The language model on every topology: loss, packing, padding, determinism, construction on meta, wrapping."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from siamesenorm.models.lm import LanguageModel

from .small import ALL, config, stirred


def ids(batch=2, tokens=12, seed=3):
    return torch.randint(0, 50, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("topology", ALL)
def test_loss_and_gradients_equal_those_of_logits(topology):
    model, x = stirred(topology, tied=topology == "pre"), ids()
    labels = x.roll(-1, 1).masked_fill(torch.arange(12) == 11, -100)
    output = model(x, labels=labels)
    assert output.logits is None
    output.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = F.cross_entropy(model(x).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, plain, atol=1e-6, rtol=1e-5)
    plain.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=name)
        assert grads[name].abs().sum() > 0, name


@pytest.mark.parametrize("topology", ["siamese", "siamese:form=hybrid_pre", "span", "hyper"])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_equal_separate_ones(topology, window):
    model = stirred(topology, window=window)
    documents = [ids(1, length, seed=length) for length in (5, 1, 7)]
    packed = torch.cat(documents, 1)
    numbers = torch.cat([torch.full((1, d.shape[1]), i) for i, d in enumerate(documents)], 1)
    together = model(packed, document_ids=numbers).logits
    apart = torch.cat([model(d).logits for d in documents], 1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-4)
    assert (model(packed).logits - apart).abs().max() > 1e-2


def test_left_padding_changes_nothing():
    model, x = stirred(), ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), x], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    both = model(torch.cat([padded, ids(1, 9)]), attention_mask=torch.cat([mask, torch.ones_like(mask)])).logits
    torch.testing.assert_close(both[:1, 3:], model(x).logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(both[1:], model(ids(1, 9)).logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="attention_mask: zeros are allowed at the left"):
        model(padded, attention_mask=mask.flip(1))


def test_a_token_sees_no_later_one_and_no_more_than_its_window():
    x = ids(1, 10)
    changed = x.clone()
    changed[0, 4] = (x[0, 4] + 1) % 50
    for window, blocks, last in ((None, 3, 9), (2, 3, 7)):
        model = stirred(window=window, blocks=blocks)
        moved = (model(x).logits - model(changed).logits).abs().amax(-1)[0] > 0
        assert not moved[:4].any()
        assert moved[4 : last + 1].all()
        assert not moved[last + 1 :].any()  # three blocks of window 2 carry a token three places on


def test_logits_to_keep():
    model, x = stirred(), ids()
    full = model(x).logits
    torch.testing.assert_close(model(x, logits_to_keep=3).logits, full[:, -3:])
    torch.testing.assert_close(model(x, logits_to_keep=torch.tensor([1, 5])).logits, full[:, [1, 5]])
    torch.testing.assert_close(model(x, logits_to_keep=20).logits, full)  # more than there are: all
    assert model(x, logits_to_keep=0).logits.shape == (2, 0, 50)
    with pytest.raises(ValueError, match="logits_to_keep: -1 is not allowed"):
        model(x, logits_to_keep=-1)
    output = model(x, labels=x, logits_to_keep=1)
    assert output.loss is not None
    assert output.logits.shape == (2, 1, 50)


def test_positions_may_be_given():
    model, x = stirred(), ids()
    torch.testing.assert_close(model(x, positions=torch.arange(12)).logits, model(x).logits)
    shifted = model(x, positions=torch.arange(12) + 30).logits  # rotary positions are relative
    torch.testing.assert_close(shifted, model(x).logits, atol=1e-4, rtol=1e-4)
    assert (model(x, positions=torch.arange(12) * 2).logits - model(x).logits).abs().max() > 1e-3


def test_same_seed_same_weights_whatever_was_drawn_before():
    first = LanguageModel(config(), seed=7)
    torch.randn(3)
    state = torch.get_rng_state()
    second = LanguageModel(config(), seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    other = LanguageModel(config(), seed=8)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize("topology", ALL)
def test_meta_construction_then_first_weights(topology):
    with torch.device("meta"):
        model = LanguageModel(config(topology))
    assert all(p.device.type == "meta" for p in model.parameters())
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.init_weights(5)
    for (name, a), b in zip(
        model.named_parameters(), LanguageModel(config(topology), seed=5).parameters(), strict=True
    ):
        assert torch.equal(a, b), name


checkpointed = partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("topology", ["siamese", "siamese:form=hybrid_pre", "span", "hyper", "pre"])
def test_blocks_can_be_checkpointed_from_outside(topology):
    model, x = stirred(topology), ids()
    losses, grads = [], []
    for run in (model.run, checkpointed):
        model.run = run
        model.zero_grad()
        loss = model(x, labels=x).loss
        loss.backward()
        losses.append(loss)
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_blocks_can_be_sharded_from_outside(topology, tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, x = stirred(topology), ids()
    expected = plain(x, labels=x).loss
    expected.backward()
    sharded = stirred(topology)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        loss = sharded(x, labels=x).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, atol=1e-5, rtol=1e-3, msg=name)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("topology", ["siamese", "pre"])
def test_one_graph_when_compiled(topology):
    model, x = stirred(topology, blocks=1, qk_norm="head" if topology == "pre" else "none"), ids()
    model(x, labels=x).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x, labels=x).loss.backward()
    for a, b in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-5, rtol=1e-4)


def test_dropout_draws_in_training_only():
    model, x = stirred(dropout=0.5), ids()
    torch.testing.assert_close(model(x).logits, model(x).logits)
    model.train()
    assert (model(x).logits - model(x).logits).abs().max() > 1e-2


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_biases_and_norms(norm):
    model = stirred(norm=norm, bias=True, norm_bias=True, activation="gelu", qk_norm="projection")
    names = {name for name, _ in model.named_parameters()}
    assert "blocks.0.attention.qkv.bias" in names
    assert "blocks.0.links.0.input_norm.bias" in names
    assert "blocks.0.attention.q_norm.bias" in names
    model(ids(), labels=ids()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_too_long_a_sequence_is_named():
    with pytest.raises(ValueError, match="input_ids: 65 tokens are more than max_length = 64"):
        stirred()(ids(1, 65))


def test_bfloat16_autocast_is_close():
    model, x = stirred("siamese:form=hybrid_pre"), ids()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x, labels=x).loss
    torch.testing.assert_close(low, model(x, labels=x).loss, atol=0.05, rtol=0.05)


def test_moe_adds_its_losses_with_the_configs_weights():
    moe = {"experts": 4, "top_k": 2, "expert_dim": 16}
    model = LanguageModel(config(moe=moe), seed=0)
    ids = torch.randint(0, 50, (2, 8))
    output = model(ids, labels=ids)
    balance = sum(stats.balance_loss for stats in output.experts) / 3
    z = sum(stats.z_loss for stats in output.experts) / 3
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.01 * balance + 0.001 * z)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(block.ffn.router.weight.grad.abs().sum() > 0 for block in model.blocks)
