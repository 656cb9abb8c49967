"""Plans in the order of their predicted step time, with what the time goes to and why each loses to the first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from counterpoint.compiler.compile import Compiled
from counterpoint.drawing.scale import format_seconds
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.given import compiled_for, fitted_to, held_bytes
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.playing import Playing
from counterpoint.planner.rows.replay import Played, Replay, Slower
from counterpoint.program.trace import Trace
from counterpoint.simulator.memory import peak_bytes
from counterpoint.world.cluster import Cluster, Link

Found = TypeVar("Found")

FREE = Link(latency_s=0.0, bytes_per_s=float("inf"))
ROUNDING = 1e-9
"""Times that differ by less than this part of a step are equal."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says about one step of a plan; its four parts, once it is split, add up to ``step_s``.

    Args:
        plan: which one.
        samples_per_micro: so that all plans take the same global batch.
        step_s: seconds of one step.
        compute_s: seconds of forward and backward on a rank, on average.
        update_s: seconds that a rank updates weights, on average.
        sent_bytes: what the busiest rank sends.
        memory_bytes: what the fullest rank holds at most.
        room_bytes: what a rank can hold.
        is_synchronous: whether it keeps solo's numbers.
        rank_bytes: what each rank holds at most.
        free_s: seconds of one step if links took no time; None until :func:`split` has played it.
    """

    plan: Plan
    samples_per_micro: int
    step_s: float
    compute_s: float
    update_s: float
    sent_bytes: int
    memory_bytes: int
    room_bytes: int
    is_synchronous: bool
    rank_bytes: tuple[int, ...] = ()
    free_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether no rank needs more memory than it has."""
        return self.memory_bytes <= self.room_bytes

    @property
    def communication_s(self) -> float:
        """Seconds by which free links would make the step shorter: communication that nothing hides."""
        assert self.free_s is not None, "it has been split"
        more_s = self.step_s - self.free_s
        return more_s if more_s > ROUNDING * self.step_s else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds that a rank would still wait with free links, on average: the bubble, or a server's leisure."""
        idle_s = self.waiting_s - self.communication_s
        return idle_s if idle_s > ROUNDING * self.step_s else 0.0

    @property
    def waiting_s(self) -> float:
        """Seconds that a rank neither computes nor updates, on average."""
        return self.step_s - self.compute_s - self.update_s

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
    """The plans that can be carried out, the fastest first and those that do not fit last; then the others.

    Args:
        predictions: of those that can be carried out.
        refusals: those that cannot.
        unseen: those that nobody has looked at, because the time was over.
        slower: those that were not played, because a rank's own work says that they are slower than what was asked for.
    """

    predictions: tuple[Prediction, ...]
    refusals: tuple[Refusal, ...]
    unseen: tuple[Plan, ...] = ()
    slower: tuple[Plan, ...] = ()

    @property
    def kept(self) -> list[Prediction]:
        """Those that keep solo's numbers and fit."""
        return [found for found in self.predictions if found.is_synchronous and found.fits]


def named(plan: Plan) -> str:
    """Return a plan with its microbatches, if it has more than one."""
    return f"{plan}" + (f" with {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else "")


def rank_plans(
    plans: Iterable[Plan],
    model: ModelSpec,
    cluster: Cluster,
    *,
    batch_size: int,
    timing: Timing | None = None,
    limit: Limit = ENDLESS,
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
        limit: when to end; the first plan that can be carried out is looked at in any case.
    """
    return rank_among(plans, replay_for(model, cluster, batch_size, timing), limit)


def rank_among(plans: Iterable[Plan], replay: Replay, limit: Limit = ENDLESS, within: float | None = None) -> Ranking:
    """Return plans as :func:`rank_plans` does, with the help of what is known of others.

    Args:
        plans: what is compared.
        replay: for one model, cluster and batch, as :func:`replay_for` makes it.
        limit: when to end; the first plan that can be carried out is looked at in any case.
        within: so many times the step of the fastest that keeps the numbers and fits; what is surely slower may be left
            out then, and nothing is split; those that could be fastest are played first. None for all of it.
    """
    predictions: dict[int, Prediction] = {}
    refusals: dict[int, Refusal] = {}
    unseen: dict[int, Plan] = {}
    slower: dict[int, Plan] = {}
    most_s = math.inf
    asked = list(enumerate(plans))
    if within is not None:
        asked.sort(key=lambda one: replay.least_s(one[1]))
    for at, plan in asked:
        if predictions and limit.is_over:
            unseen[at] = plan
            continue
        try:
            found = predict_among(plan, replay, most_s, is_split=within is None)
        except PlanError as error:
            refusals[at] = Refusal(plan, str(error).splitlines()[0])
        except Slower:
            slower[at] = plan
        else:
            predictions[at] = found
            if within is not None and found.is_synchronous and found.fits:
                most_s = min(most_s, within * found.step_s)
    fastest = sorted(_in_order(predictions), key=_place)
    return Ranking(tuple(fastest), _in_order(refusals), _in_order(unseen), _in_order(slower))


def _in_order(found: Mapping[int, Found]) -> tuple[Found, ...]:
    """Return what was found, in the order in which it was asked for."""
    return tuple(found[at] for at in sorted(found))


def merged(one: Ranking, other: Ranking) -> Ranking:
    """Return two rankings for one model as one, in which a plan that both have stands once."""
    predictions = {found.plan: found for found in (*one.predictions, *other.predictions)}
    refusals = {refused.plan: refused for refused in (*one.refusals, *other.refusals)}
    unseen = dict.fromkeys(plan for plan in (*one.unseen, *other.unseen) if plan not in predictions | refusals)
    slower = dict.fromkeys(plan for plan in (*one.slower, *other.slower) if plan not in predictions)
    known = tuple(sorted(predictions.values(), key=_place))
    return Ranking(known, tuple(refusals.values()), tuple(unseen), tuple(slower))


def _place(found: Prediction) -> tuple[bool, float, int, int]:
    return not found.fits, float(f"{found.step_s:.9g}"), found.memory_bytes, found.sent_bytes


def predict(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, timing: Timing | None = None
) -> Prediction:
    """Return what the simulator says about a plan, split; where ranks differ in speed, of one cut by their speeds.

    With a timing, pipelines are cut by its seconds, and memory is what was kept. The laws are not proved for it; they
    are before it runs.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    timing = fitted_to(plan, model, timing)
    compiled, samples = compiled_for(plan, model, cluster, batch_size, timing)
    spent = Playing(compiled, samples, timing).spend((cluster, with_free_links(cluster)))
    rank_bytes = _rank_bytes(compiled, samples, timing)
    played = Played(compiled.plan, samples, tuple(spent), int(max(compiled.sent_bytes())), rank_bytes)
    return _prediction(played, cluster, is_synchronous=compiled.is_synchronous)


def predict_among(plan: Plan, replay: Replay, most_s: float = math.inf, *, is_split: bool = True) -> Prediction:
    """Return what :func:`predict` says of a plan, with the help of what is known of others.

    Args:
        plan: one of many for a model, a cluster and a batch.
        replay: for these, as :func:`replay_for` makes it.
        most_s: what a step may take.
        is_split: whether it has to be known what the step would take if links took no time.

    Raises:
        Slower: what its ranks do by themselves takes longer.
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    played = None
    with suppress(PlanError):  # it is raised again by the whole plan, which says more
        played = replay.played(plan, most_s, _ALL if is_split else _REAL)
    if played is not None:
        return _prediction(played, replay.cluster, is_synchronous=True)
    return predict(plan, replay.model, replay.cluster, batch_size=replay.batch_size, timing=replay.timing)


def split(found: Prediction, replay: Replay) -> Prediction:
    """Return a prediction with what its step would take if links took no time, so that its parts are known.

    Args:
        found: for a model, a cluster and a batch.
        replay: for these, as :func:`replay_for` makes it.
    """
    if found.free_s is not None:
        return found
    played = replay.played(found.plan, at=_FREE)
    if played is None:
        return predict_among(found.plan, replay)
    (free,) = played.spent
    return replace(found, free_s=free.step_s)


_REAL, _FREE = (0,), (1,)
_ALL = (*_REAL, *_FREE)
"""The clusters of a replay: links as they are, and free ones."""


def replay_for(model: ModelSpec, cluster: Cluster, batch_size: int, timing: Timing | None = None) -> Replay:
    """Return what plans are predicted with by the rows that they have in common; see :func:`predict_among`."""
    return Replay(model, (cluster, with_free_links(cluster)), batch_size, timing)


def _prediction(played: Played, cluster: Cluster, *, is_synchronous: bool) -> Prediction:
    """Return what is said of a plan that was played on a cluster, and perhaps on the same one with free links."""
    spent, *free = played.spent
    return Prediction(
        plan=played.plan,
        samples_per_micro=played.samples,
        step_s=spent.step_s,
        compute_s=spent.compute_s,
        update_s=spent.update_s,
        sent_bytes=played.sent_bytes,
        memory_bytes=max(played.rank_bytes),
        room_bytes=cluster.device.memory_bytes,
        is_synchronous=is_synchronous,
        rank_bytes=played.rank_bytes,
        free_s=free[0].step_s if free else None,
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


def _rank_bytes(compiled: Compiled, samples: int, timing: Timing | None) -> tuple[int, ...]:
    return peak_bytes(compiled.turns[-1].playable, held_bytes(compiled.model, samples, timing))


def with_free_links(cluster: Cluster) -> Cluster:
    """Return the cluster with links on which nothing takes any time."""
    levels = tuple(replace(level, link=FREE) for level in cluster.levels)
    return replace(cluster, link=FREE, levels=levels)
