"""``encode_images``: labelled images to a folder of latents, resumable, the same bytes whatever interrupts it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from siamesenorm.data.atomic import locked_folder, sha256_matches, sha256_of, whole_file, write_json
from siamesenorm.data.images.imageset import ImageSet, Pixels
from siamesenorm.data.images.transforms import CentreCrop, Scale
from siamesenorm.data.index import INDEX, PROGRESS, damaged_files, write_index
from siamesenorm.data.latents.index import FORMAT, LatentIndex, LatentShard, read_latent_index
from siamesenorm.data.listing import names_in
from siamesenorm.data.reading import read_json, read_object
from siamesenorm.data.removal import NotOurs, hidden_names, remove_entries, remove_file, remove_tree
from siamesenorm.data.resume import REPLACEMENT, check_replaceable, refuse_foreign, take_place
from siamesenorm.data.workers import ProgressCallback
from siamesenorm.errors import DataError

SHARD_IMAGES = 4096
NAMES = r"(?:train|test)-\d{5,}(?:-labels)?\.npy|index\.json"
RECORD_NAMES = rf"(?:train|test)-\d{{5,}}\.json|{FORMAT}\.json"
RECORDS = re.compile(rf"{RECORD_NAMES}|{hidden_names(RECORD_NAMES)}")
MADE = re.compile(rf"{NAMES}|{hidden_names(NAMES)}|\.progress(?:/(?:{RECORDS.pattern}))?")
"""What an encoding writes: records of finished shards, and all in its folder."""
DType = Literal["float32", "float16"]
DTYPES: dict[str, DType] = {"float32": "float32", "float16": "float16"}
Splits = dict[Literal["train", "test"], ImageSet]


class Encoder(Protocol):
    """What turns images into distributions of latents."""

    fingerprint: str
    channels: int
    """Of the images."""
    latent_channels: int
    downscale: int
    """Pixels of an image in a row of its latent's."""
    scale: float
    shift: float

    def encode(self, images: Pixels) -> NDArray[np.float32]:
        """(images, 2 · latent channels, height, width): means, then deviations."""


def encode_images(
    splits: Splits,
    encoder: Encoder,
    out: Path,
    *,
    size: int,
    flip: bool = False,
    dtype: DType = "float32",
    batch: int = 16,
    shard_images: int = SHARD_IMAGES,
    overwrite: bool = False,
    progress: ProgressCallback = lambda images: None,
) -> LatentIndex:
    """Encode every image, fitted to size × size, and its mirror image if asked; progress counts finished images.

    Run again after an interruption, it goes on: finished shards are kept where their checksums match. Batches begin
    anew with every shard, so that no number depends on where a run began.
    """
    if size % encoder.downscale:
        raise DataError.refused("size", size, f"this autoencoder takes a multiple of {encoder.downscale}")
    plan = _plan(splits, encoder, (size, flip, dtype, batch, shard_images))
    out.mkdir(parents=True, exist_ok=True)
    refuse_foreign(out, FORMAT, RECORDS)
    with locked_folder(out):
        place = _place(out, plan, overwrite)
        _begin(place, plan)
        shards: dict[Literal["train", "test"], list[LatentShard]] = {}
        for split, images in splits.items():
            shards[split] = []
            for number, start in enumerate(range(0, len(images), shard_images)):
                numbers = range(start, min(start + shard_images, len(images)))
                name = f"{split}-{number:05d}"
                shard = _kept(place, name)
                if shard is None:
                    shard = _encode_shard(place, name, images, numbers, encoder, size, flip, dtype, batch, progress)
                else:
                    progress(len(numbers))
                shards[split].append(shard)
        first = next(iter(splits.values()))
        index = LatentIndex(
            plan=plan,
            dtype=dtype,
            channels=encoder.latent_channels,
            size=size // encoder.downscale,
            image_size=size,
            views=2 if flip else 1,
            scale=encoder.scale,
            shift=encoder.shift,
            autoencoder=encoder.fingerprint,
            source=first.name,
            class_names=list(first.class_names),
            splits=shards,
        )
        write_index(place, index)
        with contextlib.suppress(NotOurs):
            remove_tree(place / PROGRESS, RECORDS)
        if place != out:
            take_place(place, out, MADE)
    return index


def _plan(splits: Splits, encoder: Encoder, settings: tuple[Any, ...]) -> str:
    images = {split: images.fingerprint for split, images in splits.items()}
    return hashlib.sha256(json.dumps([images, encoder.fingerprint, encoder.scale, settings]).encode()).hexdigest()


def _place(out: Path, plan: str, overwrite: bool) -> Path:
    """Where to write: the folder itself, or one in it where other latents are, which stay until these are whole."""
    remove_entries(out, re.compile(hidden_names(NAMES)))
    if not _plans(out) - {plan}:
        return out
    if not overwrite:
        raise DataError(
            f"out: {str(out)!r} holds other work (other images, weights or settings); "
            "name another folder, or set overwrite"
        )
    check_replaceable(out, MADE)
    place = out / REPLACEMENT if (out / INDEX).exists() else out
    place.mkdir(exist_ok=True)
    if _plans(place) - {plan}:
        _clear(place)
    return place


def _plans(folder: Path) -> set[str | None]:
    records = [folder / PROGRESS / name for name in names_in(folder / PROGRESS) if name.endswith(".json")]
    return {_plan_of(path) for path in (*records, folder / INDEX) if path.exists()}


def _begin(place: Path, plan: str) -> None:
    """Make ready for a plan; the shards of a whole folder of it are as good as those of an unfinished one."""
    records = place / PROGRESS
    records.mkdir(exist_ok=True)
    write_json(records / f"{FORMAT}.json", {"plan": plan})
    if (place / INDEX).exists():
        index = read_latent_index(place)
        for shard in (shard for shards in index.splits.values() for shard in shards):
            write_json(records / f"{Path(shard.file).stem}.json", {"plan": plan, "shard": shard.model_dump()})
        if damaged_files(place, list(index.files())):
            remove_file(place / INDEX)  # a damaged shard is made again, and until then the folder is not whole


def _clear(place: Path) -> None:
    """Remove other work, the index first: what is left at any moment is never taken for a whole folder."""
    (place / PROGRESS).mkdir(exist_ok=True)
    remove_file(place / INDEX)
    remove_entries(place, MADE)
    remove_tree(place / PROGRESS, RECORDS)


def _plan_of(path: Path) -> str | None:
    try:
        found = read_object(path, "out").get("plan")
    except DataError:
        return None
    return found if isinstance(found, str) else None


def _kept(out: Path, name: str) -> LatentShard | None:
    """An earlier run's shard, if it is whole."""
    try:
        record = read_object(out / PROGRESS / f"{name}.json", "out")
        shard = LatentShard.model_validate(record.get("shard"))
    except (DataError, ValidationError):
        return None
    sound = sha256_matches(out / shard.file, shard.sha256) and sha256_matches(out / shard.labels, shard.labels_sha256)
    return shard if sound else None


def _encode_shard(
    out: Path,
    name: str,
    images: ImageSet,
    numbers: range,
    encoder: Encoder,
    size: int,
    flip: bool,
    dtype: str,
    batch: int,
    progress: ProgressCallback,
) -> LatentShard:
    fit = CentreCrop((size, size), encoder.channels, Scale((0.5,), (0.5,)))
    parts = []
    for start in range(numbers.start, numbers.stop, batch):
        pixels = np.stack([fit.fitted(images[n]) for n in range(start, min(start + batch, numbers.stop))])
        views = [encoder.encode(pixels)] + ([encoder.encode(pixels[:, :, ::-1])] if flip else [])
        parts.append(np.stack(views, axis=1).astype(dtype))
        progress(len(pixels))
    files = {f"{name}.npy": np.concatenate(parts), f"{name}-labels.npy": images.labels[numbers.start : numbers.stop]}
    for file_name, array in files.items():
        with whole_file(out / file_name) as file:
            np.save(file, array, allow_pickle=False)
    latents, labels = files
    shard = LatentShard(
        file=latents,
        images=len(numbers),
        sha256=sha256_of(out / latents),
        labels=labels,
        labels_sha256=sha256_of(out / labels),
    )
    record = read_json(out / PROGRESS / f"{FORMAT}.json", "out")
    write_json(out / PROGRESS / f"{name}.json", {**record, "shard": shard.model_dump()})
    return shard
