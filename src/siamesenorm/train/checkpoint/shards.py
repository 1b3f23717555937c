"""The files of `torch.distributed.checkpoint`, with their index as JSON.

DCP's own file writer pickles the index (``.metadata``), and unpickling a file can run code. Here the index is
``index.json``, tensors are read with ``weights_only=True``, and nothing but tensors is stored, so that reading a
checkpoint executes nothing.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from siamesenorm.data.atomic import write_whole
from siamesenorm.data.reading import read_object
from siamesenorm.train.checkpoint.manifest import CheckpointError

INDEX = "index.json"


class ShardWriter(FileSystemWriter):
    """One file for each process, brought to the disk, and ``index.json``."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; DCP calls this on the main process when every shard is written."""
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{name}: only tensors can be stored in shards")
            chunks = [_chunk_entry(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in stored.chunks]
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
        write_whole(Path(self.path) / INDEX, json.dumps({"tensors": tensors}))


class ShardReader(FileSystemReader):
    """Reads what `ShardWriter` wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, as DCP's planner wants it; it is read once."""
        return self.metadata

    @cached_property
    def metadata(self) -> Metadata:
        """The index."""
        folder = Path(self.path)
        stored: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        try:
            for name, entry in read_object(folder / INDEX, "checkpoint")["tensors"].items():
                chunks = [
                    ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]
                ]
                properties = TensorProperties(dtype=_dtype(entry["dtype"]))
                stored[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
                for chunk in entry["chunks"]:
                    place = _StorageInfo(Path(chunk["file"]).name, int(chunk["start"]), int(chunk["length"]))
                    places[MetadataIndex(name, chunk["offsets"])] = place
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"{folder / INDEX}: this is not an index of shards ({error})") from None
        return Metadata(stored, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))


def read_sizes(folder: Path) -> dict[str, torch.Size]:
    """Names and sizes of the tensors that a folder of shards holds."""
    return {name: stored.size for name, stored in ShardReader(folder).read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]


def _chunk_entry(chunk: ChunkStorageMetadata, place: _StorageInfo) -> dict[str, Any]:
    where = {"file": place.relative_path, "start": place.offset, "length": place.length}
    return {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
