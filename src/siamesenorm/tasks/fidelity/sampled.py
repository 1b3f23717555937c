"""Samples of a class-conditional model beside the images it was trained on, in the features of a small classifier.

fidelity = ClassifierFidelity(open_images("digits", "train"))
fidelity(samples, labels)                      # {"frechet": …, "accuracy": …}
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.images import ImageSet
from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.classifier import classifier_for, default_cache
from siamesenorm.tasks.fidelity.features import FeatureNetwork
from siamesenorm.tasks.fidelity.image_batches import Images, of_array, of_image_set
from siamesenorm.tasks.fidelity.measure import cached_reference, describe
from siamesenorm.tasks.fidelity.references import Reference
from siamesenorm.tasks.fidelity.statistics import frechet_distance


class ClassifierFidelity:
    """Fréchet distance in the features of a small classifier (not FID), and how often it sees the wanted class.

    The classifier and the statistics of the images are made at first use and kept in `cache`.
    """

    def __init__(self, images: ImageSet, cache: Path | None = None) -> None:
        self.images, self.cache = images, cache or default_cache()

    @cached_property
    def network(self) -> FeatureNetwork:
        """The classifier, trained on the images."""
        return classifier_for(self.images, self.cache)

    @cached_property
    def reference(self) -> Reference:
        """Statistics of the images."""
        return cached_reference(of_image_set(self.images), self.network, self.cache)

    def __call__(self, samples: Images, labels: np.ndarray[Any, Any] | list[int]) -> dict[str, float]:
        """Of uint8 samples (images, height, width, channels) and the classes they were asked for."""
        if len(samples) != len(labels):
            raise DataError(f"labels: {len(labels)} for {len(samples)} samples; it takes one for each")
        found = describe(of_array(samples), self.network)
        right = found.logits.argmax(-1).numpy() == np.asarray(labels)
        distance = frechet_distance(found.reference.pool, self.reference.pool)
        return {"frechet": distance, "accuracy": float(right.mean())}
