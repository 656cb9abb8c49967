"""How long each piece of a model takes on one device: figures that were measured or counted, apart from who did so.

A fixed cost is told apart from the work: a stage runs its blocks in one call, so that it has the cost of a call once
and the seconds of its pieces each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from operator import add

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec


@dataclass(frozen=True, slots=True)
class PieceTime:
    """What a run of a model takes for one microbatch, without the fixed cost of a call.

    Args:
        forward_s: seconds forward.
        backward_s: seconds backward, all of it in one go.
        input_s: seconds of the part of a backward that makes gradients of inputs, where it is done in two parts.
        weight_s: seconds of the other part.
        output_bytes: what it hands on.
        kept_bytes: what stays from its forward to its backward; what it was handed belongs to the one who made it.
        added_s: seconds that a backward takes more where its gradient is added to that of an earlier microbatch; less
            than nothing where that is faster than to write it anew.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    output_bytes: float = 0.0
    kept_bytes: float = 0.0
    added_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def times(self, factor: float) -> PieceTime:
        """Return all figures times a factor."""
        return PieceTime(*(factor * figure for figure in astuple(self)))

    def with_seconds(self, factor: float) -> PieceTime:
        """Return the piece with all its seconds times a factor."""
        return replace(self.times(factor), output_bytes=self.output_bytes, kept_bytes=self.kept_bytes)

    def plus(self, other: PieceTime) -> PieceTime:
        """Return the figures of one after the other."""
        return PieceTime(*map(add, astuple(self), astuple(other)))

    def at_least(self, other: PieceTime) -> PieceTime:
        """Return the larger one of each two figures."""
        return PieceTime(*map(max, astuple(self), astuple(other)))


ROUNDING = 1e-9
"""Parts of a model's work that differ by less are the same place in it."""

NOTHING = PieceTime(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Point:
    """What a model takes for microbatches of one size.

    Args:
        samples: in a microbatch.
        pieces: of each; the last one has the loss and its backward, too.
        whole: of the model that is not cut, which is called as it is, with the loss.
        alone: of the same where the microbatch is all that a step has, so that batch norm has nothing to put together.
    """

    samples: int
    pieces: tuple[PieceTime, ...]
    whole: PieceTime
    alone: PieceTime | None = None

    def as_alone(self) -> Point:
        """Return what microbatches take that are all that a step has."""
        if self.alone is None:
            return self
        factor = self.alone.seconds / self.whole.seconds if self.whole.seconds else 1.0
        return replace(self, pieces=tuple(one.with_seconds(factor) for one in self.pieces), whole=self.alone)

    def over(self, block: Block) -> PieceTime:
        """Return what a block takes on one rank; a block of all pieces is the model as it is."""
        if len(block.pieces) == len(self.pieces):
            return self.whole
        total = NOTHING
        for piece in self.pieces[block.first_piece : block.first_piece + len(block.pieces)]:
            total = total.plus(piece)
        return total.times(1 / block.num_slices)

    def shared_out(self, costs: Sequence[float], others: Sequence[float]) -> Point:
        """Return the point for the pieces of another cut, given the counted work of both; see :func:`shared_out`."""
        columns = zip(*(astuple(piece) for piece in self.pieces), strict=True)
        rows = zip(*(shared_out(column, costs, others) for column in columns), strict=True)
        return replace(self, pieces=tuple(PieceTime(*row) for row in rows))

    def times(self, factor: float) -> Point:
        """Return all figures times a factor."""
        return self._made(lambda one, _: one.times(factor), self)

    def with_seconds(self, factor: float) -> Point:
        """Return the point with all its seconds times a factor."""
        return self._made(lambda one, _: one.with_seconds(factor), self)

    def plus(self, other: Point) -> Point:
        """Return the sums of all figures."""
        return self._made(PieceTime.plus, other)

    def at_least(self, other: Point) -> Point:
        """Return the larger one of each two figures."""
        return self._made(PieceTime.at_least, other)

    def _made(self, of: Callable[[PieceTime, PieceTime], PieceTime], other: Point) -> Point:
        alone = None if self.alone is None or other.alone is None else of(self.alone, other.alone)
        pieces = tuple(map(of, self.pieces, other.pieces))
        return replace(self, pieces=pieces, whole=of(self.whole, other.whole), alone=alone)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What does not grow with the work.

    Args:
        forward_s: seconds of a call of some blocks forward, beside theirs.
        backward_s: of one backward.
        update_s: of an optimizer step, beside the bytes that it goes over.
        step_s: of a step, for all that is in it beside calls and the update.
        alone_s: of the same where a step has one microbatch, so that nobody puts together what batch norm has seen.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    step_s: float = 0.0
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Known:
    """What a piece is known by.

    Args:
        name: of the piece.
        weight_bytes: of the parameters it reads.
        cost: its counted work.
        output_bytes: bytes per sample of what it makes.
    """

    name: str
    weight_bytes: int
    cost: float
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """On what a model was timed.

    Args:
        device: its name.
        threads: with how many a rank computed.
        optimizer: the name of the optimizer.
        is_measured: whether it ran; else its operations were counted.
    """

    device: str
    threads: int = 1
    optimizer: str = ""
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the pieces of one model take on one machine, for one or more sizes of microbatches.

    Args:
        model: its name.
        pieces: what they are known by.
        weights: names and bytes of all parameters.
        machine: on what.
        points: by size, the smallest first; at least one.
        update_s_per_byte: seconds of an update per byte of parameters.
        add_s_per_byte: seconds in which one vector is added to another, per byte of parameters.
        fixed: what does not grow with the work.
    """

    model: str
    pieces: tuple[Known, ...]
    weights: tuple[tuple[str, int], ...]
    machine: Machine
    points: tuple[Point, ...]
    update_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    fixed: Fixed = Fixed()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(size for _, size in self.weights)

    def at_speed(self, factor: float) -> Timing:
        """Return what all of it takes on a machine on which everything takes so many times as long."""
        return replace(
            self,
            points=tuple(point.with_seconds(factor) for point in self.points),
            update_s_per_byte=factor * self.update_s_per_byte,
            add_s_per_byte=factor * self.add_s_per_byte,
            fixed=Fixed(*(factor * seconds for seconds in astuple(self.fixed))),
        )

    def at(self, samples: int) -> Point:
        """Return what microbatches of this size take: as measured, on the line between two sizes, else in proportion.

        Below the smallest size it is on the line through the two smallest, if that is more: weights are read however
        few samples there are.

        Args:
            samples: in a microbatch, at least 1.
        """
        below = [point for point in self.points if point.samples <= samples]
        above = [point for point in self.points if point.samples >= samples]
        if not above or (not below and len(above) == 1):
            nearest = (below or above)[-1]
            return replace(nearest.times(samples / nearest.samples), samples=samples)
        low, high = (below[-1], above[0]) if below else (above[0], above[1])
        if low.samples == samples:
            return low
        share = (samples - low.samples) / (high.samples - low.samples)
        line = low.times(1 - share).plus(high.times(share))
        if not below:
            line = line.at_least(low.times(samples / low.samples))
        return replace(line, samples=samples)

    def fitted(self, model: ModelSpec) -> Timing:
        """Return the times of a model's own pieces.

        It may be cut into other pieces than those that were timed, as a chain of modules is for slices: each gets what
        is due to its part of the counted work.

        Raises:
            PlanError: it is another model; the message names what tells the two apart.
        """
        difference = _difference(self, model)
        if difference:
            raise PlanError(
                f"the timing is of {self.model}, and this is another model, or the same on inputs of another shape: "
                f"{difference}; times are of the model they were measured on: profile this one, with `counterpoint "
                "profile JOB` or counterpoint.profile(model, inputs)"
            )
        pieces = known_pieces(model)
        if [one.name for one in pieces] == [one.name for one in self.pieces]:
            return self
        costs = [one.cost for one in self.pieces], [one.cost for one in pieces]
        return replace(self, pieces=pieces, points=tuple(point.shared_out(*costs) for point in self.points))

    def weigh(self, model: ModelSpec, samples: int) -> ModelSpec:
        """Return a model whose pieces cost what they take in seconds per sample, forward and backward, and the loss.

        Cuts are then balanced by seconds.

        Args:
            model: the one that was timed.
            samples: in a microbatch.

        Raises:
            PlanError: it is another model.
        """
        times = self.fitted(model).at(samples).pieces
        weighed = [replace(piece, cost=time.seconds / samples) for piece, time in zip(model.pieces, times, strict=True)]
        blocks = (
            replace(one, pieces=tuple(weighed[one.first_piece : one.first_piece + len(one.pieces)]))
            for one in model.blocks
        )
        return replace(model, blocks=tuple(blocks))


def known_pieces(model: ModelSpec) -> tuple[Known, ...]:
    """Return what the pieces of a model are known by; frozen parameters are nobody's."""
    sizes = {param.name: param.num_bytes for param in model.params}
    return tuple(
        Known(piece.name, sum(sizes.get(name, 0) for name in piece.params), piece.cost, piece.output_bytes)
        for piece in model.pieces
    )


def known_weights(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Return the names of all parameters of a model, and their bytes."""
    return tuple((param.name, param.num_bytes) for param in model.params)


def shared_out(figures: Sequence[float], costs: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the figures of the pieces of another cut of a model: each has those of the work that it covers.

    Args:
        figures: of each piece, in order.
        costs: its counted work.
        others: the counted work of the pieces of the other cut, in order.

    Example:
        >>> shared_out([1.0, 3.0], [10.0, 10.0], [5.0, 15.0])
        [0.5, 3.5]
    """
    total, other_total = sum(costs), sum(others)
    if not total or not other_total:
        return [sum(figures) / len(others)] * len(others)
    ends = [0.0, *(end / total for end in accumulate(costs))]
    sums = [0.0, *accumulate(figures)]

    def until(part: float) -> float:
        """Return what belongs to the first part of the work."""
        at = max(1, min(bisect_left(ends, part - ROUNDING), len(ends) - 1))
        width = ends[at] - ends[at - 1]
        share = min((part - ends[at - 1]) / width, 1.0) if width else 1.0
        return sums[at - 1] + share * (sums[at] - sums[at - 1])

    stops = [until(end / other_total) for end in accumulate(others)]
    stops[-1] = sums[-1]
    return [stop - start for start, stop in pairwise([0.0, *stops])]


def _difference(timing: Timing, model: ModelSpec) -> str:
    """Return in words what tells the timed model from another one; nothing where they are the same."""
    mine, theirs = timing.weights, known_weights(model)
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"it has {one[0]} with {one[1]} bytes, where this model has {other[0]} with {other[1]}"
    if len(mine) != len(theirs):
        return f"it has {len(mine)} parameters, but this model has {len(theirs)}"
    made = timing.pieces[-1].output_bytes, model.pieces[-1].output_bytes
    return (
        f"its output has {made[0]} bytes per sample, but that of this model has {made[1]}" if len(set(made)) > 1 else ""
    )
