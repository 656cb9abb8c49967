"""How long each piece of a model takes on one device: figures that were measured or counted, apart from who did so.

A fixed cost is told apart from the work: a stage runs its blocks in one call, so that it has the cost of a call once
and the seconds of its pieces each.

Timings as text, which other processes and later days can read.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import accumulate, pairwise
from operator import add
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerProfile:
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
    backward_input_s: float
    backward_weight_s: float
    output_bytes: float = 0.0
    saved_bytes: float = 0.0
    accumulate_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def scale(self, factor: float) -> LayerProfile:
        """Return all figures times a factor."""
        return LayerProfile(*(factor * figure for figure in astuple(self)))

    def scale_seconds(self, factor: float) -> LayerProfile:
        """Return the piece with all its seconds times a factor."""
        return replace(self.scale(factor), output_bytes=self.output_bytes, saved_bytes=self.saved_bytes)

    def add(self, other: LayerProfile) -> LayerProfile:
        """Return the figures of one after the other."""
        return LayerProfile(*map(add, astuple(self), astuple(other)))

    def elementwise_max(self, other: LayerProfile) -> LayerProfile:
        """Return the larger one of each two figures."""
        return LayerProfile(*map(max, astuple(self), astuple(other)))


ROUNDING = 1e-9
"""Parts of a model's work that differ by less are the same place in it."""

NO_TIME = LayerProfile(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BatchSizeProfile:
    """What a model takes for microbatches of one size.

    Args:
        samples: in a microbatch.
        pieces: of each; the last one has the loss and its backward, too.
        whole: of the model that is not cut, which is called as it is, with the loss.
        alone: of the same where the microbatch is all that a step has, so that batch norm has nothing to put together.
    """

    samples: int
    layers: tuple[LayerProfile, ...]
    unpartitioned: LayerProfile
    single_microbatch: LayerProfile | None = None

    def for_single_microbatch(self) -> BatchSizeProfile:
        """Return what microbatches take that are all that a step has."""
        if self.single_microbatch is None:
            return self
        factor = self.single_microbatch.seconds / self.unpartitioned.seconds if self.unpartitioned.seconds else 1.0
        return replace(
            self, layers=tuple(one.scale_seconds(factor) for one in self.layers), unpartitioned=self.single_microbatch
        )

    def block_time(self, block: Block) -> LayerProfile:
        """Return what a block takes on one rank; a block of all pieces is the model as it is."""
        if len(block.layers) == len(self.layers):
            return self.unpartitioned
        total = NO_TIME
        for piece in self.layers[block.first_layer : block.first_layer + len(block.layers)]:
            total = total.add(piece)
        return total.scale(1 / block.tp_degree)

    def redistribute(self, costs: Sequence[float], other_costs: Sequence[float]) -> BatchSizeProfile:
        """Return the point for the pieces of another cut, given the counted work of both; see :func:`shared_out`."""
        columns = zip(*(astuple(piece) for piece in self.layers), strict=True)
        rows = zip(*(redistribute_by_cost(column, costs, other_costs) for column in columns), strict=True)
        return replace(self, layers=tuple(LayerProfile(*row) for row in rows))

    def scale(self, factor: float) -> BatchSizeProfile:
        """Return all figures times a factor."""
        return self._combine(lambda one, _: one.scale(factor), self)

    def scale_seconds(self, factor: float) -> BatchSizeProfile:
        """Return the point with all its seconds times a factor."""
        return self._combine(lambda one, _: one.scale_seconds(factor), self)

    def add(self, other: BatchSizeProfile) -> BatchSizeProfile:
        """Return the sums of all figures."""
        return self._combine(LayerProfile.add, other)

    def elementwise_max(self, other: BatchSizeProfile) -> BatchSizeProfile:
        """Return the larger one of each two figures."""
        return self._combine(LayerProfile.elementwise_max, other)

    def _combine(
        self, of: Callable[[LayerProfile, LayerProfile], LayerProfile], other: BatchSizeProfile
    ) -> BatchSizeProfile:
        alone = (
            None
            if self.single_microbatch is None or other.single_microbatch is None
            else of(self.single_microbatch, other.single_microbatch)
        )
        pieces = tuple(map(of, self.layers, other.layers))
        return replace(
            self, layers=pieces, unpartitioned=of(self.unpartitioned, other.unpartitioned), single_microbatch=alone
        )


@dataclass(frozen=True, slots=True)
class Overheads:
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
    single_microbatch_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerKey:
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
class ProfiledOn:
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
class ModelProfile:
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
    layers: tuple[LayerKey, ...]
    params: tuple[tuple[str, int], ...]
    profiled_on: ProfiledOn
    batch_sizes: tuple[BatchSizeProfile, ...]
    update_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    overheads: Overheads = Overheads()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(size for _, size in self.params)

    def scale(self, factor: float) -> ModelProfile:
        """Return what all of it takes on a machine on which everything takes so many times as long."""
        return replace(
            self,
            batch_sizes=tuple(point.scale_seconds(factor) for point in self.batch_sizes),
            update_s_per_byte=factor * self.update_s_per_byte,
            add_s_per_byte=factor * self.add_s_per_byte,
            overheads=Overheads(*(factor * seconds for seconds in astuple(self.overheads))),
        )

    def at_microbatch_size(self, samples: int) -> BatchSizeProfile:
        """Return what microbatches of this size take: as measured, on the line between two sizes, else in proportion.

        Below the smallest size it is on the line through the two smallest, if that is more: weights are read however
        few samples there are.

        Args:
            samples: in a microbatch, at least 1.
        """
        below = [point for point in self.batch_sizes if point.samples <= samples]
        above = [point for point in self.batch_sizes if point.samples >= samples]
        if not above or (not below and len(above) == 1):
            nearest = (below or above)[-1]
            return replace(nearest.scale(samples / nearest.samples), samples=samples)
        low, high = (below[-1], above[0]) if below else (above[0], above[1])
        if low.samples == samples:
            return low
        share = (samples - low.samples) / (high.samples - low.samples)
        line = low.scale(1 - share).add(high.scale(share))
        if not below:
            line = line.elementwise_max(low.scale(samples / low.samples))
        return replace(line, samples=samples)

    def match_to(self, model: ModelSpec) -> ModelProfile:
        """Return the times of a model's own pieces.

        It may be cut into other pieces than those that were timed, as a chain of modules is for slices: each gets what
        is due to its part of the counted work.

        Raises:
            PlanError: it is another model; the message names what tells the two apart.
        """
        difference = _describe_difference(self, model)
        if difference:
            raise PlanError(
                f"the timing is of {self.model}, and this is another model, or the same on inputs of another shape: "
                f"{difference}; times are of the model they were measured on: profile this one, with `counterpoint "
                "profile JOB` or counterpoint.profile(model, inputs)"
            )
        pieces = layer_keys(model)
        if [one.name for one in pieces] == [one.name for one in self.layers]:
            return self
        costs = [one.cost for one in self.layers], [one.cost for one in pieces]
        return replace(self, layers=pieces, batch_sizes=tuple(point.redistribute(*costs) for point in self.batch_sizes))

    def with_measured_costs(self, model: ModelSpec, samples: int) -> ModelSpec:
        """Return a model whose pieces cost what they take in seconds per sample, forward and backward, and the loss.

        Cuts are then balanced by seconds.

        Args:
            model: the one that was timed.
            samples: in a microbatch.

        Raises:
            PlanError: it is another model.
        """
        times = self.match_to(model).at_microbatch_size(samples).layers
        weighed = [replace(piece, cost=time.seconds / samples) for piece, time in zip(model.layers, times, strict=True)]
        blocks = (
            replace(one, layers=tuple(weighed[one.first_layer : one.first_layer + len(one.layers)]))
            for one in model.blocks
        )
        return replace(model, blocks=tuple(blocks))


def layer_keys(model: ModelSpec) -> tuple[LayerKey, ...]:
    """Return what the pieces of a model are known by; frozen parameters are nobody's."""
    sizes = {param.name: param.num_bytes for param in model.params}
    return tuple(
        LayerKey(piece.name, sum(sizes.get(name, 0) for name in piece.params), piece.cost, piece.output_bytes)
        for piece in model.layers
    )


def param_sizes(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Return the names of all parameters of a model, and their bytes."""
    return tuple((param.name, param.num_bytes) for param in model.params)


def redistribute_by_cost(values: Sequence[float], costs: Sequence[float], other_costs: Sequence[float]) -> list[float]:
    """Return the figures of the pieces of another cut of a model: each has those of the work that it covers.

    Args:
        figures: of each piece, in order.
        costs: its counted work.
        others: the counted work of the pieces of the other cut, in order.

    Example:
        >>> shared_out([1.0, 3.0], [10.0, 10.0], [5.0, 15.0])
        [0.5, 3.5]
    """
    total, other_total = sum(costs), sum(other_costs)
    if not total or not other_total:
        return [sum(values) / len(other_costs)] * len(other_costs)
    ends = [0.0, *(end / total for end in accumulate(costs))]
    sums = [0.0, *accumulate(values)]

    def until(part: float) -> float:
        """Return what belongs to the first part of the work."""
        at = max(1, min(bisect_left(ends, part - ROUNDING), len(ends) - 1))
        width = ends[at] - ends[at - 1]
        share = min((part - ends[at - 1]) / width, 1.0) if width else 1.0
        return sums[at - 1] + share * (sums[at] - sums[at - 1])

    stops = [until(end / other_total) for end in accumulate(other_costs)]
    stops[-1] = sums[-1]
    return [stop - start for start, stop in pairwise([0.0, *stops])]


def _describe_difference(profile: ModelProfile, model: ModelSpec) -> str:
    """Return in words what tells the timed model from another one; nothing where they are the same."""
    mine, theirs = profile.params, param_sizes(model)
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"it has {one[0]} with {one[1]} bytes, where this model has {other[0]} with {other[1]}"
    if len(mine) != len(theirs):
        return f"it has {len(mine)} parameters, but this model has {len(theirs)}"
    made = profile.layers[-1].output_bytes, model.layers[-1].output_bytes
    return (
        f"its output has {made[0]} bytes per sample, but that of this model has {made[1]}" if len(set(made)) > 1 else ""
    )


FORMAT_VERSION = 3
FORMAT_NAME = "counterpoint profile"
T = TypeVar("T")
SIGNED_FIELDS = {"accumulate_s"}
"""Figures that are differences."""


def format_profile(profile: ModelProfile) -> str:
    """Return a timing as JSON, which :func:`parse_profile` reads as an equal one.

    Example:
        >>> from counterpoint.model.model_profile import PieceTime
        >>> took = PieceTime(1e-3, 2e-3, 1e-3, 1e-3)
        >>> timing = Timing(
        ...     "Linear", (Known("0", 16, 8.0, 4),), (("0.weight", 16),), Machine("a core"), (Point(1, (took,), took),)
        ... )
        >>> read_timing(write_timing(timing)) == timing
        True
    """
    return json.dumps({FORMAT_NAME: FORMAT_VERSION, **asdict(profile)}, indent=1) + "\n"


def profile_path_for(plan: Path) -> Path:
    """Return where the timing stands by which a plan in a file was ranked and cut.

    Example:
        >>> file_beside(Path("plan.yaml")).name
        'plan.profile.json'
    """
    return plan.with_suffix(".profile.json")


def parse_profile(text: str) -> ModelProfile:
    """Return the timing that a text holds.

    Raises:
        PlanError: it is none, or of another version, or a figure in it cannot be.
    """
    try:
        loaded: Any = json.loads(text)
    except ValueError as wrong:
        raise PlanError(f"this is no timing: {wrong}; `counterpoint profile JOB --out FILE` writes one") from None
    if not isinstance(loaded, dict) or FORMAT_NAME not in loaded:
        raise PlanError(
            f"this is no timing: it has no {FORMAT_NAME!r}; `counterpoint profile JOB --out FILE` writes one"
        )
    if loaded[FORMAT_NAME] != FORMAT_VERSION:
        raise PlanError(
            f"the timing is of version {loaded[FORMAT_NAME]!r}, but only version {FORMAT_VERSION} can be read; profile the model anew"
        )
    try:
        return _build_profile(loaded)
    except (KeyError, TypeError, ValueError) as wrong:
        found = f"no {wrong}" if isinstance(wrong, KeyError) else wrong
        raise PlanError(f"this is no whole timing: {found}; profile the model again") from None


def load_profile(path: Path) -> ModelProfile:
    """Return the timing that a file holds.

    Raises:
        PlanError: it cannot be read, or :func:`parse_profile` refuses it.
    """
    try:
        return parse_profile(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}; give what `counterpoint profile --out` wrote"
        ) from None


def _build_profile(loaded: dict[str, Any]) -> ModelProfile:
    machine = loaded["profiled_on"]
    points = tuple(_build_batch_size(entry) for entry in loaded["batch_sizes"])
    pieces = tuple(
        LayerKey(
            str(entry["name"]), int(entry["weight_bytes"]), _parse_number(entry["cost"]), int(entry["output_bytes"])
        )
        for entry in loaded["layers"]
    )
    sizes = [point.samples for point in points]
    if not points or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"its sizes of microbatches are {sizes}, which do not grow from 1 or more")
    for point in points:
        if len(point.layers) != len(pieces):
            raise ValueError(f"it has {len(pieces)} pieces, but for {point.samples} samples {len(point.layers)} times")
    return ModelProfile(
        model=str(loaded["model"]),
        layers=pieces,
        params=tuple((str(name), int(size)) for name, size in loaded["params"]),
        profiled_on=ProfiledOn(
            str(machine["device"]), int(machine["threads"]), str(machine["optimizer"]), bool(machine["is_measured"])
        ),
        batch_sizes=points,
        update_s_per_byte=_parse_number(loaded["update_s_per_byte"]),
        add_s_per_byte=_parse_number(loaded["add_s_per_byte"]),
        overheads=_parse_fields(Overheads, loaded["overheads"]),
    )


def _build_batch_size(entry: dict[str, Any]) -> BatchSizeProfile:
    pieces = tuple(_parse_fields(LayerProfile, one) for one in entry["layers"])
    alone = entry["single_microbatch"]
    return BatchSizeProfile(
        int(entry["samples"]),
        pieces,
        _parse_fields(LayerProfile, entry["unpartitioned"]),
        None if alone is None else _parse_fields(LayerProfile, alone),
    )


def _parse_fields(kind: type[T], entry: dict[str, Any]) -> T:
    """Return a value all of whose fields are figures."""
    return kind(
        **{
            field.name: _parse_number(entry[field.name], is_signed=field.name in SIGNED_FIELDS)
            for field in fields(kind)  # type: ignore[arg-type]
        }
    )


def _parse_number(value: object, *, is_signed: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{value!r} is no time and no size; both are finite")
    if value < 0 and not is_signed:
        raise ValueError(f"{value!r} is no time and no size; both are finite and at least 0")
    return float(value)
