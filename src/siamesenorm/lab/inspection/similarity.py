"""Representation similarity between blocks, and from it how many different representations a stream takes.

Linear CKA (arXiv 1905.00414) in its Gram form: ``<K_i, K_j> / |K_i| |K_j|`` with K the centred Gram matrix over
tokens, 1 for representations that are equal up to rotation and scale. Every token's vector is brought to length 1
first, as the norms before sublayers do; otherwise a few massive activations would make all depths look alike.

The matrix of all pairs is a similarity matrix with ones on its diagonal, so its Vendi score (arXiv 2210.02410), the
exponential of the entropy of its eigenvalues divided by their number, counts different representations: 1 where no
block changes anything, the number of depths where none resembles another. This is the effective depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.lab.inspection.probe import Probe, StreamView, wide
from siamesenorm.lab.inspection.result import Similarity
from siamesenorm.residual.flow import Streams

TOKENS = 512
"""Tokens compared at most; a Gram matrix has their square."""
END = "end"
"""In place of a stream's name: what the stack's end makes of all streams here."""


class BlockSimilarity(Probe):
    """One Gram matrix a stream before the first block and behind every block."""

    def __init__(self, view: StreamView) -> None:
        super().__init__(view)
        ends = [place.index + 1 for place in view.topology.places if place.ends_block]
        self.depths, self.sampled = (0, *ends), view.sample(TOKENS)
        self.grams: dict[str, list[Tensor]] = {}
        self.names: tuple[str, ...] | None = None

    def at_depth(self, depth: int, streams: Streams) -> None:
        """Of the sampled tokens: every stream, as long as they are those of the start, and the end."""
        if depth in self.depths:
            topology, named = self.view.topology, self.view.rows(streams)
            self.names = tuple(named) if self.names is None else self.names
            if tuple(named) != self.names:
                self.names, self.grams = (), {END: self.grams[END]}
            for name in self.names:
                self.keep(name, named[name])
            self.keep(END, self.view.select(type(topology).close(topology, streams)))

    def keep(self, name: str, rows: Tensor) -> None:
        """The Gram matrix of one depth."""
        self.grams.setdefault(name, []).append(centred_gram(rows[self.sampled.to(rows.device)]))

    @property
    def found(self) -> Similarity:
        """All pairs, and the effective depth, of every stream.

        Where streams come into being on the way: of what the stack would end with.
        """
        matrices = {name: cka(self.grams[name]) for name in self.names or (END,)}
        return Similarity(
            tokens=len(self.sampled),
            depths=self.depths,
            cka={name: tuple(map(tuple, matrix.tolist())) for name, matrix in matrices.items()},
            effective_depth={name: vendi_score(matrix) for name, matrix in matrices.items()},
        )


def centred_gram(rows: Tensor) -> Tensor:
    """H K H of unit rows as one vector of length 1, on the CPU."""
    units = torch.nn.functional.normalize(wide(rows), dim=-1)
    units = units - units.mean(0)
    gram = (units @ units.T).flatten()
    return (gram / torch.linalg.vector_norm(gram)).float().cpu()


def cka(grams: list[Tensor]) -> Tensor:
    """Linear CKA of all pairs."""
    vectors = torch.stack(grams).double()
    return (vectors @ vectors.T).fill_diagonal_(1.0)


def vendi_score(similarity: Tensor) -> float:
    """exp of the entropy of eigenvalues / n; NaN where similarities are."""
    if not bool(torch.isfinite(similarity).all()):
        return float("nan")
    shares = (torch.linalg.eigvalsh(similarity) / len(similarity)).clamp(min=0)
    return float(torch.special.entr(shares).sum().exp())
