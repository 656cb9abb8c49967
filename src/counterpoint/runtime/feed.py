"""What a rank is fed in one step: the microbatches of a global batch, by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from counterpoint.runtime.casting import Casts


class Feed(Protocol):
    """One global batch; a rank asks only for the microbatches that its row reads."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """How many samples each microbatch has; 0 for an empty one."""
        ...

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        ...

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return what the loss takes beside the model's output."""
        ...


@dataclass(frozen=True, slots=True)
class BatchFeed:
    """A global batch that lies in memory, cut by position.

    Args:
        batch: inputs and targets; each a tensor, or a tuple or dict of tensors, with the samples along dim 0.
        places: for each microbatch the samples from and to.
        casts: the autocasts that it is computed under wherever a stream comes to it; None for those of that place.
    """

    batch: tuple[Any, Any]
    places: tuple[tuple[int, int], ...]
    casts: Casts | None = None

    @property
    def sizes(self) -> dict[int, int]:
        """How many samples each microbatch has."""
        return {micro: stop - start for micro, (start, stop) in enumerate(self.places)}

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        return cut(self.batch[0], *self.places[micro])

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch."""
        return cut(self.batch[1], *self.places[micro])


def cut(values: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - any nest of tensors
    """Return samples ``start`` to ``stop`` of every tensor in a tensor, tuple, named tuple, list or dict."""
    if isinstance(values, Tensor):
        return values[start:stop]
    if isinstance(values, dict):
        return {key: cut(value, start, stop) for key, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [cut(value, start, stop) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    return values


class Window:
    """The batches that are under way in a stream, as one feed: microbatch m of batch k is ``k * stride + m``.

    Batches that are not given are empty: before the first one, and behind the last one before a flush.

    Args:
        feeds: those under way, by the number of the batch.
        number: of the batch that is finished with this feed.
        ahead: how many batches behind it are begun.
        stride: how many microbatches a batch has.
    """

    def __init__(self, feeds: Mapping[int, Feed], number: int, ahead: int, stride: int) -> None:
        self.feeds = feeds
        self.stride = stride
        self.sizes: Mapping[int, int] = {
            batch * stride + micro: feeds[batch].sizes[micro] if batch in feeds else 0
            for batch in range(number, number + ahead + 1)
            for micro in range(stride)
        }

    def inputs(self, micro: int) -> Any:  # noqa: ANN401 - whatever the model takes
        """Return the model's inputs for a microbatch."""
        return self.feeds[micro // self.stride].inputs(micro % self.stride)

    def targets(self, micro: int) -> Any:  # noqa: ANN401 - whatever the loss takes
        """Return the targets of a microbatch."""
        return self.feeds[micro // self.stride].targets(micro % self.stride)

    def casts(self, micro: int) -> Casts | None:
        """Return the autocasts that a microbatch is computed under; None for those that there are."""
        feed = self.feeds[micro // self.stride]
        return feed.casts if isinstance(feed, BatchFeed) else None
