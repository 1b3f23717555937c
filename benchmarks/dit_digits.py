"""Whether samples of a ``dit-digits`` run are the digits asked for: a support vector machine and the small classifier.

siamesenorm train dit-digits --run runs/digits
python benchmarks/dit_digits.py runs/digits
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.svm import SVC

from siamesenorm.data.images import open_images
from siamesenorm.lab.sampling import open_generator
from siamesenorm.tasks.diffusion import Sampler
from siamesenorm.tasks.fidelity import ClassifierFidelity

RESULT = Path(__file__).parent / "results" / "dit-digits.json"


def real(split: Literal["train", "test"]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes (count, 8, 8, 1) and labels."""
    images = open_images("digits", split)
    return np.stack([images[i] for i in range(len(images))]), np.asarray(images.labels)


def main() -> None:
    """Sample with and without guidance, and judge real test digits in the same way."""
    parser = argparse.ArgumentParser(description="Whether samples are the digits asked for.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--per-class", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of DPM-Solver++")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    images, labels = real("train")
    machine = SVC(C=10).fit(images.reshape(len(images), -1) / 255, labels)
    measure = ClassifierFidelity(open_images("digits", "train"))

    def judge(pictures: NDArray[np.uint8], wanted: NDArray[np.int64]) -> dict[str, float]:
        found = machine.predict(pictures.reshape(len(pictures), -1) / 255)
        small = measure(pictures, wanted)
        return {"svc": float((found == wanted).mean()), "classifier": small["accuracy"], "frechet": small["frechet"]}

    rows = {"real test digits": judge(*real("test"))}
    generator = open_generator(args.run)
    classes = [digit for digit in range(10) for _ in range(args.per_class)]
    for guidance in args.guidance:
        made = generator.decoder(None)(
            generator.make(classes, Sampler("dpm", args.steps, guidance=guidance, clip=True)).images
        )
        rows[f"samples, guidance {guidance:g}"] = judge(made, np.asarray(classes))
    for name, row in rows.items():
        print(f"{name:24s}" + "".join(f"  {key} {value:.3f}" for key, value in row.items()))
    command = "python benchmarks/dit_digits.py RUN"
    report = {"command": command, "per_class": args.per_class, "steps": args.steps, "seed": 0, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
