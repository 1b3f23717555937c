"""Logit lens: what a stream would predict if the model ended here.

For stream s at depth k, the prediction is the top-1 class of::

    head(finish(end_s(stream_s at depth k)))

where ``end_s`` is what the topology does to this stream at its end (N_Xf for X of SiameseNorm, N_Yf for Y), the other
streams are left out of the sum, and ``finish`` is what the topology does with the sum (N_out). Agreement is the share
of tokens for which this is the model's own final prediction. With one stream, the lens at the last depth is the model
itself. ``together`` keeps all streams in.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from siamesenorm.lab.inspection.probe import Probe, StreamView
from siamesenorm.lab.inspection.result import LogitLens, Numbers
from siamesenorm.lab.inspection.subject import Subject
from siamesenorm.residual import Link
from siamesenorm.residual.flow import Streams

TOKENS = 1024
"""Tokens asked for at most: the head is the most expensive part of a model that has a large vocabulary."""


class Lens(Probe):
    """Top-1 predictions of every stream at every depth; only their ids are kept."""

    def __init__(self, view: StreamView, subject: Subject) -> None:
        super().__init__(view)
        self.subject, self.sampled = subject, view.sample(TOKENS)
        self.together: list[Tensor] = []

    def at_depth(self, depth: int, streams: Streams) -> None:
        """As if the stack ended here."""
        topology = self.view.topology
        self.together.append(self.predict(type(topology).close(topology, streams)))
        names, last = tuple(topology.named_streams(streams)), topology.links[-1]
        if len(names) == 1:
            self.series.put(names[0], depth, self.together[-1])
            return
        assert isinstance(last, Link)
        found = topology.summands_at_end(streams, last)
        if len(found.parts) == len(names):
            for name, part in zip(names, found.parts, strict=True):
                self.series.put(name, depth, self.predict(found.finish(part)))

    def predict(self, hidden: Tensor) -> Tensor:
        """Ids for the sampled tokens."""
        return self.subject.predict(self.view.select(hidden)[self.sampled.to(hidden.device)]).cpu()

    @property
    def found(self) -> LogitLens:
        """Agreement with the predictions at the last depth."""
        final = self.together[-1]

        def agreement(ids: Sequence[Tensor | None]) -> Numbers:
            return tuple(None if each is None else float((each == final).double().mean()) for each in ids)

        alone = {name: agreement(ids) for name, ids in self.series.tuples(len(self.together)).items()} or None
        return LogitLens(tokens=len(self.sampled), alone=alone, together=agreement(self.together))
