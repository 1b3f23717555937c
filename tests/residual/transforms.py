"""Every way of torch to a derivative: each gives gradient and Hessian (or None) of a function of a few numbers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

Function = Callable[[Tensor], Tensor]
Derivatives = tuple[Tensor | None, Tensor | None]


def by_autograd(f: Function, t: Tensor) -> Derivatives:
    """`torch.autograd.grad`, and again."""
    t = t.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(t), t, create_graph=True)
    rows = [torch.autograd.grad(part, t, retain_graph=True)[0] for part in first]
    return first.detach(), torch.stack(rows)


def by_vjp(f: Function, t: Tensor) -> Derivatives:
    """Each row of the Hessian by the vector-Jacobian product of a vector-Jacobian product."""

    def first(t: Tensor) -> Tensor:
        out, back = vjp(f, t)
        return back(torch.ones_like(out))[0]

    units = torch.eye(len(t), dtype=t.dtype)
    return first(t), torch.stack([vjp(first, t)[1](unit)[0] for unit in units])


def by_jvp(f: Function, t: Tensor) -> Derivatives:
    """Forward mode; `jacfwd` below is forward over forward."""
    return torch.stack([jvp(f, (t,), (unit,))[1] for unit in torch.eye(len(t), dtype=t.dtype)]), None


def by_duals(f: Function, t: Tensor) -> Derivatives:
    """`forward_ad` by hand; torch refuses backward over it for softmax and others."""
    first = []
    for unit in torch.eye(len(t), dtype=t.dtype):
        with forward_ad.dual_level():
            first.append(forward_ad.unpack_dual(f(forward_ad.make_dual(t, unit))).tangent)
    return torch.stack(first), None


def by_duals_without_grad(f: Function, t: Tensor) -> Derivatives:
    """The same under `no_grad`, where decoding's kernels would run."""
    with torch.no_grad():
        return by_duals(f, t)


def by_mapped_backward(f: Function, t: Tensor) -> Derivatives:
    """`jacobian` and `hessian` that map one backward pass over all outputs."""
    doubled = jacobian(lambda t: torch.stack([f(t), 2 * f(t)]), t, vectorize=True)
    assert torch.allclose(2 * doubled[0], doubled[1])
    return doubled[0], hessian(f, t, vectorize=True)


def by_mapped_gradients(f: Function, t: Tensor) -> Derivatives:
    """Per-sample gradients: `vmap` of `grad`."""
    values = vmap(f)(torch.stack([t + 0.1, t]))
    assert torch.allclose(values, torch.stack([f(t + 0.1), f(t)]), rtol=1e-3, atol=1e-4)
    return vmap(grad(f))(torch.stack([t + 0.1, t]))[1], None


TRANSFORMS: dict[str, Callable[[Function, Tensor], Derivatives]] = {
    "autograd twice": by_autograd,
    "grad": lambda f, t: (grad(f)(t), jacrev(grad(f))(t)),
    "vjp": by_vjp,
    "jvp": by_jvp,
    "jacrev": lambda f, t: (jacrev(f)(t), jacrev(jacrev(f))(t)),
    "jacfwd": lambda f, t: (jacfwd(f)(t), jacfwd(jacfwd(f))(t)),
    "hessian": lambda f, t: (None, torch.func.hessian(f)(t)),
    "jacobian(vectorize)": by_mapped_backward,
    "jacobian(forward-mode)": lambda f, t: (jacobian(f, t, vectorize=True, strategy="forward-mode"), None),
    "forward_ad": by_duals,
    "forward_ad under no_grad": by_duals_without_grad,
    "vmap": by_mapped_gradients,
}


def by_differences(f: Function, t: Tensor, h: float = 5e-4) -> tuple[Tensor, Tensor]:
    """Finite differences of fourth order of a function of two numbers, to which every transform is held."""
    with torch.no_grad():
        middle = f(t)

        def along(way: Sequence[float]) -> tuple[Tensor, Tensor]:
            step = h * torch.tensor(way, dtype=t.dtype)
            a, b, c, d = (f(t + k * step) for k in (-2, -1, 1, 2))
            return (a - 8 * b + 8 * c - d) / (12 * h), (-a + 16 * b - 30 * middle + 16 * c - d) / (12 * h * h)

        (x, xx), (y, yy), (_, both) = along((1, 0)), along((0, 1)), along((1, 1))
        mixed = (both - xx - yy) / 2
    return torch.stack([x, y]), torch.stack([torch.stack([xx, mixed]), torch.stack([mixed, yy])])


def along_directions(module: torch.nn.Module, run: Callable[[], Tensor], seed: int = 3, number: int = 2) -> Function:
    """The scalar that `run` makes of a module, as a function of steps along random directions of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    ways = {
        name: 0.2 * torch.randn(number, *p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in start.items()
    }
    holder = _Holder(module, run)

    def f(t: Tensor) -> Tensor:
        moved = {f"module.{name}": p + torch.einsum("n,n...->...", t, ways[name]) for name, p in start.items()}
        return torch.func.functional_call(holder, moved, ())

    return f


class _Holder(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, run: Callable[[], Tensor]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self) -> Tensor:
        return self.run()


def assert_agree(name: str, got: Derivatives, expected: Derivatives, tolerance: float) -> None:
    """Gradient and Hessian, each relative to its largest entry."""
    for mine, theirs in zip(got, expected, strict=True):
        if mine is not None:
            error = (mine.double() - theirs).abs().max() / theirs.abs().max()
            assert error < tolerance, f"{name}: {mine} instead of {theirs}"
