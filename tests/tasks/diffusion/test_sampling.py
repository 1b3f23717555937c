"""Samplers on data whose exact denoiser is known, and guidance.

The data are independent normal pixels N(m, s²), so that E[x_0 | x_t] and the exact reverse variances are closed
forms; every pixel of a sample is one more draw from the distribution that comes out.
"""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.errors import DataError
from siamesenorm.tasks.diffusion import Process, Sampler, sample
from siamesenorm.tasks.diffusion.sampling import guided, make_scheduler

MEAN, STD = 0.4, 0.5
SHAPE, COUNT = (1, 64, 64), 4
LABELS = torch.zeros(COUNT, dtype=torch.long)


def expected_clean(schedule, x, t):
    """E[x_0 | x_t] and Var[x_0 | x_t]."""
    kept = schedule.kept[t].float()
    spread = kept * STD**2 + 1 - kept
    return MEAN + kept.sqrt() * STD**2 / spread * (x - kept.sqrt() * MEAN), STD**2 * (1 - kept) / spread


def exact_denoiser(process, sampler):
    """What a perfect model predicts: noise or velocity, and the variance of the step that the sampler takes."""
    schedule, timesteps = process.schedule, make_scheduler(process, sampler).timesteps.tolist()

    def denoise(x, times, labels):
        t = int(times[0])
        clean, uncertainty = expected_clean(schedule, x, t)
        kept = schedule.kept[t].float()
        noise = (x - kept.sqrt() * clean) / (1 - kept).sqrt()
        answer = noise if process.prediction == "epsilon" else kept.sqrt() * noise - (1 - kept).sqrt() * clean
        if not process.learn_sigma:
            return answer
        place = timesteps.index(t)
        before = schedule.kept[timesteps[place + 1]].float() if place + 1 < len(timesteps) else torch.tensor(1.0)
        beta = 1 - kept / before
        low = (beta * (1 - before) / (1 - kept)).clamp(min=1e-20)
        variance = low + (before.sqrt() * beta / (1 - kept)) ** 2 * uncertainty
        share = 2 * (variance.log() - low.log()) / (beta.log() - low.log()) - 1
        return torch.cat([answer, share.expand_as(answer)], dim=1)

    return denoise


def check_distribution(images, mean_error=0.02, std_error=0.02):
    assert images.shape == (COUNT, *SHAPE)
    assert abs(images.mean() - MEAN) < mean_error, images.mean()
    assert abs(images.std() / STD - 1) < std_error, images.std()
    third = ((images - images.mean()) / images.std()).pow(3).mean()
    assert abs(third) < 0.1


@pytest.mark.parametrize("prediction", ["epsilon", "velocity"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("name", "steps", "learn_sigma"),
    [("ddpm", 40, True), ("ddpm", 500, False), ("ddim", 100, False), ("dpm", 100, False)],
)
def test_an_exact_denoiser_gives_the_distribution_back(prediction, schedule, name, steps, learn_sigma):
    process, sampler = Process(prediction, schedule, learn_sigma=learn_sigma), Sampler(name, steps)
    found = sample(exact_denoiser(process, sampler), LABELS, SHAPE, process, sampler, seed=1)
    check_distribution(found.images, std_error=0.03)


def test_an_exact_flow_gives_the_distribution_back():
    process = Process("flow", learn_sigma=False)

    def denoise(x, times, labels):
        time = times[0] / 1000
        spread = (1 - time) ** 2 * STD**2 + time**2
        gap = x - (1 - time) * MEAN
        clean, noise = MEAN + (1 - time) * STD**2 / spread * gap, time / spread * gap
        return noise - clean

    check_distribution(sample(denoise, LABELS, SHAPE, process, Sampler("euler", 100), seed=1).images, std_error=0.03)


def tilted_mean(x, t, y):
    """`tilted` without the variances."""
    return tilted(x, t, y)[:, : x.shape[1]]


def tilted(x, t, y):
    """A model with variances whose answer depends on the label; 9 is nobody's."""
    answer = 0.1 * x + (y.view(-1, 1, 1, 1) == 9) - 0.2 * (y.view(-1, 1, 1, 1) == 3)
    return torch.cat([answer, torch.tanh(x)], dim=1)


def test_guidance_of_one_is_no_guidance():
    x, t, labels = torch.randn(2, 4, 3, 3), torch.full((2,), 5), torch.tensor([3, 1])
    plain = tilted(x, t, labels)
    assert_close(guided(tilted, x, t, labels, Sampler(guidance=1.0), 9, 4), plain)
    almost = guided(tilted, x, t, labels, Sampler(guidance=1 + 1e-12), 9, 4)  # takes the way with both passes
    assert_close(almost, plain)


def test_guidance_goes_away_from_the_unconditional_in_the_guided_channels():
    x, t, labels = torch.randn(2, 4, 3, 3), torch.full((2,), 5), torch.tensor([3, 1])
    with_class, without = tilted(x, t, labels), tilted(x, t, torch.tensor([9, 9]))
    moved = without + 3 * (with_class - without)
    got = guided(tilted, x, t, labels, Sampler(guidance=3.0, guidance_channels=3), 9, 4)
    assert_close(got[:, :3], moved[:, :3])
    assert_close(got[:, 3:], with_class[:, 3:])
    got = guided(tilted, x, t, labels, Sampler(guidance=3.0), 9, 4)
    assert_close(got[:, :4], moved[:, :4])
    assert_close(got[:, 4:], with_class[:, 4:])


@pytest.mark.parametrize("name", ["ddpm", "ddim", "dpm"])
def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(name):
    process, sampler = Process(), Sampler(name, 4, guidance=2.0)

    def make(labels, first=0, seed=0):
        numbers = torch.tensor(labels)
        return sample(tilted, numbers, (2, 3, 3), process, sampler, unconditional=9, seed=seed, first=first).images

    whole = make([1, 3, 5])
    assert_close(make([3], first=1), whole[1:2])
    assert_close(make([1, 3, 5]), whole, rtol=0, atol=0)
    assert (make([1, 3, 5], seed=1) - whole).abs().min() > 0


def test_frames_run_from_the_noise_to_the_sample():
    process, sampler = Process(learn_sigma=False), Sampler("ddim", 10)
    found = sample(exact_denoiser(process, sampler), LABELS, SHAPE, process, sampler, frames=4)
    assert len(found.frames) == 4
    assert torch.equal(found.frames[-1], found.images)
    assert abs(found.frames[0].std() - 1) < 0.03
    assert found.frames[0].std() > found.frames[1].std() > found.frames[3].std()


@pytest.mark.parametrize("timesteps", [2, 10])
@pytest.mark.parametrize("name", ["ddpm", "ddim", "dpm"])
def test_a_short_process_is_sampled_in_all_its_steps(name, timesteps):
    process, told = Process("velocity", timesteps=timesteps, learn_sigma=False), []
    found = sample(tilted_mean, LABELS[:2], SHAPE, process, Sampler(name), progress=told.append)
    assert len(told) == timesteps - (name == "dpm")
    assert found.images.isfinite().all()


def test_samplers_refuse_what_they_cannot_do():
    with pytest.raises(DataError, match="'heun' is not known; it takes one of ddpm, ddim, dpm, euler"):
        Sampler("heun")
    with pytest.raises(DataError, match="'ddim' is not allowed for flow; it takes euler"):
        sample(tilted, LABELS, SHAPE, Process("flow", learn_sigma=False), Sampler("ddim"))
    for name, most in (("ddpm", 1000), ("ddim", 1000), ("dpm", 999)):
        Sampler(name, most).check(Process())
        with pytest.raises(DataError, match=f"steps: {most + 1} is not allowed; {name} takes 1 to {most} of 1000"):
            sample(tilted, LABELS, SHAPE, Process(), Sampler(name, most + 1))
    with pytest.raises(DataError, match=r"guidance: 2\.0 is not allowed; a model that saw every label takes 1"):
        sample(tilted, LABELS, SHAPE, Process(), Sampler("ddpm", 5, guidance=2.0))
