"""Samples on the disk, batch by batch, so that tens of thousands need no memory and a killed command goes on.

| target    | while it is made                                 | in the end                                         |
|-----------|--------------------------------------------------|----------------------------------------------------|
| ``x.npz`` | ``x.npz.parts/00012.npy``, a file for each batch | arr_0 (images) and arr_1 (labels), as ADM has them |
| a folder  | ``CLASS/000123.png``, each whole or absent       | the same                                           |

``samples.json`` beside the parts or pictures says what they are samples of: a command goes on with the same only.
"""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from siamesenorm.data.arrays import map_array
from siamesenorm.data.atomic import locked_folder, whole_file, write_json
from siamesenorm.data.images.image_files import decode
from siamesenorm.data.images.image_folder import folder_name
from siamesenorm.data.listing import names_in
from siamesenorm.data.reading import read_object
from siamesenorm.data.removal import LONGEST, hidden_names, remove_entries, remove_tree
from siamesenorm.errors import ConfigError
from siamesenorm.tasks.diffusion.sample_grid import Images, save_png

RECORD = "samples.json"
PARTS = ".parts"
NUMBER = r"\d{5,}\.npy"
MADE = re.compile(rf"{RECORD}|{NUMBER}|{hidden_names(NUMBER)}|{hidden_names(re.escape(RECORD))}")
"""What lies in a folder of parts."""
BEGUN = re.compile(hidden_names(re.escape(RECORD)))
"""What a process leaves that is killed at the very start."""
LEFT = re.compile(hidden_names(r"\d{6,}\.png"))
"""What a killed process leaves among pictures."""


class SampleFiles(ABC):
    """Where samples go: `begin`, then `write` of every batch that is not there, in any order, then `finish`.

    labels: the class of every sample, in order. size: samples of a batch.
    """

    def __init__(self, target: Path, labels: NDArray[np.int64], size: int) -> None:
        self.target, self.labels, self.size = target, labels, size

    @property
    @abstractmethod
    def folder(self) -> Path:
        """What is written into."""

    @property
    def batches(self) -> range:
        """Numbers of all batches."""
        return range(-(-len(self.labels) // self.size))

    def numbers(self, batch: int) -> range:
        """Samples of a batch."""
        return range(batch * self.size, min((batch + 1) * self.size, len(self.labels)))

    @contextlib.contextmanager
    def begin(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Make the place ready, or find the samples of a command with the same settings in it; nobody else may."""
        check_place(self.target)
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked_folder(self.folder, "--individually: another command"):
            if (self.folder / RECORD).is_file():
                self._compare(settings)
            else:
                write_json(self.folder / RECORD, dict(settings))
            remove_entries(self.folder, BEGUN)
            self.tidy()
            yield

    def _compare(self, settings: Mapping[str, Any]) -> None:
        there = read_object(self.folder / RECORD, "--individually")
        for name, value in settings.items():
            if there.get(name) != value:
                raise ConfigError(
                    f"--individually: {str(self.folder)!r} holds samples of {name} = {there.get(name)}, and not of "
                    f"{value}; it takes the same settings to go on, or another place"
                )

    @abstractmethod
    def tidy(self) -> None:
        """Remove what a killed process was writing."""

    @abstractmethod
    def missing(self) -> list[int]:
        """Batches that are not there yet."""

    @abstractmethod
    def write(self, batch: int, images: Images) -> None:
        """Put the images of a batch in their place; any process may, each for other batches."""

    @abstractmethod
    def read(self, count: int) -> Images:
        """The first images, all of which are there."""

    def finish(self) -> None:  # noqa: B027  (a folder is finished with its last picture)
        """Every batch is there: make the target of them."""


class SampleArchive(SampleFiles):
    """An .npz; until it is whole, parts lie in a folder beside it."""

    @property
    def folder(self) -> Path:
        """The parts'."""
        return self.target.with_name(self.target.name + PARTS)

    def part(self, batch: int) -> Path:
        """The file of a batch."""
        return self.folder / f"{batch:05}.npy"

    def tidy(self) -> None:
        """Parts, and the archive itself."""
        place = Path(os.path.realpath(self.target))
        remove_entries(self.folder, re.compile(hidden_names(NUMBER)))
        remove_entries(place.parent, re.compile(hidden_names(re.escape(place.name[:LONGEST]))))

    def missing(self) -> list[int]:
        """Files are whole or absent."""
        return [batch for batch in self.batches if not self.part(batch).is_file()]

    def write(self, batch: int, images: Images) -> None:
        """One file."""
        with whole_file(self.part(batch)) as file:
            np.save(file, images, allow_pickle=False)

    def read(self, count: int) -> Images:
        """From the first parts."""
        batches = range(-(-count // self.size))
        return np.concatenate([map_array(self.part(batch), "samples") for batch in batches])[:count]

    def finish(self) -> None:
        """What `numpy.savez` writes, a part at a time; then the parts go."""
        shape = (len(self.labels), *map_array(self.part(0), "samples").shape[1:])
        header = {"descr": numpy_format.dtype_to_descr(np.dtype(np.uint8)), "fortran_order": False, "shape": shape}
        with whole_file(self.target) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
            with archive.open("arr_0.npy", "w", force_zip64=True) as array:
                numpy_format.write_array_header_1_0(array, header)
                for batch in self.batches:
                    array.write(np.ascontiguousarray(map_array(self.part(batch), "samples")).data)
            with archive.open("arr_1.npy", "w", force_zip64=True) as array:
                numpy_format.write_array(array, self.labels, allow_pickle=False)
        remove_tree(self.folder, MADE)


class SampleFolder(SampleFiles):
    """Pictures by class; names: of all classes."""

    def __init__(self, target: Path, labels: NDArray[np.int64], size: int, names: Sequence[str]) -> None:
        super().__init__(target, labels, size)
        self.names = [folder_name(name) for name in names]

    @property
    def folder(self) -> Path:
        """The target itself."""
        return self.target

    def picture(self, number: int) -> Path:
        """The file of a sample."""
        return self.target / self.names[int(self.labels[number])] / f"{number:06}.png"

    @property
    def classes(self) -> set[str]:
        """Folders of the classes that there are samples of."""
        return {self.names[int(label)] for label in np.unique(self.labels)}

    def tidy(self) -> None:
        """Pictures."""
        for name in self.classes:
            remove_entries(self.target / name, LEFT)

    def missing(self) -> list[int]:
        """Batches of which a picture is not there."""
        absent = (number for number in range(len(self.labels)) if not self.picture(number).is_file())
        return sorted({number // self.size for number in absent})

    def write(self, batch: int, images: Images) -> None:
        """A file for each sample."""
        for number, image in zip(self.numbers(batch), images, strict=True):
            path = self.picture(number)
            path.parent.mkdir(exist_ok=True)
            save_png(image, path)

    def read(self, count: int) -> Images:
        """From the first files."""
        return np.stack([decode(path, str(path), 3) for path in map(self.picture, range(count))])


def open_samples(target: Path, labels: NDArray[np.int64], size: int, names: Sequence[str]) -> SampleFiles:
    """Where the samples of these labels go: an .npz, or a folder of pictures by the names of classes."""
    if target.suffix.lower() == ".npz":
        return SampleArchive(target, labels, size)
    return SampleFolder(target, labels, size, names)


def check_place(target: Path) -> None:
    """Raise unless samples can be written there, or there are some to go on with."""
    if target.suffix.lower() == ".npz":
        wrong = target.is_dir() or _others(target.with_name(target.name + PARTS))
    else:
        wrong = _others(target)
    if wrong:
        raise ConfigError.not_allowed(
            "--individually",
            str(target),
            "a folder that is empty, not there or of the same samples, or a file that ends with .npz",
        )


def _others(folder: Path) -> bool:
    """Whether there is something other than samples of ours."""
    if not folder.exists():
        return False
    return not folder.is_dir() or (RECORD not in names_in(folder) and not all(map(BEGUN.fullmatch, names_in(folder))))
