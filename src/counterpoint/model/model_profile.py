"""Profiles: run times of a model's layers on one device, and their JSON file.

Times that grow with the work are kept per layer, fixed overheads separately: a stage runs its blocks in one call, so
that it pays the overhead of a call once and the time of each layer.
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
from counterpoint.file_reader import read_regular_text
from counterpoint.json_reader import parse_json_file
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.optim.validation import renamed_hint, shorten


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Time and memory of one layer (or a run of layers) for one microbatch, without the fixed overhead of a call.

    Args:
        forward_s: seconds of the forward.
        backward_s: seconds of the whole backward.
        backward_input_s: seconds of the half of a split backward that computes input gradients.
        backward_weight_s: seconds of the other half.
        output_bytes: size of its outputs.
        saved_bytes: size of the activations saved from forward to backward, without its inputs, which count for their
            producer.
        accumulate_s: additional seconds of a backward that accumulates into the gradient of an earlier microbatch;
            negative if that is faster than writing a new gradient.
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
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def scale(self, factor: float) -> LayerProfile:
        """Return all values times a factor."""
        return LayerProfile(*(factor * figure for figure in astuple(self)))

    def scale_seconds(self, factor: float) -> LayerProfile:
        """Return the profile with all times multiplied by a factor."""
        return replace(self.scale(factor), output_bytes=self.output_bytes, saved_bytes=self.saved_bytes)

    def add(self, other: LayerProfile) -> LayerProfile:
        """Return the sums of all values."""
        return LayerProfile(*map(add, astuple(self), astuple(other)))

    def elementwise_max(self, other: LayerProfile) -> LayerProfile:
        """Return the larger one of each two values."""
        return LayerProfile(*map(max, astuple(self), astuple(other)))


ROUNDING = 1e-9
"""Positions in a model's work, as fractions, that differ by less are equal."""

NO_TIME = LayerProfile(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BatchSizeProfile:
    """The profile of a model for microbatches of one size.

    Args:
        samples: samples per microbatch.
        layers: one profile per layer; the last one includes the loss and its backward.
        unpartitioned: the profile of the whole model, called without splitting it, with the loss.
        single_microbatch: the same if the step has one microbatch only, so that batch norm has nothing to combine.
    """

    samples: int
    layers: tuple[LayerProfile, ...]
    unpartitioned: LayerProfile
    single_microbatch: LayerProfile | None = None

    def for_single_microbatch(self) -> BatchSizeProfile:
        """Return the profile for steps with one microbatch."""
        if self.single_microbatch is None:
            return self
        factor = self.single_microbatch.seconds / self.unpartitioned.seconds if self.unpartitioned.seconds else 1.0
        return replace(
            self,
            layers=tuple(layer.scale_seconds(factor) for layer in self.layers),
            unpartitioned=self.single_microbatch,
        )

    def block_time(self, block: Block) -> LayerProfile:
        """Return the profile of a block on one rank; a block of all layers is the unpartitioned model."""
        if len(block.layers) == len(self.layers):
            return self.unpartitioned
        total = NO_TIME
        for layer in self.layers[block.first_layer : block.first_layer + len(block.layers)]:
            total = total.add(layer)
        return total.scale(1 / block.tp_degree)

    def redistribute(self, costs: Sequence[float], other_costs: Sequence[float]) -> BatchSizeProfile:
        """Return the profile for another split of the model, given the cost of both.

        See :func:`redistribute_by_cost`.
        """
        columns = zip(*(astuple(layer) for layer in self.layers), strict=True)
        rows = zip(*(redistribute_by_cost(column, costs, other_costs) for column in columns), strict=True)
        return replace(self, layers=tuple(LayerProfile(*row) for row in rows))

    def scale(self, factor: float) -> BatchSizeProfile:
        """Return all values times a factor."""
        return self._combine(lambda layer, _: layer.scale(factor), self)

    def scale_seconds(self, factor: float) -> BatchSizeProfile:
        """Return the profile with all times multiplied by a factor."""
        return self._combine(lambda layer, _: layer.scale_seconds(factor), self)

    def add(self, other: BatchSizeProfile) -> BatchSizeProfile:
        """Return the sums of all values."""
        return self._combine(LayerProfile.add, other)

    def elementwise_max(self, other: BatchSizeProfile) -> BatchSizeProfile:
        """Return the larger one of each two values."""
        return self._combine(LayerProfile.elementwise_max, other)

    def _combine(
        self, combine: Callable[[LayerProfile, LayerProfile], LayerProfile], other: BatchSizeProfile
    ) -> BatchSizeProfile:
        single_microbatch = (
            None
            if self.single_microbatch is None or other.single_microbatch is None
            else combine(self.single_microbatch, other.single_microbatch)
        )
        layers = tuple(map(combine, self.layers, other.layers))
        return replace(
            self,
            layers=layers,
            unpartitioned=combine(self.unpartitioned, other.unpartitioned),
            single_microbatch=single_microbatch,
        )


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times that do not grow with the work.

    Args:
        forward_s: seconds of a forward call of some blocks, in addition to the blocks.
        backward_s: likewise of a backward call.
        update_s: seconds of an optimizer step, in addition to the time per byte.
        step_s: seconds of a step, in addition to calls and the update.
        single_microbatch_step_s: likewise if the step has one microbatch, so that batch norm statistics are not
            combined.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    step_s: float = 0.0
    single_microbatch_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CompiledTimes:
    """The times of a model whose forwards ``torch.compile`` compiles.

    Args:
        compilation: how, as in a plan.
        compile_s: seconds that compiling the whole model takes, for one size of microbatches.
        batch_sizes: one profile per size of microbatches, those of the model without compilation.
        overheads: times that do not grow with the work.
    """

    compilation: str
    compile_s: float
    batch_sizes: tuple[BatchSizeProfile, ...]
    overheads: Overheads = Overheads()


@dataclass(frozen=True, slots=True)
class LayerKey:
    """Identity of a layer.

    Args:
        name: its name.
        weight_bytes: size of the parameters that it reads.
        cost: its counted work.
        output_bytes: bytes per sample of what it produces.
    """

    name: str
    weight_bytes: int
    cost: float
    output_bytes: int


@dataclass(frozen=True, slots=True)
class ProfiledOn:
    """Where a model was profiled.

    Args:
        device: name of the device.
        threads: threads per rank.
        optimizer: name of the optimizer.
        is_measured: whether the model was run; otherwise its operations were counted.
        precision: what the model computed in, as a plan writes it; "" for the dtypes of its parameters.
    """

    device: str
    threads: int = 1
    optimizer: str = ""
    is_measured: bool = True
    precision: str = ""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The profile of one model on one machine, for one or more sizes of microbatches.

    Args:
        model: name of the model.
        layers: what identifies its layers.
        params: names and sizes of all parameters.
        profiled_on: the machine.
        batch_sizes: one profile per size of microbatches, the smallest first; at least one.
        update_s_per_byte: seconds of an update per byte of parameters.
        add_s_per_byte: seconds to add one vector to another, per byte of parameters.
        overheads: times that do not grow with the work.
        compiled: the times of the compiled model; None if these were not measured.
    """

    model: str
    layers: tuple[LayerKey, ...]
    params: tuple[tuple[str, int], ...]
    profiled_on: ProfiledOn
    batch_sizes: tuple[BatchSizeProfile, ...]
    update_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    overheads: Overheads = Overheads()
    compiled: CompiledTimes | None = None

    @property
    def weight_bytes(self) -> int:
        """Size of all parameters."""
        return sum(size for _, size in self.params)

    def scale(self, factor: float) -> ModelProfile:
        """Return the profile of a machine on which everything takes ``factor`` times as long."""
        return replace(
            self,
            batch_sizes=tuple(profile.scale_seconds(factor) for profile in self.batch_sizes),
            update_s_per_byte=factor * self.update_s_per_byte,
            add_s_per_byte=factor * self.add_s_per_byte,
            overheads=Overheads(*(factor * seconds for seconds in astuple(self.overheads))),
            compiled=None if self.compiled is None else _scale_compiled(self.compiled, factor),
        )

    def for_compilation(self, compilation: object) -> ModelProfile:
        """Return the profile with the times of the model compiled like this, if these were measured.

        Args:
            compilation: of a plan; None to run the model eagerly.
        """
        if compilation is None or self.compiled is None or self.compiled.compilation != str(compilation):
            return self
        return replace(self, batch_sizes=self.compiled.batch_sizes, overheads=self.compiled.overheads)

    def microbatches_to_repay(self, samples: int) -> float:
        """Return how many microbatches pay back the time of compiling, on one rank; infinite if they never do.

        Args:
            samples: of a microbatch.
        """
        if self.compiled is None:
            return math.inf
        compiled = self.for_compilation(self.compiled.compilation)
        eager_s, compiled_s = (
            one.at_microbatch_size(samples).unpartitioned.seconds + one.overheads.forward_s + one.overheads.backward_s
            for one in (self, compiled)
        )
        return math.ceil(self.compiled.compile_s / (eager_s - compiled_s)) if compiled_s < eager_s else math.inf

    def at_microbatch_size(self, samples: int) -> BatchSizeProfile:
        """Return the profile for microbatches of one size, interpolated linearly between measured sizes, else scaled.

        Below the smallest size it is extrapolated from the two smallest if that is more than proportional scaling
        gives: weights are read however few samples there are.

        Args:
            samples: samples per microbatch, at least 1.
        """
        below = [profile for profile in self.batch_sizes if profile.samples <= samples]
        above = [profile for profile in self.batch_sizes if profile.samples >= samples]
        if not above or (not below and len(above) == 1):
            nearest = (below or above)[-1]
            return replace(nearest.scale(samples / nearest.samples), samples=samples)
        low, high = (below[-1], above[0]) if below else (above[0], above[1])
        if low.samples == samples:
            return low
        fraction = (samples - low.samples) / (high.samples - low.samples)
        interpolated = low.scale(1 - fraction).add(high.scale(fraction))
        if not below:
            interpolated = interpolated.elementwise_max(low.scale(samples / low.samples))
        return replace(interpolated, samples=samples)

    def match_to(self, model: ModelSpec) -> ModelProfile:
        """Return the profile for the layers of a model.

        The model may be split into other layers than the profiled ones, as a chain of modules is for tensor
        parallelism; each layer then gets the times that belong to its share of the counted work.

        Raises:
            PlanError: it is another model; the message names the difference.
        """
        difference = _describe_difference(self, model)
        if difference:
            raise PlanError(
                f"the profile is of {self.model}, but this is another model, or the same with inputs of another shape: "
                f"{difference}; a profile is valid for the profiled model only: profile this one with `counterpoint "
                "profile JOB` or counterpoint.profile(model, inputs)"
            )
        layers = layer_keys(model)
        if [layer.name for layer in layers] == [layer.name for layer in self.layers]:
            return self
        costs = [layer.cost for layer in self.layers], [layer.cost for layer in layers]
        compiled = self.compiled
        if compiled is not None:
            batch_sizes = tuple(profile.redistribute(*costs) for profile in compiled.batch_sizes)
            compiled = replace(compiled, batch_sizes=batch_sizes)
        return replace(
            self,
            layers=layers,
            batch_sizes=tuple(profile.redistribute(*costs) for profile in self.batch_sizes),
            compiled=compiled,
        )

    def with_measured_costs(self, model: ModelSpec, samples: int) -> ModelSpec:
        """Return a model whose layers cost the seconds per sample that forward, backward and loss take.

        Partitions of it are then balanced by time.

        Args:
            model: the profiled model.
            samples: samples per microbatch.

        Raises:
            PlanError: it is another model.
        """
        times = self.match_to(model).at_microbatch_size(samples).layers
        weighted = [
            replace(layer, cost=time.seconds / samples) for layer, time in zip(model.layers, times, strict=True)
        ]
        blocks = (
            replace(block, layers=tuple(weighted[block.first_layer : block.first_layer + len(block.layers)]))
            for block in model.blocks
        )
        return replace(model, blocks=tuple(blocks))


def _scale_compiled(compiled: CompiledTimes, factor: float) -> CompiledTimes:
    return replace(
        compiled,
        compile_s=factor * compiled.compile_s,
        batch_sizes=tuple(profile.scale_seconds(factor) for profile in compiled.batch_sizes),
        overheads=Overheads(*(factor * seconds for seconds in astuple(compiled.overheads))),
    )


def layer_keys(model: ModelSpec) -> tuple[LayerKey, ...]:
    """Return what identifies the layers of a model; frozen parameters count for no layer."""
    sizes = {param.name: param.num_bytes for param in model.params}
    return tuple(
        LayerKey(layer.name, sum(sizes.get(name, 0) for name in layer.params), layer.cost, layer.output_bytes)
        for layer in model.layers
    )


def param_sizes(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """Return the names and sizes of all parameters of a model."""
    return tuple((param.name, param.num_bytes) for param in model.params)


def redistribute_by_cost(values: Sequence[float], costs: Sequence[float], other_costs: Sequence[float]) -> list[float]:
    """Distribute the values of a model's layers over the layers of another split, in proportion to the work they cover.

    Args:
        values: one per layer, in order.
        costs: the work of each layer.
        other_costs: the work of each layer of the other split, in order.

    Example:
        >>> redistribute_by_cost([1.0, 3.0], [10.0, 10.0], [5.0, 15.0])
        [0.5, 3.5]
    """
    total, other_total = sum(costs), sum(other_costs)
    if not total or not other_total:
        return [sum(values) / len(other_costs)] * len(other_costs)
    ends = [0.0, *(end / total for end in accumulate(costs))]
    sums = [0.0, *accumulate(values)]

    def until(part: float) -> float:
        """Return the cumulative value of the first fraction of the work."""
        at = max(1, min(bisect_left(ends, part - ROUNDING), len(ends) - 1))
        width = ends[at] - ends[at - 1]
        fraction = min((part - ends[at - 1]) / width, 1.0) if width else 1.0
        return sums[at - 1] + fraction * (sums[at] - sums[at - 1])

    stops = [until(end / other_total) for end in accumulate(other_costs)]
    stops[-1] = sums[-1]
    return [stop - start for start, stop in pairwise([0.0, *stops])]


def _describe_difference(profile: ModelProfile, model: ModelSpec) -> str:
    """Return what distinguishes the profiled model from another one; "" if they are the same."""
    own_params, model_params = profile.params, param_sizes(model)
    for own, other in zip(own_params, model_params, strict=False):
        if own != other:
            return f"it has {own[0]} with {own[1]} bytes, where this model has {other[0]} with {other[1]}"
    if len(own_params) != len(model_params):
        return f"it has {len(own_params)} parameters, but this model has {len(model_params)}"
    output_bytes = profile.layers[-1].output_bytes, model.layers[-1].output_bytes
    return (
        f"its output has {output_bytes[0]} bytes per sample, but that of this model has {output_bytes[1]}"
        if len(set(output_bytes)) > 1
        else ""
    )


FORMAT_VERSION = 3
FORMAT_NAME = "counterpoint profile"
RENAMED_FORMATS = {"counterpoint timing": FORMAT_NAME}
"""Earlier names of the format, whose files have other fields."""
T = TypeVar("T")
SIGNED_FIELDS = {"accumulate_s"}
"""Fields that may be negative."""


def format_profile(profile: ModelProfile) -> str:
    """Format a profile as JSON, which :func:`parse_profile` parses.

    Example:
        >>> from counterpoint.model.model_profile import LayerProfile
        >>> layer = LayerProfile(1e-3, 2e-3, 1e-3, 1e-3)
        >>> keys, params = (LayerKey("0", 16, 8.0, 4),), (("0.weight", 16),)
        >>> profile = ModelProfile("Linear", keys, params, ProfiledOn("cpu"), (BatchSizeProfile(1, (layer,), layer),))
        >>> parse_profile(format_profile(profile)) == profile
        True
    """
    return json.dumps({FORMAT_NAME: FORMAT_VERSION, **asdict(profile)}, indent=1) + "\n"


def profile_path_for(plan: Path) -> Path:
    """Return the path of the profile that belongs to a plan file.

    Example:
        >>> profile_path_for(Path("plan.yaml")).name
        'plan.profile.json'
    """
    return plan.with_suffix(".profile.json")


def parse_profile(text: str) -> ModelProfile:
    """Parse a profile.

    Raises:
        PlanError: the text is not a profile, or of another version, or a value is out of range.
    """
    try:
        loaded: Any = parse_json_file(text.encode())
    except ValueError as error:
        raise PlanError(f"this is not a profile: {error}; `counterpoint profile JOB --out FILE` writes one") from None
    if not isinstance(loaded, dict) or FORMAT_NAME not in loaded:
        earlier = [name for name in RENAMED_FORMATS if isinstance(loaded, dict) and name in loaded]
        raise PlanError(
            f"this is not a profile: it has no {FORMAT_NAME!r}"
            f"{''.join(renamed_hint(name, RENAMED_FORMATS) for name in earlier)}; "
            "`counterpoint profile JOB --out FILE` writes one"
        )
    if loaded[FORMAT_NAME] != FORMAT_VERSION:
        raise PlanError(
            f"the profile has version {shorten(repr(loaded[FORMAT_NAME]))}, but only version {FORMAT_VERSION} can be "
            "read; profile the model again"
        )
    try:
        return _build_profile(loaded)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problem = shorten(f"no {error}" if isinstance(error, KeyError) else str(error))
        raise PlanError(f"this is not a complete profile: {problem}; profile the model again") from None


def load_profile(path: Path) -> ModelProfile:
    """Load a profile from a file.

    Raises:
        PlanError: the file cannot be read, or :func:`parse_profile` rejects it.
    """
    try:
        text = read_regular_text(path)
    except (OSError, ValueError) as error:  # a ValueError for bytes that are not UTF-8, and for a path with a null byte
        problem = error.strerror if isinstance(error, OSError) else error
        raise PlanError(
            f"{shorten(str(path))} cannot be read: {problem}; give what `counterpoint profile --out` wrote"
        ) from None
    return parse_profile(text)


def _build_profile(loaded: dict[str, Any]) -> ModelProfile:
    machine = loaded["profiled_on"]
    layers = tuple(
        LayerKey(
            str(entry["name"]),
            _parse_size(entry["weight_bytes"]),
            _parse_number(entry["cost"]),
            _parse_size(entry["output_bytes"]),
        )
        for entry in loaded["layers"]
    )
    points, compiled = _build_batch_sizes(loaded, len(layers)), loaded.get("compiled")  # which earlier files lack
    return ModelProfile(
        model=str(loaded["model"]),
        layers=layers,
        params=tuple((str(name), _parse_size(size)) for name, size in loaded["params"]),
        profiled_on=ProfiledOn(
            str(machine["device"]),
            _parse_size(machine["threads"]),
            str(machine["optimizer"]),
            bool(machine["is_measured"]),
            str(machine.get("precision", "")),  # files of earlier versions have none
        ),
        batch_sizes=points,
        update_s_per_byte=_parse_number(loaded["update_s_per_byte"]),
        add_s_per_byte=_parse_number(loaded["add_s_per_byte"]),
        overheads=_parse_fields(Overheads, loaded["overheads"]),
        compiled=None if compiled is None else _build_compiled(compiled, len(layers)),
    )


def _build_compiled(entry: dict[str, Any], num_layers: int) -> CompiledTimes:
    return CompiledTimes(
        str(entry["compilation"]),
        _parse_number(entry["compile_s"]),
        _build_batch_sizes(entry, num_layers),
        _parse_fields(Overheads, entry["overheads"]),
    )


def _build_batch_sizes(entry: dict[str, Any], num_layers: int) -> tuple[BatchSizeProfile, ...]:
    points = tuple(map(_build_batch_size, entry["batch_sizes"]))
    sizes = [profile.samples for profile in points]
    if not points or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"its microbatch sizes are {sizes}, but must be increasing and at least 1")
    for profile in points:
        if len(profile.layers) != num_layers:
            raise ValueError(
                f"it has {num_layers} layers, but for {profile.samples} samples {len(profile.layers)} times"
            )
    return points


def _build_batch_size(entry: dict[str, Any]) -> BatchSizeProfile:
    layers = tuple(_parse_fields(LayerProfile, layer) for layer in entry["layers"])
    single_microbatch = entry["single_microbatch"]
    return BatchSizeProfile(
        _parse_size(entry["samples"]),
        layers,
        _parse_fields(LayerProfile, entry["unpartitioned"]),
        None if single_microbatch is None else _parse_fields(LayerProfile, single_microbatch),
    )


def _parse_fields(kind: type[T], entry: dict[str, Any]) -> T:
    return kind(
        **{
            field.name: _parse_number(entry[field.name], is_signed=field.name in SIGNED_FIELDS)
            for field in fields(kind)  # type: ignore[arg-type]
        }
    )


def _parse_number(value: object, *, is_signed: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{value!r} is not a time or a size; both are finite")
    if value < 0 and not is_signed:
        raise ValueError(f"{value!r} is not a time or a size; both are finite and at least 0")
    return float(value)


def _parse_size(value: object) -> int:
    return int(_parse_number(value))
