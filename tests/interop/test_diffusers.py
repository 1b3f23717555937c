"""The pipeline of diffusers beside the project's own sampling, and its way to disk and back."""

import json

import numpy as np
import pytest
import torch
from tests.commands.refusals import one_sentence
from tests.interop.diffusers_models import tiny_autoencoder

from siamesenorm.cli import main
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.diffusion.sampling import Sampler, make_scheduler, mixed_seed, sample

pytest.importorskip("diffusers")

from diffusers import DiffusionPipeline

from siamesenorm.errors import InteropError
from siamesenorm.interop.diffusers import ResidualDiTModel, ResidualDiTPipeline
from siamesenorm.interop.diffusers.exporter import export, pipeline_of

LABELS = [3, 0, 7]


def model(**changes):
    settings = {"input_size": 4, "patch_size": 2, "channels": 4, "classes": 10, "dim": 16, "blocks": 2}
    made = DiT(DiTConfig(**{**settings, "heads": 2, "ffn_dim": 24, **changes}), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1  # adaLN-Zero gives zeros at first
    return made


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generators():
    return [torch.Generator().manual_seed(mixed_seed(0, number)) for number in range(len(LABELS))]


@pytest.mark.parametrize("topology", ["siamese", "pre", "hyper"])
@pytest.mark.parametrize(
    ("process", "name", "guidance", "channels"),
    [
        (Process(), "ddpm", 2.0, 3),
        (Process(), "ddim", 1.5, None),
        (Process("velocity", "cosine", 1000, False), "dpm", 1.0, None),
        (Process("flow", learn_sigma=False), "euler", 3.0, None),
    ],
)
def test_pipeline_and_own_sampling_make_the_same_images_of_the_same_noise(topology, process, name, guidance, channels):
    dit = model(topology=topology, learn_sigma=process.learn_sigma)
    sampler = Sampler(name, 6, guidance, channels)
    ours = sample(dit, torch.tensor(LABELS), (4, 4, 4), process, sampler, unconditional=10).images
    pipeline = quiet(ResidualDiTPipeline(ResidualDiTModel.of(dit), make_scheduler(process, sampler)))
    settings = {"num_inference_steps": 6, "guidance_scale": guidance, "guidance_channels": channels}
    theirs = pipeline(LABELS, generator=generators(), output_type="latent", **settings).images
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_a_saved_pipeline_with_an_autoencoder_makes_the_same_pictures_again(tmp_path):
    tiny_autoencoder(tmp_path / "vae")
    dit, names = model(), [f"digit {number}" for number in range(10)]
    made = quiet(pipeline_of(dit, Process(), class_names=names, vae=tmp_path / "vae"))
    export(dit, Process(), tmp_path / "saved", class_names=names, vae=tmp_path / "vae")
    assert (tmp_path / "saved" / "transformer" / "diffusion_pytorch_model.safetensors").is_file()
    assert not list((tmp_path / "saved").rglob("*.bin"))
    loaded = quiet(DiffusionPipeline.from_pretrained(tmp_path / "saved"))  # the folder says which pipeline it is
    assert type(loaded) is ResidualDiTPipeline
    settings = {"num_inference_steps": 4, "guidance_scale": 2.0, "output_type": "np"}
    one = made(LABELS, generator=generators(), **settings).images
    other = loaded([f"digit {label}" for label in LABELS], generator=generators(), **settings).images
    assert one.shape == (3, 8, 8, 3)
    np.testing.assert_array_equal(one, other)
    latents = made(LABELS, generator=generators(), **{**settings, "output_type": "latent"}).images
    from siamesenorm.interop.autoencoder import load_autoencoder

    assert np.abs(load_autoencoder(tmp_path / "vae").decode(latents) - one * 255).max() < 0.51
    pictures = loaded("digit 3", num_inference_steps=2, return_dict=False)[0]
    assert pictures[0].size == (8, 8)


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_another_scheduler_of_diffusers_takes_its_place(name):
    import diffusers

    pipeline = quiet(pipeline_of(model(), Process()))
    pipeline.scheduler = getattr(diffusers, name).from_config(pipeline.scheduler.config)
    found = pipeline(LABELS, num_inference_steps=3, output_type="pt", latents=torch.ones(3, 4, 4, 4)).images
    assert found.shape == (3, 4, 4, 4)
    assert 0 <= found.min() <= found.max() <= 1


def test_what_a_pipeline_cannot_do_is_said(tmp_path):
    pipeline = quiet(pipeline_of(model(class_dropout=0.0), Process(), class_names=["a", "b"]))
    for arguments, message in (
        ({"class_labels": 10}, "0 to 9"),
        ({"class_labels": "c"}, "takes one of a, b"),
        ({"class_labels": 1, "guidance_scale": 2.0}, "saw every label"),
        ({"class_labels": 1, "output_type": "jpg"}, "pil, np, pt, latent"),
        ({"class_labels": 1, "latents": torch.zeros(1, 1, 4, 4)}, r"it takes \(1, 4, 4, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline(num_inference_steps=2, **arguments)
    tiny_autoencoder(tmp_path / "vae", latent_channels=3)
    with pytest.raises(InteropError, match="latents of 3 channels; this model takes 4"):
        pipeline_of(model(), Process(), vae=tmp_path / "vae")
    for overwrite, message in ((False, "is there already and is not empty"), (True, "was not made by this program")):
        with pytest.raises(InteropError, match=message):
            export(model(), Process(), tmp_path / "vae", overwrite=overwrite)


def test_a_run_is_exported_as_a_pipeline(tmp_path, capsys):
    sizes = ["model.dim=16", "model.blocks=1", "model.heads=2", "model.ffn_dim=16", "train.steps=1"]
    rest = ["train.batch_size=4", "evaluation.samples=0", "evaluation.images=8", "warmup=0"]
    assert main(["train", "dit-digits", "--run", str(tmp_path / "run"), *sizes, *rest]) == 0, capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "made"), "--to", "diffusers"]) == 0
    pipeline = quiet(ResidualDiTPipeline.from_pretrained(tmp_path / "made"))
    assert pipeline(["3"], num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)
    assert json.loads((tmp_path / "made" / "scheduler" / "scheduler_config.json").read_text())["clip_sample"] is True
    again = ["export", str(tmp_path / "run"), str(tmp_path / "made"), "--to", "diffusers"]
    assert "is there already; --overwrite replaces" in one_sentence(again, capsys)
    assert main([*again, "--overwrite"]) == 0
    (tmp_path / "made" / "unet").mkdir()
    assert "unet' was not made by this program" in one_sentence([*again, "--overwrite"], capsys)
