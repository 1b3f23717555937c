"""All measurements of `inspect`: one pass with recorded streams, one backward, then one pass for every removal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import InspectionError
from siamesenorm.lab.inspection.activity import Magnitude, Peaks, Updates
from siamesenorm.lab.inspection.collapse import StreamCollapse
from siamesenorm.lab.inspection.gradients import Gradients
from siamesenorm.lab.inspection.lens import Lens
from siamesenorm.lab.inspection.logits import AttentionLogits
from siamesenorm.lab.inspection.probe import Probe, StreamView
from siamesenorm.lab.inspection.removal import measure_removal
from siamesenorm.lab.inspection.result import Inspection, Sublayer
from siamesenorm.lab.inspection.shares import Shares
from siamesenorm.lab.inspection.similarity import BlockSimilarity
from siamesenorm.lab.inspection.subject import Head, LossFunction, Subject, make_subject
from siamesenorm.lab.inspection.watch import Watcher, at_rest, find_residual, watched
from siamesenorm.lab.inspection.writers import WritersMap
from siamesenorm.residual import Link, Place, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams
from siamesenorm.train.tensor_layout import unwrap


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: LossFunction | None = None,
    head: Head | None = None,
    topology: Topology | None = None,
    removal: bool = True,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Inspection:
    """What `siamesenorm.inspect` finds; progress: called with how many passes of removal are done, of how many."""
    model = unwrap(model)
    residual = find_residual(model) if topology is None else topology
    subject = make_subject(model, batch, loss, head)
    with at_rest(model):
        record = PassRecorder(residual, subject)
        with torch.enable_grad(), watched(residual, record), record.logits:
            total = subject.run()
        record.check_complete()
        gradients = None if total is None else record.gradients.measure(total)
        writers = record.writers.measure()
        removed = measure_removal(subject, residual, progress) if removal and subject.loss is not None else None
    view, depths = record.view, len(residual.places) + 1
    return Inspection(
        topology=topology_text(residual, model),
        dim=residual.dim,
        streams=tuple(record.magnitude.series.at),
        sublayers=tuple(Sublayer(index=p.index, block=p.block, kind=p.kind) for p in residual.places),
        tokens=view.tokens,
        loss=None if total is None else total.item(),
        rms=record.magnitude.series.tuples(depths),
        gradients=None if gradients is None else gradients.streams,
        output_gradients=None if gradients is None else tuple(gradients.outputs),
        updates=record.updates.series.tuples(depths - 1),
        peaks=record.peaks.series.tuples(depths),
        reads=tuple(record.shares.reads),
        fusion=record.shares.fusion,
        lens=None if record.lens is None else record.lens.found,
        similarity=record.similarity.found,
        removal=removed,
        writers=writers,
        collapse=record.collapse.found,
        attention_logits=record.logits.numbers,
    )


def topology_text(topology: Topology, model: nn.Module) -> str:
    """The topology with its options, as a model's configuration names it, or by name alone."""
    return str(getattr(getattr(model, "config", None), "topology", topology.name))


class PassRecorder(Watcher):
    """Sends the moments of one pass to every measurement."""

    def __init__(self, topology: Topology, subject: Subject) -> None:
        self.topology, self.subject = topology, subject
        self.gradients = Gradients(topology)
        self.logits = AttentionLogits(len(topology.places))
        self.depth = 0
        self.probes: list[Probe] = []

    def _begin(self, streams: Streams) -> None:
        named = self.topology.named_streams(streams)
        shape = next(iter(named.values())).shape[:-1]
        self.view = view = StreamView(self.topology, self.subject.counted, shape)
        self.gradients.view = view
        self.magnitude, self.peaks, self.updates = Magnitude(view), Peaks(view), Updates(view)
        self.shares, self.similarity = Shares(view), BlockSimilarity(view)
        self.lens = Lens(view, self.subject) if self.subject.head is not None else None
        self.writers, self.collapse = WritersMap(view), StreamCollapse(view)
        self.probes = [self.magnitude, self.peaks, self.updates, self.shares, self.similarity]
        self.probes += [self.writers, self.collapse]
        self.probes += [] if self.lens is None else [self.lens]

    def opened(self, streams: Streams) -> Streams:
        """Depth 0."""
        if self.probes:
            raise InspectionError("model: it runs its stack more than once a pass; one pass can be inspected")
        self._begin(streams)
        return self._at_depth(self.gradients.cut(streams))

    @torch.no_grad()
    def read(self, place: Place, link: Link, streams: Streams) -> None:
        """Before a sublayer."""
        self.logits.running = place.index
        previous = self.topology.links[place.index - 1] if place.index else None
        assert previous is None or isinstance(previous, Link)
        for probe in self.probes:
            probe.at_read(place, link, previous, streams)

    def written(
        self, place: Place, link: Link, before: Streams, output: Tensor, keep: Keep, streams: Streams
    ) -> Streams:
        """Behind a sublayer."""
        if place.index != self.depth:
            raise InspectionError(f"model: sublayer {place.index} was run where {self.depth} was expected")
        self.depth += 1
        self.logits.running = None
        self.gradients.follow_output(output)
        with torch.no_grad():
            for probe in self.probes:
                probe.at_write(place, link, before, output, keep, streams)
        return self._at_depth(streams)

    def _at_depth(self, streams: Streams) -> Streams:
        streams = self.gradients.follow(streams)
        with torch.no_grad():
            for probe in self.probes:
                probe.at_depth(self.depth, streams)
        return streams

    @torch.no_grad()
    def closed(self, streams: Streams) -> None:
        """The end."""
        for probe in self.probes:
            probe.at_end(streams)

    def check_complete(self) -> None:
        """Raise unless every sublayer was seen."""
        if not self.probes or self.depth != len(self.topology.links):
            seen = f"{self.depth} of {len(self.topology.links)} sublayers"
            raise InspectionError(f"model: a pass on the batch ran {seen} of its residual topology; all are needed")
