"""Global batches of a dataset, read microbatch by microbatch, each at most once per process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from counterpoint.data.fetch import Fields, MapDataset
from counterpoint.data.reading import read_keyed
from counterpoint.data.sampler import Indices, split
from counterpoint.program.instruction import Commit, Forward
from counterpoint.program.program import Program


class DatasetFeed:
    """One global batch of a dataset.

    Args:
        dataset: any map-style dataset whose samples are ``(inputs..., target)``.
        indices: the samples of the batch, in order.
        num_micros: into how many microbatches it is cut.
        seed: of what samples draw.
        epoch: likewise.
        reader: gives a microbatch's fields where something else than this process reads them.
    """

    def __init__(
        self,
        dataset: MapDataset,
        indices: Indices,
        num_micros: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        reader: Callable[[int], Fields] | None = None,
    ) -> None:
        self.indices = indices
        self.places = split(len(indices), num_micros)
        self.sizes: Mapping[int, int] = {micro: stop - start for micro, (start, stop) in enumerate(self.places)}
        self.read: dict[int, tuple[Tensor, ...]] = {}
        self.reader = reader
        self.read_here = partial(read_keyed, dataset, seed=seed, epoch=epoch)

    def fields(self, micro: int) -> Sequence[Tensor]:
        """Return the fields of a microbatch's samples, stacked."""
        if micro not in self.read:
            if self.reader is not None:
                self.read[micro] = self.reader(micro)
            else:
                start, stop = self.places[micro]
                self.read[micro] = self.read_here(self.indices[start:stop])
        return self.read[micro]

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - one tensor or a tuple of them
        """Return all fields but the last: one tensor, or a tuple of several."""
        fields = self.fields(micro)[:-1]
        return fields[0] if len(fields) == 1 else tuple(fields)

    def targets(self, micro: int) -> Tensor:
        """Return the last field."""
        return self.fields(micro)[-1]


def read_micros(program: Program, ranks: Collection[int], fed_blocks: Container[int] = frozenset({0})) -> list[int]:
    """Return the microbatches of a batch whose samples these ranks read: those of blocks that read inputs or targets.

    Args:
        program: what ranks do.
        ranks: who reads.
        fed_blocks: the blocks that read the model's inputs; the last one reads the targets.
    """
    stride = len(program.micros)
    last = max((word.block for _, word in program.words() if isinstance(word, Forward)), default=0)
    words = (word for rank in ranks for word in program.rows[rank].body if isinstance(word, Forward))
    return sorted({word.micro % stride for word in words if word.block == last or word.block in fed_blocks})


def counted_micros(program: Program, rank: int) -> list[int]:
    """Return the microbatches whose samples the ranks that commit with this one count, each as often as it is."""
    words = program.rows[rank].body
    group = next((word.group for word in words if isinstance(word, Commit)), ())
    bodies = [word for member in group for word in program.rows[member].body if isinstance(word, Forward)]
    last = max((word.block for _, word in program.words() if isinstance(word, Forward)), default=0)
    return [word.micro for word in bodies if word.block == last]
