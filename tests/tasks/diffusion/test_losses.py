"""Losses against torch.distributions and closed forms."""

import math

import numpy as np
import pytest
import torch
from torch import distributions
from torch.testing import assert_close

from siamesenorm.tasks.diffusion import Process
from siamesenorm.tasks.diffusion.data import draw
from siamesenorm.tasks.diffusion.losses import bound_term, byte_log_likelihood, gaussian_losses, normal_kl
from siamesenorm.tasks.diffusion.schedule import Normal, Schedule

SHAPE = (6, 2, 4, 4)


def random_normal():
    return Normal(torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64))


def as_distribution(normal):
    return distributions.Normal(normal.mean, (0.5 * normal.log_variance).exp())


def test_kl_is_that_of_torch():
    one, other = random_normal(), random_normal()
    expected = distributions.kl_divergence(as_distribution(one), as_distribution(other))
    assert_close(normal_kl(one, other), expected)


def test_the_bound_is_kl_in_bits_after_the_first_timestep():
    schedule = Schedule("cosine")
    clean, noisy, model = torch.rand(SHAPE).double() * 2 - 1, torch.randn(SHAPE).double(), random_normal()
    t = torch.tensor([1, 5, 100, 500, 900, 999])
    posterior = schedule.posterior(clean, noisy, t)
    kl = distributions.kl_divergence(as_distribution(posterior), as_distribution(model))
    assert_close(bound_term(schedule, clean, noisy, t, model), kl.mean((1, 2, 3)) / math.log(2))


def test_at_the_first_timestep_the_bound_is_the_likelihood_of_bytes():
    schedule, model = Schedule("linear"), random_normal()
    clean = torch.randint(1, 255, SHAPE).double() / 127.5 - 1
    got = bound_term(schedule, clean, torch.randn(SHAPE).double(), torch.zeros(6, dtype=torch.long), model)
    normal = as_distribution(model)
    mass = normal.cdf(clean + 1 / 255) - normal.cdf(clean - 1 / 255)
    assert_close(got, -mass.log().mean((1, 2, 3)) / math.log(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mean", [-1.3, -0.2, 0.0, 0.97, 2.0])
@pytest.mark.parametrize("deviation", [0.01, 0.3, 2.0])
def test_the_likelihoods_of_all_bytes_sum_to_one(mean, deviation):
    values = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    model = Normal(torch.full_like(values, mean), torch.full_like(values, 2 * math.log(deviation)))
    assert byte_log_likelihood(values, model).exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_the_bound_teaches_variances_and_the_error_teaches_predictions():
    predicted = torch.randn(3, 4, 4, 4, requires_grad=True)
    clean, noise = torch.rand(3, 2, 4, 4) * 2 - 1, torch.randn(3, 2, 4, 4)
    t = torch.tensor([0, 400, 999])
    losses = gaussian_losses(lambda x, t, y: predicted, clean, t, noise, t, Schedule("linear"))
    assert_close(losses.mse, (predicted[:, :2] - noise).square().mean((1, 2, 3)))
    (grad,) = torch.autograd.grad(losses.vlb.sum(), predicted)
    assert grad.isfinite().all()
    assert not grad[:, :2].any()
    assert grad[:, 2:].abs().amax((1, 2, 3)).min() > 0
    assert_close(losses.total, losses.mse + losses.vlb)


@pytest.mark.parametrize("prediction", ["epsilon", "velocity"])
def test_a_model_that_knows_the_answer_has_no_error_and_the_posterior_as_its_bound(prediction):
    process = Process(prediction, "cosine")
    clean, noise, time = torch.rand(4, 1, 4, 4) * 2 - 1, torch.randn(4, 1, 4, 4), torch.tensor([0.2, 0.5, 0.7, 0.9])

    def knows(x, t, y):
        answer = noise if prediction == "epsilon" else process.schedule.velocity(clean, noise, t)
        return torch.cat([answer, torch.full_like(answer, -1)], dim=1)

    losses = process.losses(knows, clean, torch.zeros(4, dtype=torch.long), noise, time)
    assert_close(losses.mse, torch.zeros(4))
    assert_close(losses.vlb, torch.zeros(4), rtol=0, atol=1e-4)


def test_a_flow_is_the_straight_line_from_image_to_noise():
    process = Process("flow", learn_sigma=False)
    clean, noise, time = torch.randn(2, 1, 2, 2), torch.randn(2, 1, 2, 2), torch.tensor([0.0, 0.25])
    seen = {}

    def model(x, t, y):
        seen.update(x=x, t=t)
        return noise - clean

    assert_close(process.losses(model, clean, time, noise, time).mse, torch.zeros(2))
    assert_close(seen["x"][0], clean[0])
    assert_close(seen["x"][1], 0.75 * clean[1] + 0.25 * noise[1])
    assert_close(seen["t"], torch.tensor([0.0, 250.0]))


def test_flows_have_no_variances():
    with pytest.raises(ValueError, match=r"learn_sigma = true is not allowed with diffusion\.prediction = flow"):
        Process("flow")


def test_times_and_noise_belong_to_the_sample_whatever_batch_it_is_in():
    whole = draw(3, np.arange(10), (2, 3))
    part = draw(3, np.array([7, 2]), (2, 3))
    for name in ("time", "noise"):
        assert torch.equal(part[name], whole[name][[7, 2]])
    assert not torch.equal(draw(4, np.arange(10), (2, 3))["noise"], whole["noise"])
    many = draw(0, np.arange(2000), (8,))
    assert abs(many["time"].mean() - 0.5) < 0.03
    assert abs(many["noise"].std() - 1) < 0.02
