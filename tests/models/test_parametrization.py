"""CompleteP: a model of its base's size is the standard one, a larger one has the factors of the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from siamesenorm.errors import OfficialError
from siamesenorm.field_errors import FieldError
from siamesenorm.interop.official import to_official
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.parametrization import Factors, parameter_factors
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.residual import Residual
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.optimizer import build_optimizer, hidden_matrices, parameter_groups

from .small import ALL

STACK = {"dim": 16, "blocks": 2, "heads": 2, "ffn_dim": 24}
IMAGE = {"channels": 1, "classes": 3, "patch_size": 2}
IDS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
ADAMW, MUON = (OptimizerConfig(lr=1.0, kind=kind, weight_decay=0.1) for kind in ("adamw", "muon"))


def language(topology="siamese", **fields):
    return LanguageModel(LMConfig(**{**STACK, "vocab_size": 11, "topology": topology, **fields}), seed=0)


def vision(topology="siamese", **fields):
    return VisionTransformer(ViTConfig(**{**STACK, **IMAGE, "image_size": 4, "topology": topology, **fields}), seed=0)


def diffusion(topology="siamese", **fields):
    return DiT(DiTConfig(**{**STACK, **IMAGE, "input_size": 4, "topology": topology, **fields}), seed=0)


FAMILIES = {"language": language, "vision": vision, "diffusion": diffusion}


KINDS = ("pre", "siamese", "siamese:form=hybrid_pre", "hyper", "attnres", "span", "x0", "gr", "dense")
"""One stream, two, several rows, some that grow, the start of a block, a kept state, matrices of their own."""
EVERY = [("language", name) for name in ALL] + [(family, name) for family in ("vision", "diffusion") for name in KINDS]
every_model = pytest.mark.parametrize(("family", "topology"), EVERY)
"""Every topology in a language model; factors of a topology ask no family, and families ask kinds of streams."""


def completep(width=16, depth=2):
    return {"parametrization": "completep", "base_width": width, "base_depth": depth}


def output(model):
    if isinstance(model, LanguageModel):
        return model(IDS).logits
    if isinstance(model, VisionTransformer):
        return model(IMAGES)
    return model(IMAGES, torch.tensor([3, 700]), torch.tensor([0, 2]))


def groups(model, config):
    return [
        (group["names"], group["weight_decay"], group["eps"], group["lr_factor"])
        for group in parameter_groups(model, config)
    ]


@every_model
def test_a_model_of_its_bases_size_is_the_standard_one(family, topology):
    """Bit by bit: first weights, function, and every setting of either optimiser."""
    ours, theirs = (FAMILIES[family](topology, **fields) for fields in (completep(), {}))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    for model in (ours, theirs):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():  # DiT's gates start closed
                parameter += 0.1 * torch.randn(parameter.shape)
    assert torch.equal(output(ours.eval()), output(theirs.eval()))
    for config in (ADAMW, MUON):
        assert groups(ours, config) == groups(theirs, config)


@pytest.mark.parametrize("topology", ALL)
def test_a_larger_model_is_another_function_than_the_standard_one(topology):
    """Of the same weights: branches count less, and so do logits."""
    wide, standard = (language(topology, **fields).eval() for fields in (completep(8, 2), {}))
    deep = language(topology, **completep(16, 1)).eval()
    wide.load_state_dict(standard.state_dict())
    torch.testing.assert_close(output(wide), output(standard) / 2)
    if topology in ("keel", "hybrid_star"):  # what a base has in its first block, all of these blocks have
        return
    deep.load_state_dict(standard.state_dict())
    changed = topology != "rezero"  # whose branches are closed
    assert torch.allclose(output(deep), output(standard), rtol=1e-3) != changed


def find(model, config):
    found = {}
    for group in parameter_groups(model, config):
        decay = group["weight_decay"] / config.weight_decay if group["weight_decay"] else None
        for name in group["names"]:
            found[name] = (group["lr_factor"], decay, group["eps"] / config.eps)
    return found


def test_factors_are_those_of_the_table():
    """m_N = 4 and m_L = 2."""
    large = {"dim": 64, "heads": 8, "ffn_dim": 96, "blocks": 4}
    model = language("pre", **large, **completep())
    adamw, muon = find(model, ADAMW), find(model, MUON)
    branch = 1 / 8
    for name in ("attention.qkv.weight", "attention.out.weight", "ffn.up.weight", "ffn.down.weight"):
        assert adamw[f"blocks.3.{name}"] == (1 / 4, 4, branch)
    assert muon["blocks.3.attention.qkv.weight"][:2] == (1 / 4, 4)
    assert muon["blocks.3.ffn.up.weight"][:2] == (1 / 2, 2)
    for found in (adamw, muon):
        assert found["blocks.3.links.0.norm.weight"] == (1, None, branch)
        assert found["embedding.weight"] == (1, 1, 1 / 4)
        assert found["head.weight"] == (1, 1, 1 / 4)
        assert found["residual.final_norm.weight"] == (1, None, 1 / 4)


@pytest.mark.parametrize(
    ("topology", "name", "lr"),
    [
        ("post", "blocks.1.links.0.norm.weight", 1 / 2),
        ("siamese", "blocks.1.links.0.x.norm.weight", 1 / 2),
        ("siamese", "blocks.1.links.0.y.norm.weight", 1),
        ("span", "blocks.1.links.0.norm.weight", 1),
        ("span", "blocks.1.links.1.norm.weight", 1 / 2),
        ("b2t", "blocks.1.links.0.norm.weight", 1 / 2),
        ("keel", "blocks.2.links.0.stream_norm.weight", 1 / 2),
        ("residual_dual", "blocks.1.links.0.norm.weight", 1 / 2),
        ("dense", "blocks.1.links.1.a", 1 / 4),
        ("zaya", "blocks.1.links.0.s_r", 1 / 2),
        ("x0", "blocks.1.links.0.r", 0.01 / 2),
        ("hyper", "blocks.1.links.0.W_r", 1 / 8),
        ("hyper", "blocks.1.links.0.W_b", 1 / 4),
        ("attnres", "blocks.1.links.0.mix.query", 1 / 4),
        ("gr", "residual.last_read.W_d", 1 / 4),
    ],
)
def test_what_topologies_bring_has_the_factors_of_where_it_lies(topology, name, lr):
    """m_N = 4 and m_L = 2: on the skip by depth, what sums over the width by width, everything else by neither."""
    model = language(topology, dim=64, heads=8, ffn_dim=96, blocks=4, **completep())
    assert find(model, ADAMW)[name][0] == pytest.approx(lr)


@every_model
def test_every_name_that_a_module_gives_is_a_parameters(family, topology):
    """And every parameter has factors; a name that is none would be passed over in silence."""
    model = FAMILIES[family](topology, **completep(4, 1))
    assert set(parameter_factors(model, hidden_matrices(model))) == set(model.parameters())
    for module in model.modules():
        names = {name for name, _ in module.named_parameters()}
        for method in ("width_sums", "short_matrices", "hidden_matrices", "depth_powers"):
            given = getattr(module, method, dict)()
            assert all(any(own == name or own.startswith(f"{name}.") for own in names) for name in given), method


def std(parameter):
    return parameter.detach().double().std().item()


@pytest.mark.parametrize("init", ["mitchell", "megatron", "normal"])
def test_first_weights_of_matrices_fall_by_width_alone_and_embeddings_do_not(init):
    base = language("pre", init=init, vocab_size=500)
    wide = language("pre", init=init, vocab_size=500, dim=256, heads=32, ffn_dim=384, **completep())
    deep = language("pre", init=init, vocab_size=500, blocks=8, **completep())
    for name in ("embedding.weight", "head.weight"):
        assert std(wide.get_parameter(name)) == pytest.approx(std(base.get_parameter(name)), rel=0.05)
    for name in ("blocks.1.attention.out.weight", "blocks.1.ffn.down.weight", "blocks.0.attention.qkv.weight"):
        assert std(wide.get_parameter(name)) == pytest.approx(std(base.get_parameter(name)) / 4, rel=0.15)
        deeper = name.replace("blocks.1", "blocks.4")  # at the same height
        assert std(deep.get_parameter(deeper)) == pytest.approx(std(base.get_parameter(name)), rel=0.15)


def test_matrices_of_topologies_start_smaller_in_wider_models():
    base, wide = (language("gr", **fields) for fields in ({}, {"dim": 256, "heads": 32, **completep()}))
    name = "blocks.0.links.0.W_d"
    assert std(wide.get_parameter(name)) == pytest.approx(std(base.get_parameter(name)) / 4, rel=0.1)


def run(topology, base_blocks, sublayers, blocks=4, **options):
    made = Residual(topology, 8, blocks, needs="waived", base_blocks=base_blocks, **options).double()
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return made(x, sublayers)


def test_the_factor_is_on_what_streams_receive():
    """Pre-Norm's update, behind Sandwich-Norm's second norm, and either stream of a siamese pair."""
    torch.manual_seed(0)
    sublayers = [nn.Linear(8, 8).double() for _ in range(8)]
    halves = [lambda h, layer=layer: layer(h) / 2 for layer in sublayers]
    torch.testing.assert_close(run("pre", 2, sublayers), run("pre", None, halves))
    pair = {"depth_scaling": "none"}
    torch.testing.assert_close(run("siamese", 2, sublayers, **pair), run("siamese", None, halves, **pair))
    # The update's norm swallows a factor before it.
    torch.testing.assert_close(run("sandwich", None, halves), run("sandwich", None, sublayers), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run("sandwich", 2, sublayers), run("sandwich", None, sublayers), rtol=1e-2)


def test_laws_of_depth_are_read_at_the_base():
    """Keel's own law is CompleteP's; Beam stays Sandwich-Norm at unit scale; c_l is that of the same height."""
    torch.manual_seed(0)
    sublayers = [nn.Linear(8, 8).double() for _ in range(8)]
    keel = Residual("keel", 8, 4, base_blocks=2)
    assert [float(link.scale) for link in keel.links[4:]] == [4.0] * 4  # the first half of the base has none
    torch.testing.assert_close(run("beam", 2, sublayers), run("sandwich", 2, sublayers), rtol=1e-4, atol=1e-4)
    pairs = Residual("siamese", 8, 4, base_blocks=2).links
    assert [float(pair.scale) ** -2 for pair in pairs[::2]] == pytest.approx([2, 3, 4, 5])
    assert Residual("attnres", 8, 64, base_blocks=16).blocks == 8
    rule = Residual("deepnorm", 8, 4, base_blocks=2).init_rule
    assert rule == Residual("deepnorm", 8, 2).init_rule


def test_x0_multiplies_up_to_the_same_over_any_depth():
    factors = []
    for blocks in (2, 64):
        residual = Residual("x0", 8, blocks, base_blocks=2)
        factors.append(torch.stack([link.r.detach() for link in residual.links[::2]]).prod().item())
    assert factors[1] == pytest.approx(factors[0], rel=0.01)


def test_a_base_must_be_given_and_official_code_knows_none():
    with pytest.raises(FieldError, match=r"base_depth = null is not allowed with parametrization = 'completep'"):
        LMConfig(**STACK, vocab_size=11, parametrization="completep", base_width=8)
    for family in FAMILIES.values():
        with pytest.raises(OfficialError, match=r"parametrization = 'completep' has no official"):
            to_official(family("pre", **completep()))


def test_transformers_has_the_same_logits():
    huggingface = pytest.importorskip("siamesenorm.interop.huggingface")
    model = language("siamese", dim=32, heads=4, blocks=4, **completep()).eval()
    theirs = huggingface.from_language_model(model).eval()
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits)
    loss = theirs(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, model(IDS[:, :-1], labels=IDS[:, 1:]).loss)


def test_blocks_share_one_compiled_graph():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = language("siamese", blocks=4, **completep()).train()
    model.compile_blocks(backend="eager")
    output(model).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_factors_reach_the_optimiser():
    model = language("pre", dim=64, heads=8, blocks=4, **completep())
    optimizer = build_optimizer(model, MUON)
    found = {(group.get("eps"), group["weight_decay"]) for group in optimizer.param_groups}
    assert len(found) > 2
    assert Factors() == (1.0, 1.0, 1.0)
