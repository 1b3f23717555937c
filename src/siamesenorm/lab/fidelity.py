"""How close generated images are to real ones: every figure of `siamesenorm fid`, by however many processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.classifier import default_cache
from siamesenorm.tasks.fidelity.image_batches import open_pictures
from siamesenorm.tasks.fidelity.measure import BATCH, FEW, Fidelity, compare, describe, recognised
from siamesenorm.tasks.fidelity.references import check_target, write_reference
from siamesenorm.tasks.fidelity.sources import check_split, open_network, open_reference
from siamesenorm.train.inference import Inference

KEYS = {
    "inception": ("fid", "sfid", "inception_score", "precision", "recall"),
    "classifier": ("frechet", "", "classifier_score", "precision", "recall"),
}
"""Names of the figures by the network that looks; nothing where it does not give one."""
Stage = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Shows a stage of the work, of so many images, and gives a function to call with how many more are done."""


@dataclass(frozen=True)
class FidelityReport:
    """Figures, and what they were found on."""

    features: str
    """inception or classifier."""
    network: str
    images: int
    reference_images: int | None
    accuracy: float | None
    """Share of images that a classifier sees as the class they were asked for, where that is known."""
    figures: dict[str, float | None]
    notes: list[str]
    """What a reader of the figures must know."""

    def as_json(self) -> dict[str, Any]:
        """Plain data by name."""
        plain = {name: value for name, value in asdict(self).items() if name != "accuracy" or value is not None}
        figures, notes = plain.pop("figures"), plain.pop("notes")
        return {**plain, **figures, "notes": notes}


class FidelityRequest:
    """Two sides of a comparison, checked before anything is computed."""

    def __init__(
        self,
        generated: str,
        reference: str,
        *,
        weights: Path | None = None,
        classifier: str | None = None,
        split: str = "train",
        save_stats: Path | None = None,
        cache: Path | None = None,
    ) -> None:
        self.split = check_split(split)
        if save_stats is not None:
            check_target(save_stats)
        self.pictures = open_pictures(generated)
        self.cache = cache or default_cache()
        if self.cache.exists() and not self.cache.is_dir():
            raise DataError(f"--cache: {str(self.cache)!r} is a file; it takes a folder")
        self.reference, self.weights, self.classifier, self.save_stats = reference, weights, classifier, save_stats

    def measure(self, place: Inference, stage: Stage, *, batch_size: int = BATCH) -> FidelityReport | None:
        """Every figure; None in all processes but the main one."""
        with stage("classifier" if self.weights is None else "weights", None):
            network = open_network(self.weights, self.classifier, self.reference, self.cache, place.device, place.dtype)
        with stage("reference", None) as done:
            real = open_reference(self.reference, self.split, network, self.cache, batch_size, done, place.sharing)
        with stage("generated", self.pictures.count) as done:
            made = describe(self.pictures, network, batch=batch_size, progress=done, sharing=place.sharing)
        if not place.is_main:
            return None
        found = compare(made, real)
        if self.save_stats is not None:
            write_reference(self.save_stats, real)
        return FidelityReport(
            features=network.name,
            network=network.fingerprint,
            images=self.pictures.count,
            reference_images=real.count,
            accuracy=recognised(made, self.pictures, network),
            figures={key: value for key, value in zip(KEYS[network.name], found, strict=True) if key},
            notes=remarks(network.name, self.pictures.count, found),
        )


def remarks(features: str, images: int, found: Fidelity) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    if images < FEW:
        notes.append(
            f"{images:,} images: with fewer than {FEW:,} the Fréchet distance comes out too high; "
            "compare it only at the same number"
        )
    if features == "classifier":
        notes.append("measured in the features of a small classifier: compares models on these images, and is not FID")
    if found.precision is None:
        notes.append("the reference holds no images or features, so precision and recall are left out")
    return notes
