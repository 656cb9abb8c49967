"""Plans in the order of their predicted step time, with what the time goes to and why each loses to the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from counterpoint.compiler.compile import Compiled, compile, sizes_in, value_bytes  # noqa: A004 - read as cp.compile
from counterpoint.drawing.scale import format_seconds
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.unlike import balanced
from counterpoint.program.instruction import Value
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.costs import model_costs
from counterpoint.simulator.memory import peak_bytes
from counterpoint.simulator.spent import Spent, spend
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


def rank_plans(plans: Iterable[Plan], model: ModelSpec, cluster: Cluster, *, batch_size: int) -> Ranking:
    """Return plans by the predicted seconds for one and the same global batch.

    Of plans that are equally fast the one that holds less comes first, then the one that sends less, then the one
    that came first. The order is the same wherever it is computed.

    Args:
        plans: what is compared.
        model: the model in its finest blocks; plans that need no cut get it in one.
        cluster: where they would run.
        batch_size: samples of one global batch.
    """
    predictions, refusals = [], []
    for plan in plans:
        try:
            predictions.append(predict(plan, model, cluster, batch_size=batch_size))
        except PlanError as error:
            refusals.append(Refusal(plan, str(error).splitlines()[0]))
    return Ranking(tuple(sorted(predictions, key=_place)), tuple(refusals))


def merged(one: Ranking, other: Ranking) -> Ranking:
    """Return two rankings for one model as one."""
    predictions = sorted((*one.predictions, *other.predictions), key=_place)
    return Ranking(tuple(predictions), one.refusals + other.refusals)


def _place(found: Prediction) -> tuple[bool, float, int, int]:
    return not found.fits, float(f"{found.step_s:.9g}"), found.memory_bytes, found.sent_bytes


def predict(plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int) -> Prediction:
    """Return what the simulator says about a plan; where ranks differ in speed, of one cut by their speeds.

    The laws are not proved for it; they are before it runs.

    Raises:
        PlanError: it cannot be compiled for this model or this batch.
    """
    plan.require_batch(batch_size)
    plan = balanced(plan, model, cluster)
    samples = batch_size // plan.num_micros
    whole = model if plan.need != "none" else _whole(model)
    compiled = compile(plan, whole, samples_per_micro=samples, proves=False)
    unbound = replace(cluster, link=FREE, levels=tuple(replace(level, link=FREE) for level in cluster.levels))
    spent, free = _play(compiled, (cluster, unbound), samples)
    step_s, more_s = spent.step_s, spent.step_s - free.step_s
    communication_s = more_s if more_s > ROUNDING * step_s else 0.0
    idle_s = step_s - communication_s - spent.compute_s - spent.update_s
    return Prediction(
        plan=plan,
        samples_per_micro=samples,
        step_s=step_s,
        compute_s=spent.compute_s,
        communication_s=communication_s,
        idle_s=idle_s if idle_s > ROUNDING * step_s else 0.0,
        update_s=spent.update_s,
        sent_bytes=int(max(compiled.sent_bytes())),
        memory_bytes=max(peak_bytes(compiled.turns[-1].playable, held_bytes(compiled.model, samples))),
        room_bytes=cluster.device.memory_bytes,
        is_synchronous=compiled.is_synchronous,
    )


def _whole(model: ModelSpec) -> ModelSpec:
    """Return the model as one block, as the runtime takes it where nothing has to be cut."""
    return replace(model, blocks=(Block(model.pieces, 0),))


def held_bytes(model: ModelSpec, samples: int) -> Sizes:
    """Return the bytes of values where they are kept: for its backward, a block keeps what each of its pieces gave."""

    @cache
    def size_of(value: Value, code: str) -> int:
        if value.name == "g":
            return samples * sum(piece.output_bytes for piece in model.blocks[value.blocks[0]].pieces)
        return value_bytes(value, model, samples, code)

    return lambda value, code="": size_of(Value(value.name, value.blocks), code)  # the microbatch changes no size


def _play(compiled: Compiled, clusters: Sequence[Cluster], samples: int) -> list[Spent]:
    """Return for each cluster what a step takes; where steps are not all alike, over all of them in the long run."""
    sizes = sizes_in(compiled.model, samples)
    costs = [model_costs(compiled.model, one, sizes, samples_per_micro=samples) for one in clusters]
    played = [(float(turn.share), spend(turn, costs, clusters[0])) for turn in compiled.turns if turn.share]
    return [_mean([(share, found[at]) for share, found in played]) for at in range(len(clusters))]


def _mean(parts: Sequence[tuple[float, Spent]]) -> Spent:
    return Spent(
        sum(share * spent.step_s for share, spent in parts),
        sum(share * spent.compute_s for share, spent in parts),
        sum(share * spent.update_s for share, spent in parts),
    )
