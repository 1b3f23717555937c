"""First weights of sharded parameters are those of the unsharded model, bit for bit, whatever is called when."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models.families import FAMILIES
from train.worlds import run_world

TOPOLOGIES = ("siamese", "mhc", "hyper")


def sharded(family, topology, how):
    """A model on meta in parts of two processes."""
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = FAMILIES[family].make(topology)
    for block in model.blocks:
        if how == "tensor":
            parallelize_module(block.ffn, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    return model if how == "tensor" else fully_shard(model, mesh=mesh)


def fills(world):
    """What differs from the model of one process, and what was refused, of everything in the table."""
    problems, said, count = [], [], 0
    for family in FAMILIES:
        for topology in TOPOLOGIES if family == "lm" else TOPOLOGIES[:1]:
            expected = dict(FAMILIES[family].make(topology).named_parameters())
            for how in ("tensor", "shards"):
                if how == "tensor" and not hasattr(FAMILIES[family].make(topology).blocks[0].ffn, "up"):
                    continue
                model = sharded(family, topology, how)
                if not said:
                    with pytest.raises(ValueError, match="the model is on meta") as refusal:
                        model.init_weights(0)
                    said.append(str(refusal.value))
                model.to_empty(device="cpu")
                for parameter in model.parameters():
                    torch.nn.init.constant_(parameter, float("nan"))
                model.init_weights(0)
                count += any(isinstance(parameter, DTensor) for parameter in model.parameters())
                if how == "shards":  # a pass leaves gathered copies behind, which must not be filled in their place
                    FAMILIES[family].loss(model, torch.float32)
                    model.init_weights(0)
                for name, parameter in model.named_parameters():
                    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                    if not torch.equal(whole, expected[name]):
                        problems.append((family, topology, how, name))
    with pytest.raises(ValueError, match="seed = None is not allowed for sharded parameters"):
        model.init_weights()
    return problems, count


def test_sharded_parameters_start_as_unsharded_ones():
    for problems, count in run_world(2, fills):
        assert problems == []
        assert count > len(FAMILIES)
