"""The diffusion Transformer: its start, its conditioning, every topology, and ways to run it."""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.layers.condition_embedding import LabelEmbedding, timestep_features
from siamesenorm.layers.patch import grid_positions
from siamesenorm.models.dit import DIT_PRESETS, DiT, DiTConfig, dit_preset
from siamesenorm.residual import TOPOLOGIES
from siamesenorm.train.activations import checkpoint_activations

every_topology = pytest.mark.parametrize("topology", [*TOPOLOGIES, "siamese:form=hybrid_pre", "siamese:form=plain"])
INPUTS = torch.randn(3, 1, 8, 8), torch.tensor([0, 400, 999]), torch.tensor([0, 9, 10])


def small(**changes):
    fields = {"input_size": 8, "patch_size": 2, "channels": 1, "classes": 10, "dim": 16, "heads": 2, "ffn_dim": 32}
    return DiTConfig(**{"blocks": 4, **fields, **changes})


def stirred(config, **how):
    """A model whose parameters are all away from zero, so that nothing hides behind a closed gate."""
    model = DiT(config, seed=0, **how)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@every_topology
def test_the_first_prediction_is_exactly_zero_and_learns(topology):
    model = DiT(small(topology=topology), seed=0)
    out = model(*INPUTS)
    assert out.shape == (3, 2, 8, 8)
    assert out.abs().max() == 0
    (out - 1).square().sum().backward()
    assert model.head.weight.grad.abs().sum() > 0


@every_topology
def test_every_parameter_and_both_conditions_reach_the_prediction(topology):
    model = stirred(small(topology=topology, dim=8))
    x, t, y = INPUTS
    out = model(x, t, y)
    out.square().sum().backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == []
    silent = {name for name, parameter in model.named_parameters() if not parameter.grad.any()}
    assert {name for name in silent if not name.endswith("bias")} == set()
    assert (model(x, t + 50, y) - out).abs().amax((1, 2, 3)).min() > 1e-4
    assert (model(x, t, (y + 1) % 11) - out).abs().amax((1, 2, 3)).min() > 1e-4


@every_topology
def test_fused_plain_and_checkpointed_blocks_agree(topology):
    config = small(topology=topology)
    model = stirred(config)
    expected = model(*INPUTS)
    plain = DiT(config, fused=False).eval()
    plain.load_state_dict(model.state_dict())
    assert_close(plain(*INPUTS), expected, rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for kind in ("full", "sublayer"):
        model.zero_grad()
        checkpoint_activations(model, kind)
        again = model(*INPUTS)
        assert_close(again, expected, rtol=1e-4, atol=1e-4)
        again.square().sum().backward()
        assert_close({n: p.grad for n, p in model.named_parameters()}, grads, rtol=1e-3, atol=1e-2)


def test_pre_has_no_parameters_beside_the_original_and_siamese_six_norms_a_block():
    pre, siamese = (DiT(small(topology=name)) for name in ("pre", "siamese"))
    assert not pre.residual_parameters()
    dim, blocks = 16, 4
    assert sum(p.numel() for p in siamese.residual_parameters().values()) == (4 * blocks + 2) * 2 * dim


def test_published_parameter_counts():
    """33, 130, 458 and 675 million (arXiv 2212.09748, table 1 and appendix)."""
    for size, millions in (("s", 33), ("b", 130), ("l", 458), ("xl", 675)):
        with torch.device("meta"):
            model = DiT(dit_preset(f"dit-{size}-2", topology="pre"))
        total = sum(p.numel() for p in model.parameters()) + model.positions.numel()
        assert round(total / 1e6) == pytest.approx(millions, abs=1), size


def test_the_same_seed_gives_the_same_weights_whatever_the_topology():
    one, other = (DiT(small(topology=name), seed=3) for name in ("pre", "siamese"))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    assert not torch.equal(one.embedding.weight, DiT(small(topology="pre"), seed=4).embedding.weight)


def test_meta_construction_then_init_is_fresh_construction():
    with torch.device("meta"):
        model = DiT(small())
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu").init_weights(5)
    assert_close(model.state_dict(), DiT(small(), seed=5).state_dict(), rtol=0, atol=0)


def test_labels_are_hidden_at_their_rate_in_training_alone():
    embedding = LabelEmbedding(10, 4, 0.25)
    hidden = embedding.table.weight[10]
    labels = torch.zeros(20000, dtype=torch.long)
    share = (embedding(labels) == hidden).all(-1).float().mean()
    assert abs(share - 0.25) < 0.015
    assert torch.equal(embedding.eval()(labels), embedding.table.weight[0].expand(20000, 4))
    assert LabelEmbedding(10, 4, 0.0).table.num_embeddings == 10


def test_positions_separate_rows_from_columns():
    grid = grid_positions(3, 8).view(3, 3, 8)
    assert torch.equal(grid[0, :, :4], grid[2, :, :4])  # the first half tells the column
    assert torch.equal(grid[:, 0, 4:], grid[:, 2, 4:])  # the second the row
    expected = torch.tensor([2.0, 2 / 100])
    assert_close(grid[0, 2, :4], torch.cat([expected.sin(), expected.cos()]))


def test_timesteps_are_cosines_then_sines():
    features = timestep_features(torch.tensor([3.0]), 4)
    angles = torch.tensor([3.0, 3.0 / 100])
    assert_close(features[0], torch.cat([angles.cos(), angles.sin()]))


def test_wrong_shapes_and_names_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match="patch_size = 3 is not allowed; it takes a divisor of input_size = 8"):
        small(patch_size=3)
    with pytest.raises(ValueError, match="dim = 18 is not allowed; positions in two directions"):
        small(dim=18)
    with pytest.raises(ValueError, match=r"x: shape \(1, 2, 8, 8\) is not allowed; it takes \(batch, 1, 8, 8\)"):
        DiT(small())(torch.zeros(1, 2, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="unknown name 'dit-q-2'; known names: dit-digits"):
        dit_preset("dit-q-2")
    assert DiTConfig.model_validate_json(DIT_PRESETS["dit-b-2"].config.model_dump_json()) == dit_preset("dit-b-2")
