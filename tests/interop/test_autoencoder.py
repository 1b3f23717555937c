"""diffusers' AutoencoderKL from a folder: encoding, decoding, and training on what was encoded."""

import json

import numpy as np
import pytest
import torch
from tests.commands.refusals import one_sentence
from tests.interop.diffusers_models import tiny_autoencoder

from siamesenorm.cli import main
from siamesenorm.data.images import open_images
from siamesenorm.data.latents import open_latents
from siamesenorm.errors import InteropError
from siamesenorm.interop.autoencoder import load_autoencoder

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("vae")


@pytest.fixture(scope="module")
def model(root):
    return tiny_autoencoder(root / "pipeline" / "vae", shift_factor=0.5)


@pytest.fixture(scope="module")
def encoded(root, model):
    where = ["--vae", str(root / "pipeline"), "--out", str(root / "latents")]
    how = ["--size", "8", "--flip", "--batch-size", "256"]
    assert main(["data", "encode-images", "digits", *where, *how]) == 0
    return root / "latents"


def test_encoded_digits_are_what_diffusers_gives_for_them(encoded, model):
    digits, latents = open_images("digits", "test"), open_latents(encoded, "test")
    assert len(latents) == len(digits)
    pixels = np.stack([digits[number].repeat(3, axis=2) for number in range(9)])
    with torch.no_grad():
        posterior = model.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1).latent_dist
    moments = np.stack([latents[number][0] for number in range(9)])
    np.testing.assert_allclose(moments[:, :4], posterior.mean.numpy(), atol=2e-5)
    np.testing.assert_allclose(moments[:, 4:], posterior.std.numpy(), rtol=1e-4)
    fixed = latents.transform(random=False)(latents[0], np.random.default_rng(0))
    np.testing.assert_allclose(fixed, (posterior.mean[0].numpy() - 0.5) * 0.25, atol=1e-5)


def test_decoded_latents_are_bytes_of_what_diffusers_decodes(root, model):
    latents = torch.randn(5, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = model.decode(latents / 0.25 + 0.5).sample
    expected = ((images + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).numpy() * 255
    found = load_autoencoder(root / "pipeline" / "vae").decode(latents)
    assert found.dtype == np.uint8
    assert found.shape == (5, 8, 8, 3)
    assert np.abs(found - expected).max() < 0.51
    assert np.array_equal(load_autoencoder(root / "pipeline").decode(latents, batch=2), found)
    with pytest.raises(InteropError, match=r"\(images, 4, height, width\)"):
        load_autoencoder(root / "pipeline").decode(torch.zeros(1, 3, 4, 4))


def test_a_run_trains_on_latents_and_verify_finds_them_sound(encoded, root, capsys):
    assert main(["data", "verify", str(encoded)]) == 0
    sizes = ["model.input_size=4", "model.channels=4", "model.dim=16", "model.blocks=1", "model.heads=2"]
    short = ["train.steps=2", "train.batch_size=4", "evaluation.samples=0", "evaluation.images=8", "warmup=0"]
    recipe = ["train", "dit-digits", f"data.train={encoded}", "data.flip=0.5", "--run", str(root / "run")]
    assert main([*recipe, *sizes, *short, "model.ffn_dim=16"]) == 0, capsys.readouterr().err
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(np.isfinite(json.loads(line).get("loss", 0.0)) for line in lines)
    wrong = one_sentence([*recipe[:-1], str(root / "other"), *sizes[1:], *short, "model.input_size=8"], capsys)
    assert "take 4 and 4" in wrong
    wrong = one_sentence([*recipe[:-1], str(root / "other"), *sizes, *short, "evaluation.samples=10"], capsys)
    assert "siamesenorm fid" in wrong
    sample = ["sample", str(root / "run"), "--classes", "3", "--per-class", "2", "--sampler", "ddim", "--steps", "2"]
    files = ["--out", str(root / "grid.png"), "--individually", str(root / "made.npz")]
    assert "vae: is missing" in one_sentence([*sample, *files], capsys)
    tiny_autoencoder(root / "wide", latent_channels=8)
    wide = one_sentence([*sample, *files, "--vae", str(root / "wide")], capsys)
    assert "its latents have 8 channels and this model makes 4" in wide
    assert main([*sample, *files, "--vae", str(root / "pipeline")]) == 0
    with np.load(root / "made.npz", allow_pickle=False) as found:
        assert found["arr_0"].shape == (2, 8, 8, 3)  # decoded: latents of 4 × 4 are pictures of 8 × 8


def test_wrong_input_is_one_sentence(root, tmp_path, model, capsys):
    out = ["--out", str(tmp_path / "out")]
    vae = ["--vae", str(root / "pipeline")]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    for arguments, words in (
        (["digits", "--vae", "nowhere", *out], "AutoencoderKL"),
        (["digits", "--vae", str(tmp_path / "other"), *out], "cannot be loaded"),
        (["nowhere", *vae, *out], "nowhere"),
        (["digits", *vae, *out, "--dtype", "int8"], "float32, float16"),
        (["digits", *vae, *out, "--size", "9"], "multiple of 2"),
        (["digits", *vae, "--out", str(root / "pipeline" / "vae" / "config.json")], "is a file"),
    ):
        assert words in one_sentence(["data", "encode-images", *arguments], capsys)
    assert not (tmp_path / "out").exists()


def test_an_autoencoder_that_does_not_do_what_it_says_is_refused(tmp_path):
    tiny_autoencoder(tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    for changes in (
        {"down_block_types": config["down_block_types"][:1]},
        {"up_block_types": config["up_block_types"][:1]},
        {"scaling_factor": 0},
        {"scaling_factor": float("nan")},
        {"in_channels": 0},
        {"layers_per_block": 10**9},
        {"norm_num_groups": 3},
    ):
        (tmp_path / "vae" / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(InteropError, match=r"^vae: .+$"):
            load_autoencoder(tmp_path / "vae")


def test_an_autoencoder_of_a_pickle_is_not_opened(tmp_path):
    model = tiny_autoencoder(tmp_path / "vae")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(InteropError, match=r"no file named diffusion_pytorch_model\.safetensors"):
        load_autoencoder(tmp_path / "vae")
