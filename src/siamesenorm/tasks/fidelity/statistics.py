"""Measures on features: the Fréchet distance of two Gaussians, gathered batch by batch; scores of single images.

moments = Moments()
for batch in batches:
    moments.update(features(batch))
distance = frechet_distance(moments.gaussian(), reference)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from siamesenorm.errors import DataError

SPLIT = 5000
NEIGHBOURS = 3
CHUNK = 2048


class Gaussian(NamedTuple):
    """A normal distribution, as the Fréchet distance sees a set of features."""

    mean: Tensor
    """(features), float64."""
    covariance: Tensor
    """(features, features), float64."""


class Moments:
    """Running mean and scatter in float64 (Chan, Golub and LeVeque's pairwise update): no sum of squares to cancel."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.empty(0, dtype=torch.float64)
        self.scatter = torch.empty(0, 0, dtype=torch.float64)

    def update(self, features: Tensor) -> None:
        """Take in a batch of rows."""
        rows = features.detach().to("cpu", torch.float64)
        batch = Moments()
        batch.count = len(rows)
        batch.mean = rows.mean(0)
        centred = rows - batch.mean
        batch.scatter = centred.T @ centred
        self.merge(batch)

    def merge(self, other: Moments) -> None:
        """Take in what another one has seen, of another part of the data."""
        if not other.count:
            return
        if not self.count:
            self.count, self.mean, self.scatter = other.count, other.mean.clone(), other.scatter.clone()
            return
        total = self.count + other.count
        step = other.mean - self.mean
        self.scatter += other.scatter + torch.outer(step, step) * (self.count * other.count / total)
        self.mean = self.mean + step * (other.count / total)
        self.count = total

    def gaussian(self) -> Gaussian:
        """Mean and unbiased covariance of what was seen."""
        if self.count < 2:
            raise DataError(f"images: {self.count} is too few for a covariance; it takes 2 or more")
        return Gaussian(self.mean, self.scatter / (self.count - 1))


def frechet_distance(one: Gaussian, other: Gaussian) -> float:
    """``|m₁ - m₂|² + tr(C₁ + C₂ - 2 (C₁ C₂)^½)``, the squared 2-Wasserstein distance of two Gaussians.

    With ``C = A Aᵀ`` the trace of the root is the sum of the singular values of ``A₁ᵀ A₂``: real, never negative,
    and exact for covariances without full rank, which few samples give.
    """
    if one.mean.shape != other.mean.shape:
        raise DataError(
            f"statistics: {len(one.mean)} and {len(other.mean)} features cannot be compared; "
            "both sides take the same feature network"
        )
    overlap = torch.linalg.svdvals(_factor(one.covariance).T @ _factor(other.covariance)).sum()
    shift = (one.mean - other.mean).square().sum()
    distance = shift + one.covariance.trace() + other.covariance.trace() - 2 * overlap
    return max(0.0, float(distance))


def _factor(covariance: Tensor) -> Tensor:
    """``A`` with ``A Aᵀ`` = covariance and as many columns as its rank; smaller eigenvalues are rounding."""
    values, vectors = torch.linalg.eigh(covariance)
    real = values > values.abs().max() * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, real] * values[real].sqrt()


def inception_score(logits: Tensor, split: int = SPLIT) -> float:
    """``exp(mean KL(p(y|x) ‖ p(y)))`` (arXiv 1606.03498), the mean over parts of `split` images as ADM takes it."""
    scores = []
    for part in logits.double().split(split):
        given = part.log_softmax(-1)
        marginal = torch.logsumexp(given, 0, keepdim=True) - torch.log(torch.tensor(float(len(part))))
        scores.append((given.exp() * (given - marginal)).sum(-1).mean().exp())
    return float(torch.stack(scores).mean())


def precision_recall(
    generated: Tensor, reference: Tensor, neighbours: int = NEIGHBOURS, chunk: int = CHUNK
) -> tuple[float, float]:
    """Share of the generated inside the reference's manifold, and the other way round (arXiv 1904.06991).

    A manifold is the union of balls around its points that reach to their k-th nearest neighbour. Distances are
    taken `chunk` rows at a time.
    """
    for name, features in (("generated", generated), ("reference", reference)):
        if len(features) <= neighbours:
            raise DataError(f"{name}: {len(features)} images are too few; precision takes {neighbours + 1} or more")
    centre = reference.double().mean(0)
    generated, reference = generated.double() - centre, reference.double() - centre
    return (
        _share_inside(generated, reference, _radii(reference, neighbours, chunk), chunk),
        _share_inside(reference, generated, _radii(generated, neighbours, chunk), chunk),
    )


def _distances(rows: Tensor, columns: Tensor) -> Tensor:
    """All distances as a matrix product: in float64, of centred features, what cancels stays far below any radius."""
    return torch.cdist(rows, columns, compute_mode="use_mm_for_euclid_dist")


def _radii(points: Tensor, neighbours: int, chunk: int) -> Tensor:
    """Distance of every point to its k-th neighbour, itself not counted."""
    radii = []
    for start in range(0, len(points), chunk):
        distances = _distances(points[start : start + chunk], points)
        distances.diagonal(start).fill_(torch.inf)
        radii.append(distances.kthvalue(neighbours).values)
    return torch.cat(radii)


def _share_inside(points: Tensor, centres: Tensor, radii: Tensor, chunk: int) -> float:
    inside = [(_distances(rows, centres) <= radii).any(1) for rows in points.split(chunk)]
    return float(torch.cat(inside).double().mean())
