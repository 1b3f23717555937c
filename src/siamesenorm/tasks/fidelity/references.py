"""Statistics files: what is compared against, computed once and shared.

Ours are safetensors that also name the network, the source and the number of images, and keep features for precision
and recall; an .npz holds mu, sigma, mu_s and sigma_s as ADM's reference files do, which are read as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save
from torch import Tensor

from siamesenorm.data.arrays import array_names, read_arrays
from siamesenorm.data.atomic import check_output, whole_file, write_whole
from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.statistics import Gaussian

FORMAT = "siamesenorm-fidelity-2"
"""Raised when a feature changes its meaning or place: spatial ones had their channels first in 1."""
SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True)
class Reference:
    """Features of a set of images, as far as comparisons need them."""

    pool: Gaussian
    spatial: Gaussian | None = None
    features: Tensor | None = None
    """(images, features): of some or all images, for precision and recall."""
    count: int | None = None
    """Images behind the statistics, where the file says so."""
    network: str | None = None
    """Fingerprint of the feature network, where the file says so."""
    source: str | None = None
    """Fingerprint of the images, where the file says so."""


class _Facts(BaseModel):
    """What the header of a statistics file says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    count: Annotated[int, Field(ge=0)] | None
    network: str | None
    source: str | None


def check_target(path: Path, option: str = "--save-stats") -> None:
    """Raise unless statistics can be written there."""
    if path.suffix not in SUFFIXES or path.is_dir() or not path.absolute().parent.is_dir():
        raise DataError.not_allowed(
            option, str(path), f"a file that ends in {' or '.join(SUFFIXES)} in a folder that is there"
        )
    check_output(path, option)


def write_reference(path: Path, reference: Reference) -> None:
    """Write statistics, whole or not at all, in the form that the file's ending names."""
    check_target(path, "statistics")
    if path.suffix == ".npz":
        arrays = {"mu": reference.pool.mean.numpy(), "sigma": reference.pool.covariance.numpy()}
        if reference.spatial is not None:
            arrays |= {"mu_s": reference.spatial.mean.numpy(), "sigma_s": reference.spatial.covariance.numpy()}
        with whole_file(path) as file:
            np.savez(file, allow_pickle=False, **arrays)
        return
    tensors = {"mean": reference.pool.mean, "covariance": reference.pool.covariance}
    if reference.spatial is not None:
        tensors |= {"spatial_mean": reference.spatial.mean, "spatial_covariance": reference.spatial.covariance}
    if reference.features is not None:
        tensors["features"] = reference.features
    facts = {"count": reference.count, "network": reference.network, "source": reference.source}
    content = save(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        metadata={"format": FORMAT, "facts": json.dumps(facts)},
    )
    write_whole(path, content)


def holds_statistics(path: Path) -> bool:
    """Whether a file is one of statistics rather than of pictures."""
    if path.suffix == ".safetensors":
        return path.is_file()
    return path.suffix == ".npz" and path.is_file() and "mu" in array_names(path)


def read_reference(path: str | Path) -> Reference:
    """The statistics of a file; no pickle is opened."""
    file = Path(path)
    found = _read_npz(file) if file.suffix == ".npz" else _read_safetensors(file)
    for gaussian in (found.pool, found.spatial):
        if gaussian is not None:
            _check(file, gaussian)
    size = found.pool.mean.numel()
    if found.features is not None and (found.features.dim() != 2 or found.features.shape[1] != size):
        raise DataError(f"statistics: the features of {str(path)!r} have the shape {tuple(found.features.shape)}")
    return found


def _read_npz(path: Path) -> Reference:
    read = read_arrays(path, ("mu", "sigma", "mu_s", "sigma_s"), "statistics")
    tensors = {name: torch.from_numpy(array) for name, array in read.items()}
    return Reference(_pair(path, tensors, "mu", "sigma"), _pair(path, tensors, "mu_s", "sigma_s", optional=True))


def _read_safetensors(path: Path) -> Reference:
    tensors, header = read_tensors(path, "statistics")
    if header.get("format") != FORMAT:
        raise DataError(f"statistics: {str(path)!r} was not written by --save-stats, or by that of another version")
    spatial = _pair(path, tensors, "spatial_mean", "spatial_covariance", optional=True)
    try:
        facts = _Facts.model_validate_json(header.get("facts", ""))
    except ValidationError:
        raise DataError(f"statistics: the header of {str(path)!r} is damaged; --save-stats writes it anew") from None
    return Reference(_pair(path, tensors, "mean", "covariance"), spatial, tensors.get("features"), **facts.model_dump())


def _pair(path: Path, tensors: dict[str, Tensor], mean: str, covariance: str, optional: bool = False) -> Any:
    """A Gaussian of two tensors; nothing where there may be none."""
    if optional and mean not in tensors:
        return None
    if mean not in tensors or covariance not in tensors:
        raise DataError(
            f"statistics: {str(path)!r} has no {mean} and {covariance}; it takes a file of --save-stats, "
            "or an .npz with mu and sigma"
        )
    return Gaussian(tensors[mean].double(), tensors[covariance].double())


def _check(path: Path, gaussian: Gaussian) -> None:
    size = gaussian.mean.numel()
    if not size or gaussian.mean.shape != (size,) or gaussian.covariance.shape != (size, size):
        shapes = f"{tuple(gaussian.mean.shape)} and {tuple(gaussian.covariance.shape)}"
        raise DataError(f"statistics: mean and covariance of {str(path)!r} have the shapes {shapes}")
    if not all(tensor.isfinite().all() for tensor in gaussian):
        raise DataError(f"statistics: {str(path)!r} holds numbers that are not finite")
