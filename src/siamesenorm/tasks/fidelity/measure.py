"""From pictures to figures: features of a set, and what two sets have to say to each other."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from siamesenorm.data.workers import ProgressCallback
from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.features import FeatureNetwork
from siamesenorm.tasks.fidelity.image_batches import Pictures
from siamesenorm.tasks.fidelity.references import Reference, read_reference, write_reference
from siamesenorm.tasks.fidelity.statistics import Moments, frechet_distance, inception_score, precision_recall
from siamesenorm.tasks.sharing import Sharing

BATCH = 64
MANIFOLD = 50_000
"""Images whose own features are kept for precision and recall, the first ones."""
FEW = 10_000
"""Below this many images the Fréchet distance is biased upwards enough to mislead."""

ALONE = Sharing()


class Fidelity(NamedTuple):
    """What is measured; None where a side lacks what a figure needs."""

    frechet: float
    """FID with Inception's features, and only then."""
    spatial_frechet: float | None
    score: float
    """exp of the mean KL between an image's classes and all images'; the Inception score with Inception."""
    precision: float | None
    recall: float | None


class Described(NamedTuple):
    """A set of images as a network sees it."""

    reference: Reference
    logits: Tensor


def describe(
    pictures: Pictures,
    network: FeatureNetwork,
    *,
    batch: int = BATCH,
    keep: int = MANIFOLD,
    progress: ProgressCallback = lambda done: None,
    sharing: Sharing = ALONE,
) -> Described:
    """Statistics, features and logits of all pictures; progress is called with every batch's size.

    sharing: processes that share the batches.
    """
    pool, spatial = Moments(), Moments()
    kept: list[Tensor] = []
    logits: list[Tensor] = []
    for found in sharing.each(pictures.batches(batch), network):
        if pool.count < keep:
            kept.append(found.pool[: keep - pool.count])
        pool.update(found.pool)
        if found.spatial is not None:
            spatial.update(found.spatial)
        logits.append(found.logits)
        progress(len(found.pool))
    reference = Reference(
        pool=pool.gaussian(),
        spatial=spatial.gaussian() if spatial.count else None,
        features=torch.cat(kept),
        count=pool.count,
        network=network.fingerprint,
    )
    return Described(reference, torch.cat(logits))


def recognised(found: Described, pictures: Pictures, network: FeatureNetwork) -> float | None:
    """Share of the pictures that a classifier sees as the class they were asked for, where that is known."""
    labels = pictures.labels(network.class_names) if network.class_names else None
    return None if labels is None else float((found.logits.argmax(-1).numpy() == labels).mean())


def cached_reference(
    pictures: Pictures,
    network: FeatureNetwork,
    cache: Path,
    *,
    batch: int = BATCH,
    progress: ProgressCallback = lambda done: None,
    sharing: Sharing = ALONE,
) -> Reference:
    """Statistics of pictures in a network's features: read where they are kept, else made and kept."""
    source = pictures.fingerprint()
    weights, _, precision = network.fingerprint.partition("-")
    path = cache / f"statistics-{weights[:16]}{precision}-{source[:16]}.safetensors"
    kept: Reference | None = None
    with contextlib.suppress(DataError):  # not there, or damaged: they are made again
        kept = read_reference(path)
    if all(sharing.gather(kept is not None)) and kept is not None:  # machines may have caches of their own
        return kept
    reference = replace(
        describe(pictures, network, batch=batch, progress=progress, sharing=sharing).reference, source=source
    )
    with contextlib.suppress(OSError):  # what cannot be kept is made again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_reference(path, reference)
    return reference


def compare(generated: Described, reference: Reference) -> Fidelity:
    """Every figure that both sides allow."""
    ours = generated.reference
    if reference.network not in (None, ours.network):
        raise DataError(
            "statistics: the reference was made with another feature network; "
            "both sides take the same weights, in the same precision"
        )
    spatial = None
    if ours.spatial is not None and reference.spatial is not None:
        spatial = frechet_distance(ours.spatial, reference.spatial)
    precision = recall = None
    if ours.features is not None and reference.features is not None:
        precision, recall = precision_recall(ours.features, reference.features)
    return Fidelity(
        frechet_distance(ours.pool, reference.pool), spatial, inception_score(generated.logits), precision, recall
    )
