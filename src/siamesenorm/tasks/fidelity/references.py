"""Statistics files: what is compared against, computed once and shared.

Ours are safetensors that also name the network, the source and the number of images, and keep features for precision
and recall; an .npz holds mu, sigma, mu_s and sigma_s as ADM's reference files do, which are read as well.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from siamesenorm.data.atomic import check_output, whole_file
from siamesenorm.data.errors import DataError
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


def check_target(path: Path, option: str = "--save-stats") -> None:
    """Raise unless statistics can be written there."""
    if path.suffix not in SUFFIXES or path.is_dir() or not path.absolute().parent.is_dir():
        raise DataError(
            f"{option}: {str(path)!r} is not allowed; it takes a file that ends in {' or '.join(SUFFIXES)} "
            "in a folder that is there"
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
    with whole_file(path) as file:
        file.write(content)


def holds_statistics(path: Path) -> bool:
    """Whether a file is one of statistics rather than of pictures."""
    if path.suffix == ".safetensors":
        return path.is_file()
    if path.suffix != ".npz" or not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return "mu.npy" in archive.namelist()
    except zipfile.BadZipFile:
        return False


def read_reference(path: str | Path) -> Reference:
    """The statistics of a file; no pickle is opened."""
    file = Path(path)
    try:
        found = _read_npz(file) if file.suffix == ".npz" else _read_safetensors(file)
    except (OSError, SafetensorError, zipfile.BadZipFile, KeyError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"statistics: {str(path)!r} cannot be read ({type(error).__name__}); it takes a file of --save-stats, "
            "or an .npz with mu and sigma"
        ) from None
    for gaussian in (found.pool, found.spatial):
        if gaussian is not None:
            _check(file, gaussian)
    return found


def _read_npz(path: Path) -> Reference:
    with np.load(path, allow_pickle=False) as file:
        read = {name: torch.from_numpy(file[name]).double() for name in file.files if name.startswith(("mu", "sigma"))}
    spatial = Gaussian(read["mu_s"], read["sigma_s"]) if "mu_s" in read else None
    return Reference(Gaussian(read["mu"], read["sigma"]), spatial)


def _read_safetensors(path: Path) -> Reference:
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        if facts.get("format") != FORMAT:
            raise DataError(f"statistics: {str(path)!r} was not written by --save-stats, or by that of another version")
        names = set(file.keys())
        spatial = None
        if "spatial_mean" in names:
            spatial = Gaussian(file.get_tensor("spatial_mean"), file.get_tensor("spatial_covariance"))
        features = file.get_tensor("features") if "features" in names else None
        pool = Gaussian(file.get_tensor("mean"), file.get_tensor("covariance"))
        return Reference(pool, spatial, features, **json.loads(facts["facts"]))


def _check(path: Path, gaussian: Gaussian) -> None:
    size = gaussian.mean.numel()
    if gaussian.mean.shape != (size,) or gaussian.covariance.shape != (size, size):
        shapes = f"{tuple(gaussian.mean.shape)} and {tuple(gaussian.covariance.shape)}"
        raise DataError(f"statistics: mean and covariance of {str(path)!r} have the shapes {shapes}")
    if not (gaussian.mean.isfinite().all() and gaussian.covariance.isfinite().all()):
        raise DataError(f"statistics: {str(path)!r} holds numbers that are not finite")
