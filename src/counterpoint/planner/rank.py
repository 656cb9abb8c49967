"""Plans in the order of their predicted step time, with what the time goes to and why each loses to the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from counterpoint.compiler.compile import Compiled, compile, value_bytes  # noqa: A004 - read as cp.compile
from counterpoint.drawing.scale import format_seconds
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.playing import Playing
from counterpoint.planner.settled import settled
from counterpoint.planner.unlike import balanced
from counterpoint.program.instruction import Value
from counterpoint.program.trace import Trace
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.memory import peak_bytes
from counterpoint.strategies.written import blamed
from counterpoint.world.cluster import Cluster, Link

FREE = Link(latency_s=0.0, bytes_per_s=float("inf"))
ROUNDING = 1e-9
"""Times that differ by less than this part of a step are equal."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says about one step of a plan; the four parts of ``step_s`` add up to it.

    Args:
        plan: which one.
        samples_per_micro: so that all plans take the same global batch.
        step_s: seconds of one step.
        compute_s: seconds of forward and backward on a rank, on average.
        communication_s: seconds by which free links would make the step shorter: communication that nothing hides.
        idle_s: seconds that a rank would still wait with free links, on average: the bubble, or a server's leisure.
        update_s: seconds that a rank updates weights, on average.
        sent_bytes: what the busiest rank sends.
        memory_bytes: what the fullest rank holds at most.
        room_bytes: what a rank can hold.
        is_synchronous: whether it keeps solo's numbers.
        rank_bytes: what each rank holds at most.
    """

    plan: Plan
    samples_per_micro: int
    step_s: float
    compute_s: float
    communication_s: float
    idle_s: float
    update_s: float
    sent_bytes: int
    memory_bytes: int
    room_bytes: int
    is_synchronous: bool
    rank_bytes: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether no rank needs more memory than it has."""
        return self.memory_bytes <= self.room_bytes

    def why_not(self, first: Prediction) -> str:
        """Return why the plan loses to the first one: the largest difference, in words; nothing for the first itself.

        Example: ``1.2 ms more of communication that nothing hides``.
        """
        if self == first:
            return ""
        if not self.fits:
            return f"does not fit: {self.memory_bytes} of {self.room_bytes} bytes"
        more_s, what = max(
            (self.communication_s - first.communication_s, "communication that nothing hides"),
            (self.idle_s - first.idle_s, "waiting"),
            (self.compute_s - first.compute_s, "computing"),
            (self.update_s - first.update_s, "updating"),
        )
        if self.step_s - first.step_s > ROUNDING * first.step_s:
            return f"{format_seconds(more_s)} more of {what}"
        if self.memory_bytes > first.memory_bytes:
            return "as fast, but holds more"
        return "as fast, but sends more" if self.sent_bytes > first.sent_bytes else "as fast, but less simple"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plan that cannot be carried out, and why."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """The plans that can be carried out, the fastest first and those that do not fit last; then the others."""

    predictions: tuple[Prediction, ...]
    refusals: tuple[Refusal, ...]


def named(plan: Plan) -> str:
    """Return a plan with its microbatches, if it has more than one."""
    return f"{plan}" + (f" with {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else "")


def rank_plans(
    plans: Iterable[Plan], model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None
) -> Ranking:
    """Return plans by the predicted seconds for one and the same global batch.

    Of plans that are equally fast the one that holds less comes first, then the one that sends less, then the one
    that came first. The order is the same wherever it is computed.

    Args:
        plans: what is compared.
        model: the model in its finest blocks; plans that need no cut get it in one.
        cluster: where they would run.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
    """
    predictions, refusals = [], []
    for plan in plans:
        try:
            predictions.append(predict(plan, model, cluster, batch_size=batch_size, timing=timing))
        except PlanError as error:
            refusals.append(Refusal(plan, str(error).splitlines()[0]))
    return Ranking(tuple(sorted(predictions, key=_place)), tuple(refusals))


def merged(one: Ranking, other: Ranking) -> Ranking:
    """Return two rankings for one model as one, in which a plan that both have stands once."""
    predictions = {found.plan: found for found in (*one.predictions, *other.predictions)}
    refusals = {refused.plan: refused for refused in (*one.refusals, *other.refusals)}
    return Ranking(tuple(sorted(predictions.values(), key=_place)), tuple(refusals.values()))


def _place(found: Prediction) -> tuple[bool, float, int, int]:
    return not found.fits, float(f"{found.step_s:.9g}"), found.memory_bytes, found.sent_bytes


def predict(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None
) -> Prediction:
    """Return what the simulator says about a plan; where ranks differ in speed, of one cut by their speeds.

    With a timing, pipelines are cut by its seconds, and memory is what was kept. The laws are not proved for it; they
    are before it runs.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    timing = fitted_to(plan, model, timing)
    compiled, samples = compiled_for(plan, model, cluster, batch_size, timing)
    spent, free = Playing(compiled, samples, timing).spend((cluster, _with_free_links(cluster)))
    step_s, more_s = spent.step_s, spent.step_s - free.step_s
    communication_s = more_s if more_s > ROUNDING * step_s else 0.0
    idle_s = step_s - communication_s - spent.compute_s - spent.update_s
    rank_bytes = _rank_bytes(compiled, samples, timing)
    return Prediction(
        plan=compiled.plan,
        samples_per_micro=samples,
        step_s=step_s,
        compute_s=spent.compute_s,
        communication_s=communication_s,
        idle_s=idle_s if idle_s > ROUNDING * step_s else 0.0,
        update_s=spent.update_s,
        sent_bytes=int(max(compiled.sent_bytes())),
        memory_bytes=max(rank_bytes),
        room_bytes=cluster.device.memory_bytes,
        is_synchronous=compiled.is_synchronous,
        rank_bytes=rank_bytes,
    )


def foresee(plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None) -> Trace:
    """Return the step that :func:`predict` sums up, word by word; of steps that are not all alike the last kind.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    timing = fitted_to(plan, model, timing)
    compiled, samples = compiled_for(plan, model, cluster, batch_size, timing)
    return Playing(compiled, samples, timing).show(cluster)


def hold(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None
) -> tuple[int, ...]:
    """Return what each rank would hold at most, without playing a step.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    timing = fitted_to(plan, model, timing)
    compiled, samples = compiled_for(plan, model, cluster, batch_size, timing)
    return _rank_bytes(compiled, samples, timing)


def compiled_for(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, timing: Timing | None = None
) -> tuple[Compiled, int]:
    """Return a plan's program, unproved, and the samples of its microbatches; with a timing, cut by its seconds.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    plan, given, samples = _cut_as_it_runs(plan, model, cluster, batch_size, timing)
    return compile(plan, given, samples_per_micro=samples, proves=False), samples


def settle(plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None) -> Plan:
    """Return the plan with its cut written into it where that depends on more than the model: on speeds, or a timing.

    Raises:
        PlanError: it cannot be cut for this model or this batch, or the timing is of another model.
    """
    return _cut_as_it_runs(plan, model, cluster, batch_size, fitted_to(plan, model, timing))[0]


def _cut_as_it_runs(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, timing: Timing | None
) -> tuple[Plan, ModelSpec, int]:
    """Return a plan with its cut, the model as it gets it, and the samples of its microbatches."""
    plan.require_batch(batch_size)
    samples = batch_size // plan.num_micros
    given = model_for(plan, model, samples, timing)
    plan = balanced(plan, given, cluster)
    return (plan if timing is None else settled(plan, given)), given, samples


def fitted_to(plan: Plan, model: ModelSpec, timing: Timing | None) -> Timing | None:
    """Return the times of the pieces of a model as a plan gets it: those given, or else those that the plan came with.

    Raises:
        PlanError: the timing is of another model.
    """
    if timing is None and plan.timing is not None:
        with blamed(plan.written, "timing"):
            return plan.timing.fitted(_cut_for(plan, model))
    return None if timing is None else timing.fitted(_cut_for(plan, model))


def model_for(plan: Plan, model: ModelSpec, samples: int, timing: Timing | None = None) -> ModelSpec:
    """Return a model as a plan gets it: in one block where nothing has to be cut, with seconds where it was timed.

    Raises:
        PlanError: the timing is of another model.
    """
    given = _cut_for(plan, model)
    weighed = given if timing is None else timing.weigh(given, samples)
    return weighed if plan.need != "none" else in_one_block(weighed)


def _cut_for(plan: Plan, model: ModelSpec) -> ModelSpec:
    return model if plan.need == "regions" else model.unsliced


def _rank_bytes(compiled: Compiled, samples: int, timing: Timing | None) -> tuple[int, ...]:
    return peak_bytes(compiled.turns[-1].playable, held_bytes(compiled.model, samples, timing))


def in_one_block(model: ModelSpec) -> ModelSpec:
    """Return the model as one block, as the runtime takes it where nothing has to be cut."""
    return replace(model, blocks=(Block(model.pieces, 0),))


def _with_free_links(cluster: Cluster) -> Cluster:
    levels = tuple(replace(level, link=FREE) for level in cluster.levels)
    return replace(cluster, link=FREE, levels=levels)


def held_bytes(model: ModelSpec, samples: int, timing: Timing | None = None) -> Sizes:
    """Return the bytes of values where they are kept: for its backward, a block keeps what was seen to stay.

    Where nothing was, it keeps what each of its pieces gave.
    """
    point = timing.at(samples) if timing is not None else None

    @cache
    def size_of(value: Value, code: str) -> int:
        if value.name == "g":
            block = model.blocks[value.blocks[0]]
            if point is not None:
                return int(point.over(block).kept_bytes)
            return samples * sum(piece.output_bytes for piece in block.pieces)
        return value_bytes(value, model, samples, code)

    return lambda value, code="": size_of(Value(value.name, value.blocks), code)  # the microbatch changes no size
