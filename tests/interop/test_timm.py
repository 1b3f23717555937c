"""Inside timm: names, arguments and attributes that timm's users and its own model tests rely on."""

import importlib
import sys

import pytest
import torch
from torch import nn

interop = pytest.importorskip("siamesenorm.interop.timm", exc_type=ImportError)
timm = sys.modules["timm"]
optim = importlib.import_module("timm.optim")

from siamesenorm.residual import TOPOLOGIES  # noqa: E402

NAME, OF_TWO = "deit_tiny_patch16_224_siamese", "deit_tiny_distilled_patch16_224_siamese"
PLAIN = [(NAME, topology) for topology in (*TOPOLOGIES, "siamese:form=hybrid_pre", "siamese:form=plain")]
DISTILLED = [(OF_TWO, "siamese"), (OF_TWO, "pre")]
KINDS = [
    (NAME, topology) for topology in ("pre", "siamese", "siamese:form=hybrid_pre", "hyper", "attnres", "span", "x0")
]
"""One stream, two, several rows, some that grow, the start of a block, a state that is kept."""
SMALL = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 4}


def create(model, **changes):
    """A small one; model: a name of the registry, and the topology in place of its own."""
    torch.manual_seed(0)
    name, topology = model
    return timm.create_model(name, **{**SMALL, "topology": topology, **changes})


def images(batch=2, channels=3, size=32):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def test_every_size_is_registered_on_every_form_of_siamesenorm():
    names = interop.model_names()
    assert len(names) == 3 * 2 * 3
    assert set(names) <= set(timm.list_models("deit_*"))
    assert timm.list_models(module="deit_siamese") == names
    assert not set(names) & set(timm.list_pretrained())
    assert timm.is_model("deit_base_distilled_patch16_224_siamese_plain")


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_full_size_models_are_their_names(size):
    theirs = timm.create_model(f"deit_{size}_patch16_224", device="meta")
    ours = timm.create_model(f"deit_{size}_patch16_224_siamese", topology="pre", device="meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert (ours.config.topology, ours.config.grid) == ("pre", (14, 14))
    hybrid = timm.create_model(f"deit_{size}_distilled_patch16_224_siamese_hybrid_pre", device="meta")
    assert (hybrid.config.topology, hybrid.config.distilled) == ("siamese:form=hybrid_pre", True)


@pytest.mark.parametrize("name", PLAIN + DISTILLED, ids=str)
def test_forward_and_backward_reach_every_parameter(name):
    model = create(name, num_classes=42).train()
    outputs = model(images())
    assert outputs.shape == (2, 42)
    assert outputs.isfinite().all()
    outputs.mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key


@pytest.mark.parametrize("name", [PLAIN[0], *DISTILLED])
def test_features_heads_and_classifiers(name):
    model, x = create(name).eval(), images()
    features = model.forward_features(x)
    assert features.shape[-1] == model.num_features == model.embed_dim == model.head_hidden_size == 24
    assert model.forward_head(features, pre_logits=True).shape == (2, 24)
    torch.testing.assert_close(model.forward_head(features), model(x))
    classifier = model.get_classifier()
    for head in classifier if isinstance(classifier, tuple) else (classifier,):
        assert isinstance(head, nn.Linear)
        assert head.out_features == model.num_classes == 1000
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert model(x).shape == (2, 24)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    assert create(name, num_classes=0).eval()(x).shape == (2, 24)


def test_global_pool():
    model, x = create(PLAIN[0]).eval(), images()
    features = model.forward_features(x)
    for pool, expected in (("token", features[:, 0]), ("avg", features[:, 1:].mean(1)), ("", features)):
        model.reset_classifier(0, pool)
        assert model.global_pool == pool
        torch.testing.assert_close(model(x), expected)
        assert create(PLAIN[0], num_classes=0, global_pool=pool).eval()(x).shape == expected.shape
    with pytest.raises(ValueError, match="global_pool = 'map' is not allowed; it takes 'token', 'avg', ''"):
        create(PLAIN[0], global_pool="map")


@pytest.mark.parametrize("name", [PLAIN[0], DISTILLED[0]])
def test_default_cfg_describes_the_model(name):
    model = create(name)
    cfg, state = model.default_cfg, model.state_dict()
    assert cfg["architecture"] == name[0]
    assert (cfg["num_classes"], cfg["input_size"], cfg["fixed_input_size"]) == (1000, (3, 224, 224), True)
    classifiers = cfg["classifier"] if isinstance(cfg["classifier"], tuple) else (cfg["classifier"],)
    assert all(f"{key}.weight" in state for key in (*classifiers, cfg["first_conv"]))
    data = timm.data.resolve_data_config({}, model=model)
    assert (data["input_size"], data["interpolation"], data["crop_pct"]) == ((3, 224, 224), "bicubic", 0.9)
    assert data["mean"] == timm.data.IMAGENET_DEFAULT_MEAN


def test_arguments_of_create_model():
    model = create(PLAIN[0], in_chans=1, img_size=(32, 48), drop_rate=0.3, drop_path_rate=0.3, proj_drop_rate=0.1)
    assert model(torch.randn(1, 1, 32, 48)).shape == (1, 1000)
    assert model.head_drop.p == 0.3
    assert [link.drop.path for link in model.residual.links] == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert model.residual.links[0].drop.dropout == model.config.dropout == 0.1
    assert create(PLAIN[0], topology="siamese:depth_scaling=none").config.topology == "siamese:depth_scaling=none"
    assert create(PLAIN[0], dtype=torch.float64).head.weight.dtype == torch.float64
    dynamic = create(PLAIN[0], dynamic_img_size=True)
    assert dynamic(images(size=64)).shape == (2, 1000)
    dynamic.set_input_size((48, 48))
    assert dynamic.config.grid == (3, 3)
    with pytest.raises(TypeError, match="reg_tokens"):
        create(PLAIN[0], reg_tokens=4)


def test_the_head_is_under_its_dropout_in_training_only():
    model, x = create(PLAIN[0], drop_rate=0.9, num_classes=0), images()
    kept = model.train()(x) != 0
    assert 0 < kept.float().mean() < 0.5
    assert (model.eval()(x) != 0).all()


def test_distilled_training_gives_the_pair_when_asked_to():
    model, x = create(DISTILLED[0]).train(), images()
    mean = model(x)
    model.set_distilled_training(True)
    first, second = model(x)
    torch.testing.assert_close((first + second) / 2, mean)
    assert isinstance(model.eval()(x), torch.Tensor)


@pytest.mark.parametrize("name", [*KINDS, DISTILLED[0]], ids=str)
def test_forward_intermediates_end_in_forward_features(name):
    model, x = create(name).eval(), images()
    final, features = model.forward_intermediates(x, output_fmt="NLC", norm=True)
    torch.testing.assert_close(final, model.forward_features(x))
    assert [f.shape for f in features] == [(2, 4, 24)] * 4
    torch.testing.assert_close(features[-1], final[:, model.num_prefix_tokens :])


def test_forward_intermediates_keywords():
    model, x = create(DISTILLED[0]).eval(), images()
    everything = model.forward_intermediates(x, intermediates_only=True)
    assert [f.shape for f in everything] == [(2, 24, 2, 2)] * 4
    picked = model.forward_intermediates(x, [1, -1], intermediates_only=True, return_prefix_tokens=True)
    for (image, prefix), index in zip(picked, (1, 3), strict=True):
        torch.testing.assert_close(image, everything[index])
        assert prefix.shape == (2, 2, 24)
    runs = []
    model.blocks[2].register_forward_hook(lambda *_: runs.append(1))
    (early,) = model.forward_intermediates(x, [1], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early, everything[1])
    assert not runs
    named = model.forward_intermediates(x, 2, output_dict=True, return_prefix_tokens=True)
    assert set(named) == {"image_intermediates", "image_intermediates_prefix", "image_features"}
    torch.testing.assert_close(named["image_intermediates"][0], everything[2])
    with pytest.raises(ValueError, match="output_fmt = 'NHWC' is not allowed; it takes NCHW or NLC"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_intermediates_of_the_pre_norm_model_are_timms():
    theirs = timm.create_model("deit_tiny_patch16_224", **SMALL).eval()
    ours = create((NAME, "pre")).eval()
    ours.load_state_dict(interop.checkpoint_filter_fn(theirs.state_dict(), ours))
    x = images()
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)
    for norm in (False, True):
        for a, b in zip(*(m.forward_intermediates(x, [0, 2], norm=norm)[1] for m in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        a, b = (m.get_intermediate_layers(x, 2, reshape=True, norm=norm)[0] for m in (ours, theirs))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*KINDS, DISTILLED[0]], ids=str)
def test_features_only(name):
    whole = create(name).eval()
    wanted = whole.forward_intermediates(images(), [0, 2], intermediates_only=True)
    model = create(name, features_only=True, out_indices=[0, 2]).eval()
    assert model.feature_info.channels() == [24, 24]
    assert model.feature_info.reduction() == [16, 16]
    outputs = model(images())
    assert [o.shape for o in outputs] == [(2, 24, 2, 2)] * 2
    for found, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(found, expected)
    # Nothing is left that the features do not need, so that all of it trains.
    sum(o.square().sum() for o in outputs).backward()
    unused = {key for key, p in model.named_parameters() if p.grad is None}
    assert all(".residual." in key for key in unused), unused  # how the streams would end


def test_gradient_checkpointing_keeps_less_and_gives_the_same():
    plain, lean = create(PLAIN[0]), create(PLAIN[0])
    lean.set_grad_checkpointing(True)
    kept = []
    for model in (plain, lean):
        count = [0]

        def pack(t, count=count):
            count[0] += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(images()).square().mean()
        loss.backward()
        kept.append(count[0])
    assert kept[1] < kept[0] / 2
    for (key, a), b in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=key)
    lean.set_grad_checkpointing(False)
    assert lean.run is plain.run


@pytest.mark.parametrize("name", [PLAIN[0], (NAME, "hyper"), DISTILLED[0]])
def test_layer_decay_sees_links_with_their_blocks(name):
    from timm.models._manipulate import group_parameters

    model = create(name)
    depth = group_parameters(model, model.group_matcher(), reverse=True)
    assert set(depth) == {key for key, _ in model.named_parameters()}
    assert depth["pos_embed"] == depth["cls_token"] == depth["patch_embed.proj.weight"] == 0
    for block in range(4):
        assert {depth[key] for key in depth if key.startswith(f"blocks.{block}.")} == {block + 1}
    assert depth["residual.final_norm.weight"] == 4
    assert depth["head.weight"] == 5
    groups = optim.param_groups_layer_decay(model, 0.05, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scale[id(model.head.weight)] == 1
    assert scale[id(model.blocks[0].ffn.up.weight)] == 0.5**4


def test_what_is_spared_from_weight_decay():
    model = create((OF_TWO, "hyper"))
    spared = model.no_weight_decay()
    assert {"pos_embed", "cls_token", "dist_token", "blocks.0.links.0.A_r"} <= spared
    assert spared <= {key for key, _ in model.named_parameters()}
    groups = optim.param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert id(model.pos_embed) not in decayed
    assert id(model.blocks[0].attention.qkv.weight) in decayed


def test_exports():
    model = create(PLAIN[0], depth=1).eval()
    exported = torch.export.export(model, (images(),)).module()
    torch.testing.assert_close(exported(images()), model(images()))
