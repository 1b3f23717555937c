"""Names to topologies, and the two ways to make one: from Python and from text."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from siamesenorm.errors import TopologyError, shown
from siamesenorm.residual.attention_residual import AttentionResidual
from siamesenorm.residual.base import StreamKind, Topology
from siamesenorm.residual.blend import Blend
from siamesenorm.residual.dual import ResidualDual
from siamesenorm.residual.earlier import Dense, EmbeddingBack
from siamesenorm.residual.gated_residual import GatedResidual
from siamesenorm.residual.hybrid import Hybrid, HybridStar
from siamesenorm.residual.hyper import Hyper
from siamesenorm.residual.independent import Independent, Widen
from siamesenorm.residual.manifold import Manifold, ManifoldLite
from siamesenorm.residual.needs import NeedsState
from siamesenorm.residual.norms import NormLike, Norms
from siamesenorm.residual.parallel import Parallel
from siamesenorm.residual.places import Blocks
from siamesenorm.residual.post import DeepNorm, Keel, Mix, Post
from siamesenorm.residual.pre import LayerScale, Peri, Pre, Reordered, ReZero, Sandwich, Scaled, SubLN
from siamesenorm.residual.siamese import Siamese
from siamesenorm.residual.span import BottomToTop, Span
from siamesenorm.residual.weighed import Beam, Muse, Zaya

TOPOLOGIES: dict[str, type[Topology]] = {
    topology.name: topology
    for topology in (
        Siamese,
        Pre,
        Post,
        Hybrid,
        HybridStar,
        Span,
        Hyper,
        Manifold,
        ManifoldLite,
        Independent,
        GatedResidual,
        AttentionResidual,
        ResidualDual,
        DeepNorm,
        Sandwich,
        Peri,
        Reordered,
        Parallel,
        Mix,
        Scaled,
        BottomToTop,
        Keel,
        LayerScale,
        ReZero,
        SubLN,
        Beam,
        Muse,
        Zaya,
        Widen,
        EmbeddingBack,
        Dense,
    )
}

TRANSITIONS: dict[str, type[Topology]] = {Blend.name: Blend}
"""Ways from one topology to another: made by grafts, compared with nothing."""


ENTRY_POINTS = "siamesenorm.topologies"
"""The group of entry points by which installed packages bring topologies of their own."""


def register(topology: type[Topology]) -> type[Topology]:
    """Make a topology of your own known by its name: to `Residual`, models, recipes, comparisons and commands.

    Decorate the class with it, or name the class in the entry points of your package, which makes it known in every
    process::

        [project.entry-points."siamesenorm.topologies"]
        mine = "my_package.mine:Mine"
    """
    if not isinstance(topology, type) or not issubclass(topology, Topology):
        raise TopologyError.not_allowed("register", topology, "a subclass of Topology")
    missing = [field for field in ("name", "about", "equation", "end", "kind") if not hasattr(topology, field)]
    if missing:
        raise TopologyError(
            f"register: {topology.__name__} has no {missing[0]}; it takes name, about, equation, end and kind"
        )
    name = topology.name
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise TopologyError.not_allowed("register: name =", name, "a-z, 0-9 and _, a letter first")
    known = {**TRANSITIONS, **TOPOLOGIES}.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (topology.__module__, topology.__qualname__):
        raise TopologyError(f"register: name = {shown(name)} is taken by {known.__module__}.{known.__qualname__}")
    TOPOLOGIES[name] = topology
    return topology


_waiting: list[EntryPoint] = []
"""Entry points of packages that were being imported themselves when they were looked at."""


def register_installed() -> None:
    """Register what installed packages name in their entry points; one that fails is left out, with a warning.

    A package that imports this one is half there at that moment: it waits until its name is asked for.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        being_imported = entry.module.partition(".")[0] in sys.modules
        try:
            register(entry.load())
        except Exception as error:
            if being_imported:
                _waiting.append(entry)
            else:
                _leave_out(entry, error)


def register_waiting() -> None:
    """Register what had to wait for its own package; once, and before anything is said of all topologies."""
    while _waiting:
        entry = _waiting.pop(0)
        try:
            register(entry.load())
        except Exception as error:
            _leave_out(entry, error)


def _leave_out(entry: EntryPoint, error: Exception) -> None:
    warnings.warn(f"topology {entry.name} of {entry.value} is left out: {error}", stacklevel=3)


def find_topology(name: str) -> type[Topology]:
    """The class of a name."""
    if isinstance(name, str) and name in TRANSITIONS:
        return TRANSITIONS[name]
    if not isinstance(name, str) or name not in TOPOLOGIES:
        register_waiting()
    if not isinstance(name, str) or name not in TOPOLOGIES:
        raise TopologyError.unknown_name("topology", name, TOPOLOGIES)
    return TOPOLOGIES[name]


def parse_topology(text: str) -> tuple[str, dict[str, str]]:
    """Name and options of ``name`` or ``name:option=value,option=value``."""
    name, colon, rest = text.partition(":") if isinstance(text, str) else (text, "", "")
    find_topology(name)
    options: dict[str, str] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise TopologyError(
                f"topology: {shown(item)} in {shown(text)} is not an option; write name:option=value,option=value"
            )
        if key.strip() in options:
            raise TopologyError(f"topology: option {shown(key.strip())} is given twice in {shown(text)}")
        options[key.strip()] = value.strip()
    return name, options


def Residual(
    topology: str,
    dim: int,
    blocks: Blocks,
    *,
    norm: NormLike | Norms = "rms",
    dropout: float = 0.0,
    drop_path: float | Sequence[float] = 0.0,
    fused: bool = True,
    needs: NeedsState = "check",
    base_blocks: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Topology:
    """A residual topology for a stack of sublayers.

    topology: a name, with options after a colon if you like: ``"siamese:depth_scaling=none"``.
    dim: width of the residual stream.
    blocks: number of (attention, ffn) blocks, or the sublayer kinds of every block.
    norm: ``"rms"``, ``"layer"``, a `NormSpec`, a function from width to module, or `Norms` by role.
    dropout, drop_path: on every sublayer's update, one draw for all streams; drop_path: or a rate for each block.
    fused: take fused steps in eager mode where the topology has them.
    needs: ``check`` warns at the first pass of norms and first weights inside sublayers that the topology wants and
        nobody took from it (`attention_norms`, `inner_norm`, `init_weights_`); ``met`` or ``waived`` say otherwise.
    base_blocks: blocks of the stack that this one is made after (CompleteP, arXiv 2505.01618): every update is
        multiplied by base_blocks / blocks, and laws of depth are read at that stack's same height; default: its own.
    options: the topology's own; ``siamesenorm topologies NAME`` lists them.
    """
    name, given = parse_topology(topology)
    both = set(given) & set(options)
    if both:
        raise TopologyError(f"{name}: option {shown(sorted(both)[0])} is given both in the text and as an argument")
    with torch.device(device) if device is not None else contextlib.nullcontext():
        made = find_topology(name)(
            dim,
            blocks,
            norm=norm,
            dropout=dropout,
            drop_path=drop_path,
            fused=fused,
            needs=needs,
            base_blocks=base_blocks,
            options={**given, **options},
        )
    return made if dtype is None else made.to(dtype)


def create_part(
    role: str, topology: str, kind: StreamKind, dim: int, blocks: Blocks, norm: Norms, base_blocks: int | None = None
) -> Topology:
    """One stream of a siamese pair: a single-stream topology of the given kind, without links of its own."""
    name, options = parse_topology(topology)
    found = find_topology(name)
    if found.kind != kind:
        register_waiting()
        allowed = ", ".join(name for name, other in TOPOLOGIES.items() if other.kind == kind)
        why = {
            "several": "has several streams itself",
            "mixed": "is Post-Norm in some blocks and Pre-Norm in others",
            "pre": "never normalises its stream",
            "post": "normalises its stream",
        }[found.kind]
        raise TopologyError(f"siamese: {role} = {shown(name)} is not allowed, because it {why}; {role} takes {allowed}")
    part = found(dim, blocks, norm=norm, part=True, base_blocks=base_blocks, options=options)
    if part.options.prores:
        raise TopologyError.refused(f"siamese: {role} =", topology, "prores belongs to the pair")
    return part
