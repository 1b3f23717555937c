"""Schedules against their definitions, and the posterior against the product of the two Gaussians it comes from."""

import math

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.tasks.diffusion.schedule import Schedule

every_schedule = pytest.mark.parametrize("schedule", [Schedule("linear"), Schedule("cosine"), Schedule("linear", 50)])
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def test_linear_is_the_published_line_and_cosine_the_published_curve():
    linear, cosine = Schedule("linear"), Schedule("cosine")
    assert_close(linear.betas[[0, 999]], torch.tensor([1e-4, 0.02], dtype=torch.float64))
    assert_close(linear.betas.diff(), torch.full((999,), (0.02 - 1e-4) / 999, dtype=torch.float64))

    def level(time):
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    for t in (0, 10, 500, 900):
        assert cosine.kept[t].item() == pytest.approx(level((t + 1) / 1000) / level(0), rel=1e-9)
    assert cosine.betas.max() == 0.999


@every_schedule
def test_the_posterior_is_the_product_of_prior_and_likelihood(schedule):
    """q(x_t-1 | x_t, x_0) ∝ q(x_t | x_t-1) q(x_t-1 | x_0): precisions add, means are weighed by them."""
    clean, noisy = torch.tensor([0.3], dtype=torch.float64), torch.tensor([-1.2], dtype=torch.float64)
    for t in (1, 2, schedule.timesteps // 2, schedule.timesteps - 1):
        beta, before = schedule.betas[t], schedule.kept[t - 1]
        likelihood, prior = (1 - beta) / beta, 1 / (1 - before)  # precisions in x_t-1
        variance = 1 / (likelihood + prior)
        mean = variance * (likelihood * noisy / (1 - beta).sqrt() + prior * before.sqrt() * clean)
        got = schedule.posterior(clean[:, None], noisy[:, None], torch.tensor([t]))
        assert_close(got.mean[0], mean, **CLOSE)
        assert_close(got.log_variance[0], variance.log()[None], **CLOSE)


@every_schedule
def test_at_the_first_timestep_the_posterior_is_the_image_and_its_variance_the_second_one(schedule):
    clean, noisy = torch.randn(1, 3, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    got = schedule.posterior(clean, noisy, torch.tensor([0]))
    assert_close(got.mean, clean)
    assert_close(got.log_variance[0, 0], schedule.posterior_variance[1].log())


@every_schedule
def test_noise_and_velocity_lead_back_to_the_image(schedule):
    clean, noise = torch.randn(2, 5, 3, dtype=torch.float64)
    t = torch.tensor([0, 1, schedule.timesteps // 2, schedule.timesteps - 2, schedule.timesteps - 1])
    noisy = schedule.add_noise(clean, noise, t)
    assert_close(schedule.clean_of_noise(noisy, noise, t), clean, rtol=1e-6, atol=1e-6)
    assert_close(schedule.clean_of_velocity(noisy, schedule.velocity(clean, noise, t), t), clean, **CLOSE)


def test_a_learnt_variance_runs_between_the_posterior_and_beta():
    schedule, t = Schedule("linear"), torch.tensor([700, 700, 700])
    got = schedule.learnt_log_variance(torch.tensor([[-1.0], [1.0], [0.0]], dtype=torch.float64), t)[:, 0]
    low, high = schedule.posterior_variance[700].log(), schedule.betas[700].log()
    assert_close(got, torch.stack([low, high, (low + high) / 2]))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="'wave' is not known; it takes one of linear, cosine"):
        Schedule("wave")
