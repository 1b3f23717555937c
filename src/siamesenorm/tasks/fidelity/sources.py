"""From what a user names to the two sides of a comparison and the network that looks at them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from siamesenorm.data.images import open_images
from siamesenorm.data.images.imageset import SPLITS, Split
from siamesenorm.data.reading import named_path
from siamesenorm.data.workers import ProgressCallback
from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.classifier import classifier_for
from siamesenorm.tasks.fidelity.features import FeatureNetwork
from siamesenorm.tasks.fidelity.image_batches import Pictures, has_pictures, of_image_set, open_pictures
from siamesenorm.tasks.fidelity.inception_weights import WHERE, load_inception
from siamesenorm.tasks.fidelity.measure import ALONE, BATCH, cached_reference
from siamesenorm.tasks.fidelity.references import Reference, holds_statistics, read_reference
from siamesenorm.tasks.sharing import Sharing


def check_split(split: str) -> Split:
    """A split by its name."""
    if split not in SPLITS:
        raise DataError.not_allowed("--split", split, SPLITS)
    return cast(Split, split)


def open_network(
    weights: Path | None,
    classifier: str | None,
    reference: str,
    cache: Path,
    device: torch.device | None = None,
    precision: torch.dtype | None = None,
) -> FeatureNetwork:
    """Inception with the weights of a file, else the small classifier of labelled images, by default the reference."""
    place = device or torch.device("cpu")
    if weights is not None:
        if classifier is not None:
            raise DataError("--classifier: it cannot stand beside --weights; take one of them")
        return load_inception(weights).to(place, precision)
    if classifier is None and named_path(reference, "reference").is_file():
        raise DataError(f"--weights: it is missing; it takes {WHERE}; or name labelled images with --classifier")
    return classifier_for(open_images(classifier or reference, "train"), cache).to(place, precision)


def open_either(source: str, split: Split) -> Pictures:
    """The pictures of a folder or an .npz, else of a split of a labelled source."""
    path = named_path(source, "reference")
    if has_pictures(path) or path.suffix == ".npz":
        return open_pictures(path)
    return of_image_set(open_images(source, split))


def open_reference(
    source: str,
    split: Split,
    network: FeatureNetwork,
    cache: Path,
    batch: int = BATCH,
    progress: ProgressCallback = lambda done: None,
    sharing: Sharing = ALONE,
) -> Reference:
    """Statistics of a file, or of pictures: those are kept in the cache for the next time.

    ADM's reference files hold statistics of all images and some of the images: these are for precision and recall.
    """
    path = named_path(source, "reference")
    how: dict[str, Any] = {"batch": batch, "progress": progress, "sharing": sharing}
    if not holds_statistics(path):
        return cached_reference(open_either(source, split), network, cache, **how)
    found = read_reference(path)
    if path.suffix == ".npz" and has_pictures(path) and found.features is None:
        some = cached_reference(open_pictures(path), network, cache, **how)
        found = replace(found, features=some.features)
    return found
