"""What is read from single images' features: Inception score, and precision and recall by nearest neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.errors import DataError

SPLIT = 5000
NEIGHBOURS = 3
CHUNK = 2048


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
