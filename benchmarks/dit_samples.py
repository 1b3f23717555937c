"""Whether samples of a diffusion run are what was asked for, by a support vector machine and the small classifier.

siamesenorm train dit-digits --run runs/digits
python benchmarks/dit_samples.py runs/digits --out benchmarks/results/dit-digits.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.svm import SVC

from siamesenorm.data.images import ImageSet, open_images
from siamesenorm.lab.sampling import open_generator
from siamesenorm.tasks.diffusion import Sampler
from siamesenorm.tasks.fidelity import ClassifierFidelity
from siamesenorm.train.folder import RunFolder

MOST = {"train": 10_000, "test": 2_000}
"""Real images that the support vector machine learns from, and that are judged beside the samples, evenly spread."""


def some(images: ImageSet, most: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes (count, height, width, channels) and labels."""
    numbers = np.unique(np.linspace(0, len(images) - 1, min(most, len(images))).astype(int))
    return np.stack([images[int(n)] for n in numbers]), np.asarray(images.labels)[numbers]


def main() -> None:
    """Sample with and without guidance, and judge real test images in the same way."""
    parser = argparse.ArgumentParser(description="Whether samples are what was asked for.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--per-class", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of DPM-Solver++")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data: Any = RunFolder(args.run).config().data
    images = open_images(data.train, "train")
    pixels, labels = some(images, MOST["train"])
    machine = SVC(C=10).fit(pixels.reshape(len(pixels), -1) / 255, labels)
    measure = ClassifierFidelity(images)

    def judge(pictures: NDArray[np.uint8], wanted: NDArray[np.int64]) -> dict[str, float]:
        found = machine.predict(pictures.reshape(len(pictures), -1) / 255)
        small = measure(pictures, wanted)
        return {"svc": float((found == wanted).mean()), "classifier": small["accuracy"], "frechet": small["frechet"]}

    rows = {"real test images": judge(*some(open_images(data.train, "test"), MOST["test"]))}
    generator = open_generator(args.run)
    classes = [number for number in range(len(images.class_names)) for _ in range(args.per_class)]
    for guidance in args.guidance:
        sampler = Sampler("dpm", args.steps, guidance=guidance, clip=True)
        made = generator.decoder(None)(generator.make(classes, sampler).images)
        rows[f"samples, guidance {guidance:g}"] = judge(made, np.asarray(classes))
    for name, row in rows.items():
        print(f"{name:24s}" + "".join(f"  {key} {value:.3f}" for key, value in row.items()))
    if args.out is not None:
        command = f"python benchmarks/dit_samples.py RUN --per-class {args.per_class} --steps {args.steps}"
        report = {"command": command, "step": generator.step, "seed": 0, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
