"""What an operation saves for backward, recomputed there instead of kept.

A sublayer's first projection saves its input h for the weight gradient. A fused step can make h again from what
it has saved anyway, so `remembering` swaps h for a recipe while the sublayer runs; attention does the same with
heads that it has normed. Everything else that is saved passes through untouched, also to hooks that stand outside
(checkpointing, offloading, counting).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.norms import runs_plain_eager

Make = Callable[..., Tensor]
ATTRIBUTE = "_siamesenorm_recipe"


class Recipe:
    """How to make h again, which lies in one piece: a function and the tensors it needs."""

    def __init__(self, h: Tensor, make: Make, tensors: tuple[Tensor, ...]) -> None:
        self.make, self.tensors = make, tensors
        self.pointer, self.size, self.dtype, self.version = h.data_ptr(), h.numel(), h.dtype, h._version

    def makes(self, t: Tensor) -> bool:
        """Whether `t` is h (or its elements in another shape or order), unchanged since it was made."""
        return (
            t.data_ptr() == self.pointer
            and t.numel() == self.size
            and t.dtype == self.dtype
            and t._version == self.version
        )


class _Saved:
    """The recipe as one pass saved it: its tensors packed by the hooks outside, its result shared by all users."""

    def __init__(self, recipe: Recipe, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self.make, self.unpack = recipe.make, unpack
        self.tensors = [pack(t) for t in recipe.tensors]
        self.users = self.left = 0
        self.made: Tensor | None = None

    def take(self) -> Tensor:
        """h, made at most once for the sublayer's projections (Q, K and V, say) and then let go."""
        if self.made is None:
            with torch.no_grad():
                self.made = self.make(*(self.unpack(t) for t in self.tensors))
            self.left = self.users
        made, self.left = self.made, self.left - 1
        if self.left <= 0:
            self.made = None
        return made


def attach(h: Tensor, make: Make, tensors: tuple[Tensor, ...]) -> None:
    """Let `remembering(h)` know that ``make(*tensors)`` gives h again."""
    if h.is_contiguous():
        setattr(h, ATTRIBUTE, Recipe(h, make, tensors))


def recomputed(make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``make(x)``, which `remembering` will make from x again; x is kept."""
    made = make(x)
    if made.requires_grad and runs_plain_eager(x):
        attach(made, make, (x,))
    return made


@contextlib.contextmanager
def _swapping(recipes: list[Recipe]) -> Any:
    outside = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack_outside, unpack_outside = outside if outside is not None else (lambda t: t, lambda t: t)
    saved: dict[Recipe, _Saved] = {}

    def pack(t: Tensor) -> Any:
        recipe = next((recipe for recipe in recipes if recipe.makes(t)), None)
        if recipe is None:
            return pack_outside(t)
        if recipe not in saved:
            saved[recipe] = _Saved(recipe, pack_outside, unpack_outside)
        saved[recipe].users += 1
        return saved[recipe], t.shape, t.stride()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, tuple) and len(packed) == 3 and isinstance(packed[0], _Saved):
            return packed[0].take().contiguous().as_strided(*packed[1:])
        return unpack_outside(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def remembering(*tensors: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context for what is called on these; does nothing where no recipe is attached or hooks are disabled."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    recipes = [recipe for t in tensors if (recipe := getattr(t, ATTRIBUTE, None)) is not None]
    if not recipes or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return _swapping(recipes)
