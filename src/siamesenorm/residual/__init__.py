"""Residual topologies: how sublayer outputs flow back into a Transformer's residual stream. Needs torch only."""

from siamesenorm.errors import TopologyError, UnmetNeedsWarning
from siamesenorm.residual.base import InitRule, Link, SublayerNeeds, Topology
from siamesenorm.residual.flow import Flow, Gated
from siamesenorm.residual.needs import AttentionNorms
from siamesenorm.residual.norms import LayerNorm, Norms, NormSpec, RMSNorm
from siamesenorm.residual.places import Place, lay_out
from siamesenorm.residual.registry import (
    TOPOLOGIES,
    Residual,
    find_topology,
    parse_topology,
    register,
    register_installed,
)

__all__ = [
    "TOPOLOGIES",
    "AttentionNorms",
    "Flow",
    "Gated",
    "InitRule",
    "LayerNorm",
    "Link",
    "NormSpec",
    "Norms",
    "Place",
    "RMSNorm",
    "Residual",
    "SublayerNeeds",
    "Topology",
    "TopologyError",
    "UnmetNeedsWarning",
    "find_topology",
    "lay_out",
    "parse_topology",
    "register",
]

if __name__ == "siamesenorm.residual":  # source that lies beside exported weights has another name, and no plugins
    register_installed()
