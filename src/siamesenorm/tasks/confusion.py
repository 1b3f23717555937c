"""Which class was taken for which: accuracy by class, and the pairs that are mixed up most."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Confusion:
    """Counts (true class, predicted class)."""

    def __init__(self, counts: NDArray[np.float64], class_names: Sequence[str]) -> None:
        self.counts = counts
        self.class_names = [*class_names, *(str(n) for n in range(len(class_names), len(counts)))]

    @property
    def accuracy(self) -> float:
        """Share of all images that were classified right."""
        return float(np.trace(self.counts) / max(self.counts.sum(), 1))

    def by_class(self) -> dict[str, float | None]:
        """Share of each class's images that were classified right; None where there are none."""
        totals = self.counts.sum(axis=1)
        shares = [float(c / t) if t else None for c, t in zip(np.diag(self.counts), totals, strict=True)]
        return dict(zip(self.class_names, shares, strict=True))

    def mistakes(self, most: int = 10) -> list[tuple[str, str, int]]:
        """(true, taken for, how often), most frequent first."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        pairs = [divmod(int(place), len(wrong)) for place in order]
        return [(self.class_names[a], self.class_names[b], int(wrong[a, b])) for a, b in pairs if wrong[a, b]]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "images": int(self.counts.sum()),
            "accuracy": self.accuracy,
            "by_class": self.by_class(),
            "mistakes": [{"class": a, "taken_for": b, "images": count} for a, b, count in self.mistakes()],
        }

    def as_csv(self) -> str:
        """A row for every true class, a column for every predicted one."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["true \\ predicted", *self.class_names])
        for name, row in zip(self.class_names, self.counts, strict=True):
            writer.writerow([name, *(int(count) for count in row)])
        return out.getvalue()
