"""The weights of FID's Inception from a file that the user has; nothing is downloaded, nothing in it is run.

network = load_inception("pt_inception-2015-12-05-6726825d.pth")
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.features import FeatureNetwork
from siamesenorm.tasks.fidelity.inception import FIDInception

FILE = "pt_inception-2015-12-05-6726825d.pth"
WHERE = f"{FILE} of the releases of github.com/mseitzer/pytorch-fid, or the same as safetensors"


def load_inception(path: str | Path, device: str | torch.device = "cpu") -> FeatureNetwork:
    """FID's network with the weights of a file."""
    weights = _read(Path(path))
    with torch.device("meta"):
        module = FIDInception()
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name in wanted:
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, torch.tensor(0))
    wrong = [name for name, shape in wanted.items() if name not in weights or tuple(weights[name].shape) != shape]
    wrong += sorted(weights.keys() - wanted.keys())
    if wrong:
        raise DataError(
            f"weights: {str(path)!r} does not hold FID's Inception, see {', '.join(wrong[:3])}"
            f"{' and others' if len(wrong) > 3 else ''}; it takes {WHERE}"
        )
    module.load_state_dict(weights, assign=True)
    return FeatureNetwork("inception", module.float(), device=device)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"weights: {str(path)!r} is not a file; it takes {WHERE}")
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path, "weights")[0]
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle of anything: damaged, it fails in many ways
        raise DataError(f"weights: {str(path)!r} cannot be read ({type(error).__name__}); it takes {WHERE}") from None
    pairs = found.items() if isinstance(found, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
        raise DataError(f"weights: {str(path)!r} holds something other than named tensors; it takes {WHERE}")
    return dict(found)
