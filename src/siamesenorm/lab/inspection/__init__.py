"""Inspecting a model: what its residual streams carry, who reads and writes them, and what can be left out.

from siamesenorm.lab import inspect
found = inspect(model, ids)
"""

from siamesenorm.errors import InspectionError
from siamesenorm.lab.inspection.coordinates import Coordinates, check_coordinates
from siamesenorm.lab.inspection.looking import inspect
from siamesenorm.lab.inspection.result import Inspection
from siamesenorm.lab.inspection.spikes import find_spikes, spikes_of_run

__all__ = [
    "Coordinates",
    "Inspection",
    "InspectionError",
    "check_coordinates",
    "find_spikes",
    "inspect",
    "spikes_of_run",
]
