"""From what a user names to labelled images: embedded sets, folders of several kinds, parquet, datasets by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.images.cifar import CifarImages, find_cifar
from siamesenorm.data.images.columns import open_dataset, open_parquet
from siamesenorm.data.images.idx import FASHION, idx_file, open_idx
from siamesenorm.data.images.image_folder import FolderImages, split_folder
from siamesenorm.data.images.imageset import SPLITS, ArrayImages, ImageSet, Split, hold_out
from siamesenorm.data.reading import named_path
from siamesenorm.errors import DataError, import_extra

HUB = "hf:"
DIGITS = "digits"
FASHION_MNIST = "fashion-mnist"
FASHION_FOLDERS = (Path("/usr/share/datasets/fashion-mnist"),)
"""Where Debian's package dataset-fashion-mnist puts it."""
PARQUET_SPLITS = {"train": ("train",), "test": ("test", "val")}


def open_images(
    source: str | Path,
    split: Split = "train",
    *,
    held_out: float | None = 0.2,
    image_column: str | None = None,
    label_column: str | None = None,
    channels: int = 3,
) -> ImageSet:
    """Labelled images of a split::

        images = open_images("digits", "train")
        images[0].shape, images.label(0), images.class_names      # (8, 8, 1), 0, ("0", "1", …)

    source: ``digits``, ``fashion-mnist``, ``hf:NAME`` or ``hf:NAME:SUBSET``, a .parquet file, or a folder with one of
        IDX files, CIFAR's binary files, .parquet files, train/CLASS/… and val/CLASS/…, or CLASS/… alone.
    held_out: share of each class that is for testing, where a source has no test split of its own; None: it is taken
        whole for either.
    channels: 3, or 1 to read encoded image files as grey; other sources have the channels they have.
    """
    if split not in SPLITS:
        raise DataError.not_allowed("split", split, ", ".join(SPLITS))
    name, path = str(source), named_path(source, "images")
    columns: dict[str, Any] = {"column": image_column, "label": label_column, "channels": channels}
    if name.startswith(HUB):
        return _open_hub(name.removeprefix(HUB), split, held_out, columns)
    if path.is_dir():
        return _open_folder(path, split, held_out, columns)
    if path.is_file():
        if path.suffix != ".parquet":
            raise DataError(f"images: {name!r} is a file; it takes a .parquet file or a folder")
        return _side(open_parquet([path], path.name, **columns), split, held_out)
    if name == DIGITS:
        return _side(digits(), split, 0.2)
    if name == FASHION_MNIST:
        folder = next((folder for folder in FASHION_FOLDERS if folder.is_dir()), None)
        if folder is None:
            raise DataError(
                f"images: {name!r} is not on this machine; install Debian's package dataset-fashion-mnist, "
                f"or name a folder that holds its IDX files"
            )
        return open_idx(folder, split, FASHION)
    raise DataError(
        f"images: {name!r} is neither a file nor a folder nor one of {DIGITS}, {FASHION_MNIST}; "
        f"a Hugging Face dataset is named {HUB}NAME"
    )


def _side(images: ImageSet, split: Split, held_out: float | None) -> ImageSet:
    return images if held_out is None else hold_out(images, split, held_out)


def _open_folder(path: Path, split: Split, held_out: float | None, columns: dict[str, Any]) -> ImageSet:
    if idx_file(path, "train", "images") is not None or idx_file(path, "test", "images") is not None:
        return open_idx(path, split, FASHION if path.resolve().name == FASHION_MNIST else None)
    if (found := find_cifar(path)) is not None:
        return CifarImages(*found, split)
    if any(path.glob("*.parquet")) or any(path.glob("data/*.parquet")):
        return _open_parquets(path, split, held_out, columns)
    channels = columns["channels"]
    training = split_folder(path, "train")
    if training is None:
        return _side(FolderImages(path, channels=channels), split, held_out)
    train = FolderImages(training, channels=channels)
    testing = split_folder(path, "test")
    if testing is None:
        return _side(train, split, held_out)
    return train if split == "train" else FolderImages(testing, class_names=train.class_names, channels=channels)


def _open_parquets(path: Path, split: Split, held_out: float | None, columns: dict[str, Any]) -> ImageSet:
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    parts = {
        side: [file for file in files if file.name.lower().startswith(starts)]
        for side, starts in PARQUET_SPLITS.items()
    }
    name = path.resolve().name
    if not parts["train"]:
        return _side(open_parquet(files, name, **columns), split, held_out)
    train = open_parquet(parts["train"], name, **columns)
    if not parts["test"]:
        return _side(train, split, held_out)
    if split == "train":
        return train
    return open_parquet(parts["test"], name, class_names=train.class_names, **columns)


def _open_hub(name: str, split: Split, held_out: float | None, columns: dict[str, Any]) -> ImageSet:
    train = open_dataset(name, "train", **columns)
    for own in ("test", "validation"):
        try:
            test = open_dataset(name, own, class_names=train.class_names, **columns)
        except DataError:
            continue
        return train if split == "train" else test
    return _side(train, split, held_out)


@functools.lru_cache(maxsize=1)
def digits() -> ArrayImages:
    """The 1797 handwritten digits of 8×8 pixels that come with scikit-learn; grey levels 0 to 16 become 0 to 255."""
    found = import_extra("sklearn.datasets", "the embedded set digits", "vision").load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
    return ArrayImages("digits", pixels, found.target.astype(np.int64), [str(digit) for digit in range(10)])
