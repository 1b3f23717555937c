"""ResiDual: a Post-Norm stream that feeds the sublayers and a Pre-Norm-like sum that joins at the end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Pair
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.summands import Sum, mean_gain


@dataclass(frozen=True)
class DualOptions(Options):
    """What SiameseNorm's ablation adds."""

    input_norm: bool = option(False, "normalise what the sublayer reads (N_in), as the ablation of arXiv 2602.08064")


class DualLink(Link):
    """ResiDual."""

    equation = "o = F(x); d = d + o; x = N(x + o)"

    def __init__(self, norm: nn.Module, input_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.input_norm = norm, input_norm

    def read(self, streams: Pair) -> tuple[Pair, Tensor]:
        """x, or N_in x."""
        return streams, streams[0] if self.input_norm is None else self.input_norm(streams[0])

    def write(self, streams: Pair, output: Tensor, keep: Keep = None) -> Pair:
        """(N(x + O), d + O)."""
        x, d = streams
        output = self.dropped(output, keep)
        return self.norm(x + output), d + output

    def summands(self, streams: Pair, previous: Link | None) -> Sum:
        """x alone."""
        return Sum.of_first(streams, self.input_norm, self.read_gain(previous))

    def read_gain(self, previous: Link | None) -> float:
        """N_in's, else that of the stream's last norm."""
        return super().read_gain(previous) if self.input_norm is None else mean_gain(self.input_norm)

    def depth_powers(self) -> dict[str, float]:
        """The norm: its gains multiply each other along the stream."""
        return {"norm": 1.0}

    @property
    def written_norm(self) -> nn.Module:
        """N."""
        return self.norm


class ResidualDual(Topology):
    """ResiDual (arXiv 2304.14802)."""

    name = "residual_dual"
    about = """
    ResiDual: ``o = F(x); d = d + o; x = N(x + o)``, ``out = x + N(d)``. arXiv 2304.14802.
    """
    equation = "o = F(x);  d = d + o;  x = N(x + o)"
    beginning = "x = d = embed"
    end = "x + N d"
    arxiv = "2304.14802"
    streams = "2"
    kind = "several"
    options_class = DualOptions
    options: DualOptions
    drawing = """
 d ────────────────(+)──────────▶ d
                    │                   end: x + N(d)
          ┌──▶ F ───┤
          │         │
 x ───────┴────────(+)──▶ N ────▶ x"""

    def link(self, place: Place) -> Link:
        """The sublayer sees x alone."""
        return DualLink(self.norm("stream"), self.norm("input") if self.options.input_norm else None)

    def open(self, x: Tensor) -> Pair:
        """Both start from the embedding, as two tensors: one twice would be another graph to a compiler."""
        return x, x.view_as(x)

    def close(self, streams: Pair) -> Tensor:
        """x + N(d)."""
        x, d = streams
        return x + super().close(d)

    def summands_at_end(self, streams: Pair, last: Link) -> Sum:
        """x and N(d)."""
        x, d = streams
        return Sum([x, super().close(d)], [mean_gain(norm) for norm in self.output_norms(last)])

    def output_norms(self, last: Link) -> list[nn.Module]:
        """x's last norm and d's."""
        assert isinstance(last, DualLink)
        assert self.final_norm is not None
        return [last.norm, self.final_norm]

    def named_streams(self, streams: Pair) -> dict[str, Tensor]:
        """Post-Norm stream and sum."""
        return {"x": streams[0], "d": streams[1]}
