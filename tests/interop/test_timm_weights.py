"""Weights between timm and us: exact loading, checkpoints, other sizes, refusals."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from closeness import assert_same_but_for_rounding
from siamesenorm.interop.official import OfficialError, to_official
from siamesenorm.layers.patch import resample_positions
from siamesenorm.tasks import find_task
from siamesenorm.train.init_from import starting_weights
from siamesenorm.train.recipes import resolve

interop = pytest.importorskip("siamesenorm.interop.timm", exc_type=ImportError)
timm = sys.modules["timm"]
SMALL = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 5}
SIAMESE = "deit_tiny_patch16_224_siamese"


def stirred(name, seed=0, **changes):
    """A model of timm's registry with every parameter moved."""
    model = timm.create_model(name, **changes).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_tiny_patch16_224"])
def test_plain_timm_weights_are_the_pre_norm_model(name):
    theirs, x = stirred(name), images(224)[:1]
    ours = interop.load_timm(theirs)
    assert ours.config.topology == "pre"
    assert not ours.training
    with torch.no_grad():
        expected = theirs(x)
        assert expected.abs().max() > 0.5
        assert_same_but_for_rounding(ours(x), expected)
    back = to_official(ours)
    assert all(torch.equal(weight, back[key]) for key, weight in theirs.state_dict().items())


def test_gradients_are_timms():
    theirs = stirred("deit_tiny_distilled_patch16_224", **SMALL).train()
    theirs.set_distilled_training(True)
    ours = interop.load_timm(theirs)
    for model in (theirs, ours):
        first, second = model(images())
        (first.square().sum() + second.sum()).backward()
    grads = to_official(ours, grads=True)
    for key, parameter in theirs.named_parameters():
        assert (grads[key] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_values": 1e-4}, "unknown: blocks.0.ls1.gamma"),
        ({"qk_norm": True}, "qk_norm is not that of a plain DeiT or ViT"),
        ({"global_pool": "avg"}, "global_pool is not that of a plain DeiT or ViT"),
        ({"norm_layer": torch.nn.LayerNorm}, "norm_layer is not that of a plain DeiT or ViT"),
        ({"reg_tokens": 2, "no_embed_class": True}, "no_embed_class is not that"),
    ],
)
def test_variants_that_compute_something_else_are_refused(changes, message):
    with pytest.raises(OfficialError, match=message):
        interop.load_timm(timm.create_model("vit_tiny_patch16_224", **SMALL, **changes))
    with pytest.raises(OfficialError, match="ResNet: not a vision Transformer as timm builds DeiT"):
        interop.load_timm(timm.create_model("resnet10t"))


def test_there_are_no_pretrained_weights_and_it_says_so():
    with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {SIAMESE}"):
        timm.create_model(SIAMESE, pretrained=True, **SMALL)


def test_checkpoint_path_loads_safetensors(tmp_path):
    model = stirred(SIAMESE, **SMALL)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = timm.create_model(SIAMESE, checkpoint_path=str(tmp_path / "model.safetensors"), **SMALL).eval()
    assert torch.equal(loaded(images()), model(images()))


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
def test_checkpoints_of_another_size_are_fitted(tmp_path, wrapper):
    model = stirred(SIAMESE, **{**SMALL, "img_size": 64})
    state = model.state_dict()
    torch.save(state if wrapper is None else {wrapper: state}, tmp_path / "model.pth")
    loaded = timm.create_model(SIAMESE, **SMALL).eval()
    timm.models.load_checkpoint(loaded, str(tmp_path / "model.pth"), filter_fn=interop.checkpoint_filter_fn)
    model.set_input_size((32, 32))
    assert_same_but_for_rounding(loaded(images()), model(images()))


def test_pretrained_files_may_have_timms_names_other_sizes_channels_and_classes(tmp_path):
    theirs = stirred("deit_tiny_patch16_224", **{**SMALL, "img_size": 64})
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    overlay = {"file": str(tmp_path / "theirs.safetensors"), "num_classes": 5}
    loaded = timm.create_model(SIAMESE, topology="pre", pretrained=True, pretrained_cfg_overlay=overlay, **SMALL).eval()
    theirs.set_input_size((32, 32))
    assert_same_but_for_rounding(loaded(images()), theirs(images()))
    grey = timm.create_model(
        SIAMESE,
        topology="pre",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        **{**SMALL, "in_chans": 1, "num_classes": 3},
    )
    assert grey.head.out_features == 3
    torch.testing.assert_close(
        grey.patch_embed.proj.weight, theirs.patch_embed.proj.weight.sum(1, keepdim=True), atol=1e-5, rtol=1e-5
    )


def test_official_siamese_names_load_too():
    model, other = stirred(SIAMESE, **SMALL), timm.create_model(SIAMESE, **SMALL)
    other.load_state_dict(interop.checkpoint_filter_fn(to_official(model), other))
    assert torch.equal(other.eval()(images()), model(images()))
    with pytest.raises(OfficialError, match="span has no official vision model"):
        interop.checkpoint_filter_fn(to_official(model), timm.create_model(SIAMESE, topology="span", **SMALL))


@pytest.mark.parametrize("new", [(7, 7), (10, 10), (24, 24), (14, 20)])
@pytest.mark.parametrize("prefix", [1, 2])
def test_positions_are_resampled_as_timm_does(new, prefix):
    positions = torch.randn(1, prefix + 14 * 14, 8)
    expected = timm.layers.resample_abs_pos_embed(
        positions, new_size=list(new), old_size=[14, 14], num_prefix_tokens=prefix
    )
    torch.testing.assert_close(resample_positions(positions, (14, 14), new, prefix), expected)


def test_a_run_begins_with_weights_of_timm(tmp_path):
    small = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 24, "num_heads": 3, "depth": 2}
    ours = interop.load_timm(stirred("deit_tiny_patch16_224", **small, num_classes=10))
    about = {"task": "classification", "config": ours.config.model_dump_json()}
    save_file(ours.state_dict(), tmp_path / "start.safetensors", metadata=about)
    config = resolve("deit-digits", [f"init_from={tmp_path}/start.safetensors", "init_model=true"])
    assert config.model == ours.config
    found = starting_weights(config, find_task("classification")(config)).weights
    assert all(torch.equal(found[name], tensor) for name, tensor in ours.state_dict().items())
