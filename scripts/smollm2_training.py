"""SmolLM2-135M trained on for 300 short steps on text that it has not seen: as it is, and grafted to other topologies.

    python scripts/smollm2_training.py FOLDER docs/evidence/smollm2_training.json

FOLDER keeps the imported model, the text and all runs: called again, the script goes on where it was, and --only says
how much of it is run now. The text is this package's own documentation at one commit: the model was published in
2024, before any of it was written. All arms of a seed see the same batches; rates are not tuned. About two hours
of one core in all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from smollm2_case import download, siamesenorm

from siamesenorm.data.atomic import sha256_of, write_json

COMMIT = "f5762fec8945e4cf0b03720b910d34ad3838f7dd"
PATTERNS = ("README.md", "CHANGELOG.md", "docs/*.md", "docs/tutorials/*.md")
SHORT = {
    "steps": 300,
    "warmup": 30,
    "batch_size": 1,
    "sequence_length": 64,
    "evaluation.every": 300,
    "evaluation.sequences": 96,
    "checkpoint.every": 100,
}
PARTS: dict[str, list[str]] = {
    "pair": ["--topologies", "pre,siamese", "--lrs", "1e-4"],
    "all": ["--topologies", "pre,siamese,attnres,gr", "--lrs", "1e-4"],
    "lora": ["--topologies", "pre,siamese", "--lrs", "1e-3", "--parameters", "lora+residual"],
}
"""Options of `compare`; what one part shares with another is run once."""
KEPT = ("topology", "parameters", "lr", "seed", "state", "step", "evaluation.loss", "processor_seconds")


def main() -> None:
    """Import, text, comparisons; the figures of all runs go into one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, help="JSON file to be written")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "smol").is_dir():
        siamesenorm("import", download(folder), folder / "smol", "--no-remote-code")
    text = folder / "docs.txt"
    if not text.is_file():
        write_text(text)
    fields = [f"--set={name}={value}" for name, value in {**SHORT, "data.train": text}.items()]
    for part in args.only:
        common = ["--graft", folder / "smol", "--seeds", args.seeds, "--out", folder / "runs", "--jobs", 1]
        siamesenorm("compare", *common, *PARTS[part], *fields)
    write_json(args.out, figures(folder / "runs", text))


def write_text(file: Path) -> None:
    """The documentation as it was at the commit, all pages in one file."""
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    pages = []
    for pattern in PATTERNS:
        listed = subprocess.run([*git, "ls-tree", "-r", "--name-only", COMMIT], check=True, capture_output=True)
        names = sorted(name for name in listed.stdout.decode().splitlines() if Path(name).match(pattern))
        depth = pattern.count("/")
        pages += [name for name in names if name.count("/") == depth]
    content = b"".join(
        subprocess.run([*git, "show", f"{COMMIT}:{name}"], check=True, capture_output=True).stdout for name in pages
    )
    file.write_bytes(content)


def figures(runs: Path, text: Path) -> dict[str, Any]:
    """What every finished run ended with, and what it began with."""
    report_on = [sys.executable, "-m", "siamesenorm", "report", str(runs), "--out", str(runs), "--baseline", "pre"]
    subprocess.run(report_on, check=True)
    report = json.loads((runs / "report.json").read_text(encoding="utf-8"))
    grafts = report["grafts"]
    return {
        "text": {"commit": COMMIT, "pages": PATTERNS, "sha256": sha256_of(text), "bytes": text.stat().st_size},
        "fields": SHORT,
        "before": grafts[0]["before"],
        "certificates": {
            topology: {precision: found[precision] for precision in ("fp32", "bf16")}
            for graft in grafts
            for topology, found in graft["certificates"].items()
        },
        "verdict": report["verdict"],
        "runs": [{name: row[name] for name in KEPT if name in row} for row in report["runs"]],
    }


if __name__ == "__main__":
    main()
