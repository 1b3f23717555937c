"""What an inspection found: plain numbers, by stream and depth, that round-trip through JSON.

Depth 0 is the start of the stack, depth k lies behind sublayer k - 1. Lists by depth have one entry more than lists
by sublayer. A number that does not exist (of a diverged model, of 0/0, of a stream that is not there yet) is None.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from siamesenorm.errors import InspectionError

VERSION = 1


def finite(value: Any) -> Any:
    """None for what JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(finite)]
Numbers = tuple[Number, ...]
ByStream = dict[str, Numbers]


class ResultPart(BaseModel):
    """Unknown fields are refused; nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sublayer(ResultPart):
    """Where a sublayer stands."""

    index: int
    block: int
    kind: str

    @property
    def label(self) -> str:
        """Such as ``3 ffn``."""
        return f"{self.block} {self.kind}"


class ActivationPeak(ResultPart):
    """The largest activation of a stream at a depth, and where the large ones are."""

    largest: Number
    """max |activation|."""
    median: Number
    """median |activation|."""
    massive: int
    """Activations above 100 in size and above 1000 medians, the definition of arXiv 2402.17762."""
    dims: tuple[int, ...]
    """Features with the largest activations, largest first."""
    tokens: tuple[tuple[int, ...], ...]
    """Tokens with the largest activations, largest first, as places in the batch: (row, position)."""

    @property
    def ratio(self) -> float | None:
        """largest / median."""
        return self.largest / self.median if self.largest is not None and self.median else None


class Mixture(ResultPart):
    """How streams come together, at a sublayer's reading or at the end."""

    gains: dict[str, Number] | None = None
    """Mean |gain| of the norm (or mean |weight| of the mixing) that a stream comes in through."""
    gain_shares: dict[str, Number] | None = None
    """The gains as shares of their sum."""
    contributions: dict[str, Number] | None = None
    """The rms of what each stream adds, as shares of their sum, on this batch."""


class LogitLens(ResultPart):
    """How often a stream alone predicts, at a depth, what the model predicts at its end."""

    tokens: int
    """Tokens that were asked for, evenly spaced over those that count."""
    alone: ByStream | None
    """Each stream through the model's end with the other streams left out, then the head."""
    together: Numbers
    """All streams through the model's end, then the head: 1 at the last depth."""


class Similarity(ResultPart):
    """Linear CKA (arXiv 1905.00414) between the streams before the first and behind every block."""

    tokens: int
    """Tokens compared, evenly spaced over those that count."""
    depths: tuple[int, ...]
    cka: dict[str, tuple[Numbers, ...]]
    effective_depth: dict[str, Number]
    """How many different representations the stream takes: the Vendi score (arXiv 2210.02410) of its CKA matrix."""


class Removal(ResultPart):
    """How much the loss rises when outputs are replaced by zero."""

    loss: Number
    """With nothing removed."""
    sublayers: Numbers
    blocks: Numbers


class Writers(ResultPart):
    """Who has put what a reader sees: shares of the embedding and of every sublayer before it."""

    tokens: int
    """Tokens that were followed, evenly spaced over those that count."""
    shares: tuple[Numbers, ...]
    """By reader, every sublayer and then the end: the share of the embedding, of sublayer 0, 1, … before it."""
    constants: Numbers
    """By reader: what no writer has put there, such as biases; the shares and this sum to one."""


class Collapse(ResultPart):
    """Whether several streams have become one."""

    largest: Numbers
    """By depth: the largest stream's share of all streams' energy, mean over tokens."""
    cosine: Numbers
    """By depth: mean cosine of all pairs of streams, mean over tokens."""


class Spikes(ResultPart):
    """Steps of training whose loss lies above the median of the 201 steps around them by more than .1."""

    counted: int
    """Steps that were looked at."""
    count: int
    per_10k: Number
    """Spikes in ten thousand steps."""
    steps: tuple[int, ...]


class Inspection(ResultPart):
    """Everything that `inspect` measures."""

    version: int = VERSION
    source: dict[str, JsonValue] = Field(default_factory=dict)
    """What was inspected, on which text, with which versions."""
    topology: str
    dim: int
    streams: tuple[str, ...]
    sublayers: tuple[Sublayer, ...]
    tokens: int
    """Tokens that count."""
    loss: Number = None
    rms: ByStream
    """By depth: root mean square over tokens and features."""
    gradients: ByStream | None = None
    """By depth: the norm of the summed loss's gradient at a token's stream, root mean square over tokens."""
    output_gradients: Numbers | None = None
    """By sublayer: the same at its output."""
    updates: ByStream
    """By sublayer: rms of what its output changes in the stream / rms of the stream with an output of zero."""
    peaks: dict[str, tuple[ActivationPeak | None, ...]]
    """By depth."""
    reads: tuple[Mixture, ...]
    """By sublayer."""
    fusion: Mixture
    """At the end."""
    lens: LogitLens | None = None
    similarity: Similarity
    removal: Removal | None = None
    writers: Writers | None = None
    collapse: Collapse | None = None
    """Of a topology with several streams."""
    attention_logits: Numbers | None = None
    """By sublayer: the largest attention logit; None for a sublayer that has no attention."""
    spikes: Spikes | None = None
    """Of the run that the model comes from."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.sublayers[-1].block + 1

    def at_end(self, what: str) -> dict[str, Number]:
        """What the model's end makes of each stream: its ``gains``, or agreement of its ``lens``; empty if unknown."""
        if what == "gains":
            return self.fusion.gains or {}
        return {} if self.lens is None else {name: of[-1] for name, of in (self.lens.alone or {}).items()}

    @property
    def figures(self) -> dict[str, Any]:
        """The plots by name: figures of plotly, which show themselves in a notebook."""
        from siamesenorm.lab.drawing.page import as_figures
        from siamesenorm.lab.inspection.figures import plots

        return as_figures({plot.name: plot.figure for plot in plots(self)})

    def plot(self, name: str = "rms") -> Any:
        """One of the plots, which shows itself in a notebook."""
        known = self.figures
        if name not in known:
            raise InspectionError.unknown("plot", name, known)
        return known[name]

    def _repr_html_(self) -> str:
        """What stands out, for notebooks."""
        from siamesenorm.lab.drawing.page import escape
        from siamesenorm.lab.inspection.terminal import notes, title

        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in notes(self))
        return f"<p>{escape(title(self).plain)}</p><table>{rows}</table>"

    def to_json(self) -> str:
        """All numbers."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Inspection:
        """What `to_json` wrote."""
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise InspectionError(f"inspection: {where} is not allowed: {first['msg'].lower()}") from None
        if found.version != VERSION:
            raise InspectionError(f"inspection: version {found.version} is not known; it takes {VERSION}")
        return found
