"""``index.json`` of a latent folder: what its shards hold, checked when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from siamesenorm.data.index import INDEX, PROGRESS, FileName, Hash, IndexedFile, IndexPart
from siamesenorm.data.reading import MissingError, named_path, read_json, read_model
from siamesenorm.errors import DataError

FORMAT = "siamesenorm-latents"
Positive = Annotated[int, Field(ge=1, lt=2**62)]


class LatentShard(IndexPart):
    """Moments of some images, (images, views, 2 · channels, height, width), and their labels: two .npy files."""

    file: FileName
    images: Positive
    sha256: Hash
    labels: FileName
    labels_sha256: Hash


class LatentIndex(IndexPart):
    """Everything about a folder of latents."""

    format: Literal["siamesenorm-latents"] = "siamesenorm-latents"
    version: Literal[1] = 1
    plan: Hash
    dtype: Literal["float32", "float16"]
    channels: Positive
    size: Positive
    """Height and width of a latent."""
    image_size: Positive
    views: Annotated[int, Field(ge=1, le=2)]
    """2: every image and its mirror image."""
    scale: float
    shift: float
    """A model sees ``(latent - shift) · scale``."""
    autoencoder: Hash
    """Fingerprint of the weights that made them."""
    source: str
    class_names: list[str]
    splits: dict[Literal["train", "test"], list[LatentShard]]

    def files(self) -> Iterator[IndexedFile]:
        """Every file beside the index."""
        for shards in self.splits.values():
            for shard in shards:
                yield IndexedFile(shard.file, shard.sha256)
                yield IndexedFile(shard.labels, shard.labels_sha256)


def is_latents(folder: str | Path) -> bool:
    """Whether a folder holds latents, whole or not."""
    path = named_path(folder, "latents")
    try:
        return read_json(path / INDEX, "latents").get("format") == FORMAT
    except (DataError, AttributeError):
        return (path / PROGRESS / f"{FORMAT}.json").is_file()


def read_latent_index(folder: str | Path) -> LatentIndex:
    """The index of a folder of latents."""
    path = Path(folder) / INDEX
    try:
        return read_model(path, LatentIndex, "latents")
    except MissingError:
        if (path.parent / PROGRESS).is_dir():
            raise DataError(f"latents: {str(folder)!r} is unfinished; encode the same images again to go on") from None
        raise DataError(f"latents: {str(folder)!r} is not a folder of latents; it has no {INDEX}") from None
