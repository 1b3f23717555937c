"""Fréchet distance, Inception score, precision and recall against closed forms and other people's code."""

import math

import numpy as np
import pytest
import torch

from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.statistics import Gaussian, Moments, frechet_distance, inception_score, precision_recall


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian_of(rows):
    moments = Moments()
    moments.update(rows)
    return moments.gaussian()


def test_moments_of_batches_and_of_merged_parts_are_those_of_all_rows():
    rows = (draw(103, 7) * 3 + 1e6).float()
    whole, first, second = gaussian_of(rows), Moments(), Moments()
    for batch in rows[:50].split(8):
        first.update(batch)
    for batch in rows[50:].split(11):
        second.update(batch)
    first.merge(second)
    first.merge(Moments())
    found = first.gaussian()
    expected = np.cov(rows.double().numpy(), rowvar=False)
    assert first.count == 103
    for one in (whole, found):
        np.testing.assert_allclose(one.mean.numpy(), rows.double().numpy().mean(0), rtol=1e-14)
        np.testing.assert_allclose(one.covariance.numpy(), expected, rtol=1e-6, atol=1e-8)


def test_distance_of_gaussians_on_a_line_is_that_of_means_and_deviations():
    one = Gaussian(torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double())
    other = Gaussian(torch.tensor([-2.0]).double(), torch.tensor([[9.0]]).double())
    assert frechet_distance(one, other) == pytest.approx((1 + 2) ** 2 + (2 - 3) ** 2)


def test_distance_of_commuting_covariances_is_that_of_their_roots():
    turn, _ = torch.linalg.qr(draw(6, 6))
    a, b = draw(6, seed=1).exp(), draw(6, seed=2).exp()
    one = Gaussian(draw(6, seed=3), turn @ a.diag() @ turn.T)
    other = Gaussian(draw(6, seed=4), turn @ b.diag() @ turn.T)
    expected = (one.mean - other.mean).square().sum() + (a.sqrt() - b.sqrt()).square().sum()
    assert frechet_distance(one, other) == pytest.approx(float(expected), rel=1e-12)


def test_distance_agrees_with_the_matrix_root_of_scipy():
    linalg = pytest.importorskip("scipy.linalg")
    one, other = gaussian_of(draw(60, 20)), gaussian_of(draw(70, 20, seed=1) @ draw(20, 20, seed=2))
    root = linalg.sqrtm((one.covariance @ other.covariance).numpy()).real
    expected = (one.mean - other.mean).square().sum() + (one.covariance + other.covariance).trace() - 2 * root.trace()
    assert frechet_distance(one, other) == pytest.approx(float(expected), rel=1e-10)
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one), rel=1e-12)


def test_distance_of_fewer_samples_than_features_is_finite_and_zero_to_itself():
    few = gaussian_of(draw(5, 40))
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-5)
    assert math.isfinite(frechet_distance(few, gaussian_of(draw(6, 40, seed=1))))


def test_too_few_images_and_other_features_are_refused():
    with pytest.raises(DataError, match="1 is too few"):
        gaussian_of(draw(1, 3))
    with pytest.raises(DataError, match="3 and 4 features"):
        frechet_distance(gaussian_of(draw(5, 3)), gaussian_of(draw(5, 4)))


def test_inception_score_is_one_for_equal_images_and_the_number_of_classes_for_sure_and_balanced_ones():
    assert inception_score(torch.zeros(8, 5)) == pytest.approx(1)
    assert inception_score(torch.eye(5).repeat(4, 1) * 1e4) == pytest.approx(5)


def test_inception_score_is_the_mean_over_parts_of_exponentiated_mutual_information():
    logits = draw(10, 4) * 2
    parts = []
    for part in (logits[:6], logits[6:]):
        p = part.softmax(-1)
        parts.append(float((p * (p / p.mean(0)).log()).sum(1).mean().exp()))
    assert inception_score(logits, split=6) == pytest.approx(sum(parts) / 2)


def test_precision_and_recall_agree_with_neighbours_of_sklearn():
    neighbors = pytest.importorskip("sklearn.neighbors")
    real, made = draw(61, 3).numpy(), draw(47, 3, seed=1).numpy() * 1.5 + 0.4

    def share(points, centres):
        radii = neighbors.NearestNeighbors(n_neighbors=3).fit(centres).kneighbors()[0][:, -1]
        distances = np.linalg.norm(points[:, None] - centres[None], axis=-1)
        return (distances <= radii).any(1).mean()

    found = precision_recall(torch.from_numpy(made), torch.from_numpy(real), chunk=10)
    assert found == (pytest.approx(share(made, real)), pytest.approx(share(real, made)))
    assert 0 < found[0] < 1


def test_a_mode_that_is_missing_costs_recall_and_not_precision():
    left, right = draw(40, 2) * 0.1, draw(40, 2, seed=1) * 0.1 + 5
    precision, recall = precision_recall(draw(40, 2, seed=2) * 0.1, torch.cat([left, right]))
    assert precision > 0.8
    assert recall == pytest.approx(0.5, abs=0.1)
    assert precision_recall(left, left) == (1, 1)
