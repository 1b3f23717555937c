"""The vision Transformer: equation, first weights, gradients, stochastic depth, heads, sizes, between blocks."""

import copy

import pytest
import torch
import torch.nn.functional as F

from closeness import assert_same_gradients
from siamesenorm.field_errors import FieldError
from siamesenorm.layers.patch import PatchEmbedding, resample_positions, square_grid
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.train.activations import KINDS, checkpoint_activations

from .small import ALL


def config(topology="siamese", **changes):
    fields = {"image_size": 16, "patch_size": 4, "classes": 5, "dim": 24, "blocks": 3, "heads": 3, "ffn_dim": 32}
    return ViTConfig(**{**fields, "topology": topology, **changes})


def stirred(topology="siamese", seed=0, **changes):
    """A model far from its start: large weights, every gain moved, so that a lost term shows."""
    model = VisionTransformer(config(topology, init_std=0.2, **changes), seed=seed).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.residual_parameters().values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def images(batch=2, size=16, seed=3):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("topology", "distilled"), [*((name, False) for name in ALL), ("siamese", True), ("pre", True)]
)
def test_every_topology_trains_every_parameter(topology, distilled):
    model = VisionTransformer(config(topology, distilled=distilled), seed=0)
    outputs = model(images())
    outputs = outputs if distilled else (outputs,)
    assert [o.shape for o in outputs] == [(2, 5)] * (1 + distilled)
    sum(F.cross_entropy(o, torch.tensor([1, 3])) for o in outputs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_pre_norm_model_is_its_equation():
    model, x = stirred("pre", distilled=True), images()
    tokens = F.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=4).flatten(2).mT
    h = torch.cat([model.cls_token.expand(2, 1, -1), model.dist_token.expand(2, 1, -1), tokens], 1) + model.pos_embed
    for index, block in enumerate(model.blocks):
        first, second = (model.residual.links[2 * index + k].norm for k in (0, 1))
        q, k, v = block.attention.qkv(F.layer_norm(h, (24,), first.weight, first.bias, 1e-6)).chunk(3, -1)
        heads = [torch.softmax(a @ b.mT / 8**0.5, -1) @ c for a, b, c in zip(*(t.split(8, -1) for t in (q, k, v)))]  # noqa: B905
        h = h + block.attention.out(torch.cat(heads, -1))
        h = h + block.ffn.down(F.gelu(block.ffn.up(F.layer_norm(h, (24,), second.weight, second.bias, 1e-6))))
    last = model.residual.final_norm
    out = F.layer_norm(h, (24,), last.weight, last.bias, 1e-6)
    torch.testing.assert_close(model.forward_features(x), out, atol=1e-5, rtol=1e-5)
    mean = (model.head(out[:, 0]) + model.head_dist(out[:, 1])) / 2
    torch.testing.assert_close(model(x), mean, atol=1e-5, rtol=1e-5)


def test_tokens_know_each_other_but_images_do_not():
    model, x = stirred(), images(3)
    changed = x.clone()
    changed[1, :, -1, -1] += 3
    difference = (model.forward_features(changed) - model.forward_features(x)).abs().amax(-1)
    assert difference[[0, 2]].max() < 1e-6  # another order of additions at most
    assert difference[1].min() > 1e-4


def test_patches_are_those_of_a_convolution():
    patch, x = PatchEmbedding(4, 2, 7), torch.randn(2, 2, 8, 12)
    torch.testing.assert_close(patch(x), patch.proj(x).flatten(2).mT)


@pytest.mark.parametrize("needs", ["hybrid", "reordered", "subln", "siamese:form=hybrid_pre"])
def test_attention_has_the_norms_that_topologies_ask_for(needs):
    attention = stirred(needs).blocks[1].attention
    expected = {"hybrid": "qkv_head", "reordered": "qk_projection", "subln": "none"}.get(needs, "qkv_head")
    assert attention.norm_kind == expected
    assert (attention.out_norm is not None) == (needs == "subln")
    h = torch.randn(2, 5, 24)
    q, k, v = attention.qkv(h).chunk(3, -1)
    if expected == "qk_projection":
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in (q, k, v))
    if expected == "qkv_head":
        q, k, v = attention.q_norm(q), attention.k_norm(k), attention.v_norm(v)
    o = (torch.softmax(q @ k.mT / 8**0.5, -1) @ v).transpose(1, 2).flatten(2)
    o = attention.out_norm(o) if attention.out_norm is not None else o
    torch.testing.assert_close(attention(h), attention.out(o), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_first_weights_are_deits():
    model = VisionTransformer(config("pre", dim=192, heads=3, ffn_dim=768, image_size=32, classes=100), seed=0)
    for block in model.blocks:
        for linear in (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.down):
            assert linear.weight.std() == pytest.approx(0.02, rel=0.02)
            assert not linear.bias.any()
    assert model.head.weight.std() == pytest.approx(0.02, rel=0.03)
    assert model.pos_embed.std() == pytest.approx(0.02, rel=0.05)
    assert model.patch_embed.proj.weight.abs().max() == pytest.approx(48**-0.5, rel=0.01)
    loss = F.cross_entropy(model(images(8, 32)), torch.arange(8))
    assert loss == pytest.approx(torch.tensor(100.0).log().item(), abs=0.15)


def test_topologies_scale_the_same_draws():
    plain, span = (VisionTransformer(config(t), seed=4) for t in ("pre", "span"))
    factor = span.residual.init_rule.scale["attention_out"]
    assert factor != 1
    torch.testing.assert_close(span.blocks[2].attention.out.weight, plain.blocks[2].attention.out.weight * factor)
    torch.testing.assert_close(span.head.weight, plain.head.weight)


def test_seeds_and_meta_construction_give_the_same_weights():
    first, again = VisionTransformer(config(), seed=1), VisionTransformer(config(), seed=1)
    with torch.device("meta"):
        late = VisionTransformer(config())
    late.to_empty(device="cpu").init_weights(1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
        assert torch.equal(weight, late.state_dict()[name]), name


def test_stochastic_depth_rises_with_the_block_and_is_one_draw_for_both_streams():
    model = VisionTransformer(config(drop_path=0.3, blocks=4), seed=0)
    rates = [float(link.drop.path) for link in model.residual.links]
    assert rates == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert [config(drop_path=0.3, blocks=1).drop_path_rates] == [[0.0]]
    # A sample whose update is dropped keeps both streams; one that is kept has it scaled in both.
    link, x = model.residual.links[-1].train(), torch.randn(64, 3, 24)
    streams, output = (x, x.clone()), torch.ones(64, 3, 24)
    torch.manual_seed(0)
    X, Y = link.write(streams, output)
    moved_x, moved_y = (X - x)[:, 0, 0] / link.scale, (Y - x)[:, 0, 0]
    torch.testing.assert_close(moved_x, moved_y, atol=1e-5, rtol=1e-5)
    assert {round(value, 3) for value in moved_y.tolist()} == {0.0, round(1 / 0.7, 3)}
    assert torch.equal(model.eval()(images()), model(images()))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_checkpointed_blocks_give_the_same_gradients(kind):
    plain = stirred().train()
    wrapped = copy.deepcopy(plain)
    checkpoint_activations(wrapped, kind)
    for model in (plain, wrapped):
        model(images()).square().sum().backward()
    assert_same_gradients([p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()])


def test_resetting_the_classifier():
    model = stirred(distilled=True)
    features = model.forward_features(images())
    model.reset_classifier(9, seed=0)
    assert model.head.out_features == model.head_dist.out_features == model.config.classes == 9
    assert model(images()).shape == (2, 9)
    model.reset_classifier(0)
    torch.testing.assert_close(model(images()), features[:, :2].mean(1))
    assert model.train()(images()).shape == (2, 24)


def test_pooling():
    model = stirred()
    features = model.forward_features(images())
    for pool, expected in (("avg", features[:, 1:].mean(1)), ("token", features[:, 0]), ("none", features)):
        model.reset_classifier(4, pool)
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected)
        torch.testing.assert_close(model(images()), model.head(expected))


@pytest.mark.parametrize("topology", ["pre", "siamese", "hyper", "span"])
def test_what_lies_between_blocks(topology):
    model, x = stirred(topology), images()
    features = model.forward_features(x)
    (patches, prefix), (last, last_prefix) = model.get_intermediate_layers(x, [0, -1], norm=True, prefix_tokens=True)
    torch.testing.assert_close(torch.cat([last_prefix, last], 1), features)
    assert patches.shape == (2, 16, 24)
    assert prefix.shape == (2, 1, 24)
    (image,) = model.get_intermediate_layers(x, 1, reshape=True, norm=True)
    torch.testing.assert_close(image[:, :, 1, 2], features[:, 1 + 4 + 2])
    raw = model.get_intermediate_layers(x, 3)
    assert len(raw) == 3
    streams, _ = model.blocks[0](model.residual.open(model.embed(x)))
    total = sum(model.residual.named_streams(streams).values())
    torch.testing.assert_close(raw[0], total[:, 1:])


@pytest.mark.parametrize("n", [4, [0, 3], [-4]])
def test_blocks_that_are_not_there_are_refused(n):
    with pytest.raises(ValueError, match=r"n: block -?\d is not allowed; this model takes -3 to 2"):
        stirred().get_intermediate_layers(images(), n)


@pytest.mark.parametrize("shape", [(2, 1, 16, 16), (3, 16, 16)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"is not allowed; it takes \(batch, 3, height, width\)"):
        stirred()(torch.randn(shape))


def test_images_of_another_size():
    model = stirred()
    with pytest.raises(ValueError, match="image: 24×24 pixels; this model takes 16×16, or give dynamic_size=True"):
        model(images(size=24))
    model.set_image_size((24, 16))
    assert model.config.grid == (6, 4)
    assert model(torch.randn(2, 3, 24, 16)).shape == (2, 5)
    dynamic, fixed = stirred(dynamic_size=True), stirred()
    fixed.set_image_size(24)
    torch.testing.assert_close(dynamic(images(size=24)), fixed(images(size=24)))
    with pytest.raises(ValueError, match="sides must be multiples of patch_size = 4"):
        dynamic(images(size=18))


def test_resampled_positions_keep_tokens_and_planes():
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    plane = torch.stack([rows, columns, torch.ones(8, 8)], -1).reshape(1, 64, 3)
    positions = torch.cat([torch.full((1, 2, 3), 7.0), plane], 1)
    new = resample_positions(positions, (8, 8), (16, 16), 2)
    assert new.shape == (1, 2 + 256, 3)
    assert torch.equal(new[:, :2], positions[:, :2])
    inner = new[0, 2:].unflatten(0, (16, 16))[5:11, 5:11]
    torch.testing.assert_close(inner[..., 2], torch.ones(6, 6))
    torch.testing.assert_close(inner[1:, :, 0] - inner[:-1, :, 0], torch.full((5, 6), 0.5), atol=1e-4, rtol=0)
    assert resample_positions(positions, (8, 8), (8, 8), 2) is positions
    assert square_grid(65, 1) == (8, 8)
    with pytest.raises(ValueError, match="pos_embed: 8 positions of which 1 are no patches"):
        square_grid(8, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads = 5 is not allowed; it takes a divisor of dim = 24"),
        ({"patch_size": 5}, "patch_size = 5 is not allowed; it takes a divisor of image_size = 16"),
        ({"topology": "siames"}, "unknown name 'siames'.*; did you mean siamese"),
        ({"distilled": True, "pool": "avg"}, "pool = 'avg' is not allowed with distilled = true; it takes 'token'"),
        ({"image_size": 0}, "image_size: 0 is not allowed; it takes a whole number from 1 or a list of numbers"),
        ({"drop_path": 1.0}, "drop_path: 1.0 is not allowed; it takes a number from 0 and below 1"),
        ({"toplogy": "pre"}, "unknown field 'toplogy'.*; did you mean topology"),
    ],
)
def test_wrong_fields_are_named(changes, message):
    with pytest.raises(FieldError, match=message):
        config(**changes)


def test_configurations_round_trip_and_are_documented():
    original = config(image_size=(16, 8), distilled=True)
    assert ViTConfig.model_validate_json(original.model_dump_json()) == original
    assert all(field.description for field in ViTConfig.model_fields.values())


def test_compiled_and_exported_models_compute_the_same():
    model = stirred(blocks=1)
    expected = model(images())
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(images()), expected)
    exported = torch.export.export(model, (images(),)).module()
    torch.testing.assert_close(exported(images()), expected)
