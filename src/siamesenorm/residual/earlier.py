"""Pre-Norm streams that get earlier states back: every block's output (DenseFormer), or the embedding and a middle one.

Streams are tuples that grow with depth: the running stream first, then what is kept of earlier depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.kernels.rms_norm import rms_norm
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.pre import PreLink
from siamesenorm.residual.summands import Sum

States = tuple[Tensor, ...]


class AlongsideLink(PreLink):
    """Pre-Norm on the first of several streams."""

    equation = "x = x + F(N x)"

    def read(self, streams: States) -> tuple[States, Tensor]:  # type: ignore[override]
        """Unchanged streams; N x."""
        return streams, self.norm(streams[0])

    def write(self, streams: States, output: Tensor, keep: Keep = None) -> States:  # type: ignore[override]
        """x + O."""
        x, *earlier = streams
        return super().write(x, output, keep), *earlier

    def summands(self, streams: States, previous: Link | None) -> Sum:
        """x alone, then N."""
        return Sum.of_first(streams, self.norm)


class DenseLink(AlongsideLink):
    """The last sublayer of a DenseFormer's block."""

    equation = "x = x + F(N x);  then x = sum_j a_j X_j over the embedding and all blocks' outputs"

    def __init__(self, norm: nn.Module, sources: int) -> None:
        super().__init__(norm)
        self.a = nn.Parameter(torch.empty(sources))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The weights of the states, whose start is one for the last."""
        return {"a"}

    def depth_powers(self) -> dict[str, float]:
        """The weights of as many states as there are blocks before, in every block."""
        return {"a": 2.0}

    def reset_parameters(self) -> None:
        """a = e_last: Pre-Norm."""
        nn.init.zeros_(self.a)
        with torch.no_grad():
            self.a[-1:].fill_(1.0)

    def write(self, streams: States, output: Tensor, keep: Keep = None) -> States:  # type: ignore[override]
        """The block's output joins the earlier ones; x is their weighted sum."""
        x, *earlier = super().write(streams, output, keep)
        sources = (*earlier, x)
        mixed = self.a[0] * sources[0]
        for weight, state in zip(self.a[1:], sources[1:], strict=True):
            mixed = torch.addcmul(mixed, weight, state)
        return mixed, *sources


class Dense(Topology):
    """DenseFormer (arXiv 2402.02622)."""

    name = "dense"
    about = """
    DenseFormer: Pre-Norm, and after every block a learned sum of all blocks' outputs so far. arXiv 2402.02622.
    """
    equation = "x = x + F(N x);  after block l: X_l = x, x = sum_j a_lj X_j"
    beginning = "x = embed, which is also the first state"
    end = "N x"
    arxiv = "2402.02622"
    streams = "grows"
    kind = "pre"
    drawing = """
 x ──┬────────────────────(+)──▶ x      within a block: Pre-Norm
     └──▶ N ──▶ F ──────────┘

 after block l:  x = Σ a_lj X_j         over the embedding and all blocks' outputs, a = 1 for the last"""

    def link(self, place: Place) -> Link:
        """The last sublayer of a block ends with the sum."""
        norm = self.norm("input")
        return DenseLink(norm, place.block + 2) if place.ends_block else AlongsideLink(norm)

    def open(self, x: Tensor) -> States:
        """x = embed, which is also the first state."""
        return x, x.view_as(x)

    def close(self, streams: States) -> Tensor:
        """N x."""
        return super().close(streams[0])

    def summands_at_end(self, streams: States, last: Link) -> Sum:
        """x alone, then N."""
        return Sum.of_first(streams, self.final_norm)

    def named_streams(self, streams: States) -> dict[str, Tensor]:
        """x, and the states that it is mixed from."""
        return {"x": streams[0]} | {f"X{j}": state for j, state in enumerate(streams[1:])}


class EmbeddingLink(AlongsideLink):
    """The first sublayer of a block, where the embedding comes back."""

    equation = "x = r x + z x_0;  x = x + F(N x)"

    def __init__(self, norm: nn.Module, depth: float, step: float = 1.0) -> None:
        super().__init__(norm)
        self.start = ((1.15 - 0.10 * depth) ** step, (0.20 - 0.15 * depth) * step)
        self.r = nn.Parameter(torch.empty(1))
        self.z = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Both: their start is the meaning."""
        return {"r", "z"}

    def learning_rates(self) -> dict[str, float]:
        """r multiplies itself up over the depth, and takes a hundredth of z's learning rate."""
        return {"r": 0.01}

    def depth_powers(self) -> dict[str, float]:
        """Both, once a block."""
        return {"r": 1.0, "z": 1.0}

    def reset_parameters(self) -> None:
        """r from 1.15 to 1.05 and z from .20 to .05 over the depth."""
        nn.init.constant_(self.r, self.start[0])
        nn.init.constant_(self.z, self.start[1])

    def read(self, streams: States) -> tuple[States, Tensor]:  # type: ignore[override]
        """x and the embedding, weighed; N of that."""
        x, x_0, *rest = streams
        x = self.r * x + self.z * x_0
        return (x, x_0, *rest), self.norm(x)

    def summands(self, streams: States, previous: Link | None) -> Sum:
        """x and the embedding, weighed, then N."""
        zero = torch.zeros_like(self.r)
        return Sum.weighed(torch.cat([self.r, self.z, zero])[: len(streams)], streams, self.norm)


class MiddleLink(AlongsideLink):
    """The sublayer behind which the middle state is kept."""

    equation = "x = x + F(N x);  x_mid = x"

    def write(self, streams: States, output: Tensor, keep: Keep = None) -> States:  # type: ignore[override]
        """x + O, kept as the middle state too."""
        x, *rest = super().write(streams, output, keep)
        return x, *rest, x.view_as(x)


class MiddleEmbeddingLink(EmbeddingLink, MiddleLink):
    """The same in a block of one sublayer, behind which the middle state is kept."""

    equation = "x = r x + z x_0;  x = x + F(N x);  x_mid = x"


@dataclass(frozen=True)
class EmbeddingOptions(Options):
    """The start of the stream."""

    normed_start: bool = option(False, "start the stream itself from n(embed), as nanochat does; false: from embed")


class EmbeddingBack(Topology):
    """nanochat's residual."""

    name = "x0"
    about = """
    nanochat's residual: the embedding comes back before every block, and a middle state goes out at the end.

    ``x = r_l x + z_l x_0`` before block l, with ``x_0 = n(embed)``; ``out = N(x - b x_mid)``, x_mid the stream behind
    block L/2. With r = 1 and z = b = 0 it is Pre-Norm.
    """
    equation = "before a block x = r_l x + z_l x_0;  x = x + F(N x)"
    beginning = "x = embed, x_0 = n(embed)"
    end = "N(x - b x_mid)"
    arxiv = "–"
    streams = "3"
    kind = "pre"
    options_class = EmbeddingOptions
    options: EmbeddingOptions
    drawing = """
 x_0 = n(embed)
  └──▶ ·z ─┐
 x ──▶ ·r (+)──┬────────────────────(+)──▶ x      x_0 comes in once a block
               └──▶ N ──▶ F ──────────┘

 start: x = embed        end: N(x - b x_mid), x_mid behind block L/2"""

    def setup(self) -> None:
        """b."""
        self.b = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """b = .2."""
        super().reset_parameters()
        nn.init.constant_(self.b, 0.2)

    def link(self, place: Place) -> Link:
        """Blocks begin with the embedding; block L/2 ends with its state kept."""
        begins, keeps = place.position == 0, place.ends_block and place.block == place.blocks // 2
        norm, depth = self.norm("input"), place.block / max(place.blocks - 1, 1)
        if begins:
            return (MiddleEmbeddingLink if keeps else EmbeddingLink)(norm, depth, place.branch_factor)
        return (MiddleLink if keeps else AlongsideLink)(norm)

    def open(self, x: Tensor) -> States:
        """x = embed and x_0 = n(embed)."""
        x_0 = rms_norm(x, None, None, self.norms.eps)
        return (x_0.view_as(x_0) if self.options.normed_start else x), x_0

    def close(self, streams: States) -> Tensor:
        """N(x - b x_mid); N x of a stack that ends before its middle."""
        x, _, *x_mid = streams
        return super().close(x - self.b * x_mid[0] if x_mid else x)

    def summands_at_end(self, streams: States, last: Link) -> Sum:
        """x and the middle state, weighed, then N."""
        one = torch.ones_like(self.b)
        return Sum.weighed(torch.cat([one, 0 * one, -self.b])[: len(streams)], streams, self.final_norm)

    def named_streams(self, streams: States) -> dict[str, Tensor]:
        """x, the embedding, and the middle state where it is there already."""
        return dict(zip(("x", "x0", "mid"), streams, strict=False))

    def no_weight_decay(self) -> set[str]:
        """The links' own, and b."""
        return super().no_weight_decay() | {"b"}
