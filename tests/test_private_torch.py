"""What the package uses of torch's private parts: the one list of it, and for each the behaviour that is relied on."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import siamesenorm

SOURCE = Path(siamesenorm.__file__).parent


def transforms_are_seen(active):
    seen = []
    torch.func.grad(lambda x: seen.append(active()) or x)(torch.ones(()))
    return not active() and seen == [True]


def under_vmap(look):
    seen = []
    torch.func.vmap(lambda x: seen.append(look(x)) or x)(torch.ones(2))
    return seen


def changes_in_place(operation, expected, *arguments):
    tensor = torch.tensor([1.0, 3.0])
    operation([tensor], *arguments)
    return tensor.tolist() == expected


def makes_shapes_alone(mode):
    with mode:
        made = torch.ones(2, 3)
    return type(made).__name__ == "FakeTensor" and made.shape == (2, 3) and made.untyped_storage().nbytes() == 24


def sees_operators(mode):
    seen = []

    class Note(mode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(operator)
            return operator(*args, **(kwargs or {}))

    with Note():
        torch.ones(1) + 1
    return torch.ops.aten.add.Tensor in seen


def refuses_unknown(resolve):
    """A name of no group is no group."""
    with pytest.raises(RuntimeError):
        resolve("no such group")
    return True


TREE = {"a": (torch.zeros(()), torch.ones(())), "b": [2]}
PYTREE = "torch.utils._pytree"

PRIVATE = {
    "torch._C._are_functorch_transforms_active": transforms_are_seen,
    "torch._C._functorch.is_functorch_wrapped_tensor": lambda f: not f(torch.ones(1)) and under_vmap(f) == [True],
    "torch._C._functorch.is_batchedtensor": lambda f: not f(torch.ones(1)) and under_vmap(f) == [True],
    "torch._C._functorch.is_legacy_batchedtensor": lambda f: not f(torch.ones(1)),
    "torch._C._functorch.get_unwrapped": lambda f: under_vmap(lambda x: f(x).shape) == [(2,)],
    "torch._subclasses.fake_tensor.FakeTensor": lambda found: issubclass(found, torch.Tensor),
    "torch._subclasses.fake_tensor.FakeTensorMode": lambda mode: makes_shapes_alone(mode()),
    "torch.ops.aten._local_scalar_dense.default": lambda read: read(torch.tensor(2.0)) == 2.0,
    "torch.ops.aten._to_copy.default": lambda cast: cast(torch.ones(1), dtype=torch.bfloat16).dtype is torch.bfloat16,
    "torch.distributed.distributed_c10d._resolve_process_group": refuses_unknown,
    **{
        f"torch.ops.aten._scaled_dot_product_{name}.default": lambda found: found._schema.arguments[0].name == "query"
        for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    },
    "torch.utils._python_dispatch.TorchDispatchMode": sees_operators,
    "torch.autograd.forward_ad._current_level": lambda level: level == -1,
    "torch.jit._trace.is_tracing": lambda f: f is torch.jit.is_tracing and not f(),
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode": lambda f: not f(),
    **{
        f"torch._C._distributed_c10d.{name}": lambda found: found is getattr(torch.distributed, found.__name__)
        for name in ("PrefixStore", "Store", "TCPStore")
    },
    "torch._dynamo.config": lambda found: found.recompile_limit > 0,
    "torch._foreach_lerp_": lambda f: changes_in_place(f, [2.0, 3.0], [torch.tensor([3.0, 3.0])], 0.5),
    "torch._foreach_norm": lambda f: f([torch.tensor([3.0, 4.0])])[0].item() == 5.0,
    "torch._foreach_mul_": lambda f: changes_in_place(f, [2.0, 6.0], torch.tensor(2.0)),
    "torch.distributed.checkpoint.filesystem._StorageInfo": lambda made: (
        (made("f", 1, 2).relative_path, made("f", 1, 2).offset, made("f", 1, 2).length) == ("f", 1, 2)
    ),
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": lambda f: (
        list(inspect.signature(f).parameters)[:3] == ["global_shape", "mesh", "placements"]
    ),
    f"{PYTREE}.tree_flatten": lambda f: len(f(TREE)[0]) == 3,
    f"{PYTREE}.tree_leaves": lambda f: len(f(TREE)) == 3,
    f"{PYTREE}.tree_unflatten": lambda f: f(*torch.utils._pytree.tree_flatten(TREE)) == TREE,
    f"{PYTREE}.tree_map": lambda f: f(lambda t: t, {"a": (1, [2])}) == {"a": (1, [2])},
    f"{PYTREE}.tree_map_only": lambda f: f(torch.Tensor, lambda t: t.item(), TREE) == {"a": (0.0, 1.0), "b": [2]},
}
"""Names, and whether what is found under them does what the code relies on."""


def private_names(source):
    """Dotted names of a module's code that go through a part of torch whose name begins with an underscore."""
    tree, known, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [a for a in node.names if a.name.partition(".")[0] == "torch"]
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue  # part of a longer name
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in known:
            found.add(".".join([known[node.id], *reversed(parts)]))
    return {name for name in found if any(p.startswith("_") and not p.startswith("__") for p in name.split("."))}


def test_the_list_is_what_the_package_uses():
    used = {name: path for path in SOURCE.rglob("*.py") for name in private_names(path.read_text())}
    assert {name: str(used[name]) for name in used.keys() - PRIVATE.keys()} == {}, "give them a row in PRIVATE"
    assert PRIVATE.keys() - used.keys() == set(), "nothing uses these any more"


@pytest.mark.parametrize("name", PRIVATE)
def test_torch_still_does_what_is_relied_on(name):
    found, parts = torch, name.split(".")[1:]
    for index, part in enumerate(parts):
        if not hasattr(found, part):
            importlib.import_module(".".join(["torch", *parts[: index + 1]]))
        found = getattr(found, part)
    assert PRIVATE[name](found)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._one(torch.two)", {"torch._C._one"}),
        ("from torch._C import one\none(3)", {"torch._C.one"}),
        ("from torch.utils import _trees as trees\ntrees.walk(1)", {"torch.utils._trees.walk"}),
        ("from torch.autograd import forward_ad\nforward_ad._level", {"torch.autograd.forward_ad._level"}),
        ("import torch.nn as nn\nnn._private", {"torch.nn._private"}),
        ("import torch\nself._own(torch.__version__)", set()),
    ],
)
def test_private_names_are_found_however_they_are_imported(source, names):
    assert private_names(source) == names
