"""What to change where a model fits nowhere: each remedy is a plan that was compiled, and what it holds is counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import PASSES, Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.given import settle
from counterpoint.planner.rank import Prediction, hold, named
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.recomputation import PASS
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster

LEANEST = 6
"""So many of the plans that hold least are changed, to see which change makes them fit."""
KEPT = 3
"""Values of each parameter that stay on some rank from step to step: the weight, and the two states of Adam."""
MOST_TIMES = 8
"""Ranks are added until there are so many times as many as the kept values alone need."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is wanted for.

    Args:
        model: in its finest blocks.
        cluster: where it would run.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
    """

    model: ModelSpec
    cluster: Cluster
    batch_size: int
    timing: Timing | None = None


def settle_all(plans: Iterable[Plan], question: Question) -> tuple[Plan, ...]:
    """Return plans as they are ranked, each once: with their cuts in them where the question decides about these."""
    return tuple(dict.fromkeys(_settled(plan, question) for plan in plans))


def _settled(plan: Plan, question: Question) -> Plan:
    model, cluster = question.model, question.cluster
    try:
        return settle(plan, model, cluster, batch_size=question.batch_size, timing=question.timing)
    except PlanError:
        return plan  # the ranking says why it cannot be carried out


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which a model fits.

    Args:
        change: in words.
        plan: the plan that fits then.
        batch_size: samples of the global batch then.
        memory_bytes: what its fullest rank holds then.
    """

    change: str
    plan: Plan
    batch_size: int
    memory_bytes: int

    def __str__(self) -> str:
        """Write the change, the plan and its bytes."""
        passes = "".join(f" + {name}" for name in self.plan.passes if name not in PASSES)
        return f"{self.change} ({named(self.plan)}{passes}: {self.memory_bytes} bytes)"


def explain_excess(found: Sequence[Prediction], plans: Sequence[Plan], question: Question) -> str:
    """Return by how much nothing fits, and what would.

    Args:
        found: what was predicted of plans that keep the numbers, one at least.
        plans: those that there were to choose from.
        question: what a plan is wanted for.
    """
    least = min(found, key=lambda one: one.memory_bytes)
    excess = least.memory_bytes - least.room_bytes
    remedies = list(find_remedies(found, plans, question))
    if remedies:
        first, *others = map(str, remedies)
        advice = f"the smallest change that fits: {'; or '.join([first, *others])}"
    else:
        advice = (
            "neither recomputation nor more microbatches, a smaller batch or more ranks make any of the plans fit; "
            "take devices with more memory, or a smaller model"
        )
    return (
        f"no plan fits: {least.plan} holds least, {least.memory_bytes} of {least.room_bytes} bytes on its fullest "
        f"rank, {excess} bytes too many; {advice}"
    )


def find_remedies(found: Sequence[Prediction], plans: Sequence[Plan], question: Question) -> Iterator[Remedy]:
    """Yield what would fit, the smallest change first: another plan, recomputing, microbatches, batch, ranks.

    Args:
        found: what was predicted of plans that keep the numbers, one at least.
        plans: those that there were to choose from.
        question: what a plan is wanted for.
    """
    lean = [one.plan for one in sorted(found, key=lambda one: one.memory_bytes)[:LEANEST]]
    again = [replace(plan, passes=(*plan.passes, PASS)) for plan in lean if plan.recomputation is None]
    yield from _leanest("another plan", _others(lean[0], plans, question), question)
    yield from _leanest("recomputing what backwards need", again, question)
    for change in (_more_microbatches, _smaller_batch):
        alone = list(change(lean, question))
        yield from alone or change(again, question)
    may_slice = any(isinstance(one, Tensor) for plan in plans for one in plan.strategies)
    yield from _more_ranks(lean[0], question, slices=may_slice)


def _leanest(change: str, plans: Iterable[Plan], question: Question) -> Iterator[Remedy]:
    """Yield the one of the plans that holds least, if it fits."""
    held = {plan: size for plan in plans if (size := _size(plan, question)) is not None}
    if held:
        plan = min(held, key=held.__getitem__)
        yield Remedy(change, plan, question.batch_size, held[plan])


def _more_microbatches(plans: Iterable[Plan], question: Question) -> Iterator[Remedy]:
    """Yield the plan that fits with fewest microbatches more."""
    for times in _powers(question.batch_size):
        more = (replace(plan, num_microbatches=times * plan.num_microbatches) for plan in plans)
        for remedy in _leanest("", more, question):
            count = remedy.plan.num_microbatches
            yield replace(remedy, change=f"{count} microbatches instead of {count // times}")
            return


def _smaller_batch(plans: Iterable[Plan], question: Question) -> Iterator[Remedy]:
    """Yield the plan that fits with the largest batch below the one that is wanted."""
    best: Remedy | None = None
    for plan in plans:
        low, high = 0, -(-question.batch_size // plan.num_micros)  # samples of a microbatch that fit, that do not
        kept = 0
        while high - low > 1:
            middle = (low + high) // 2
            size = _size(plan, replace(question, batch_size=middle * plan.num_micros))
            low, high, kept = (middle, high, size) if size is not None else (low, middle, kept)
        batch_size = low * plan.num_micros
        if low and (best is None or batch_size > best.batch_size):
            best = Remedy(f"a batch of {batch_size} samples instead of {question.batch_size}", plan, batch_size, kept)
    if best is not None:
        yield best


def _others(lean: Plan, plans: Sequence[Plan], question: Question) -> Iterator[Plan]:
    """Yield what there was not to choose from: stages, shares and copies in other compositions."""
    known = {plan.strategies for plan in plans}
    plain = (
        replace(plan, passes=lean.passes)
        for plan in enumerate_plans(lean.num_ranks, question.model)
        if all(isinstance(one, Zero) or one in {Data(one.degree), Pipeline(one.degree)} for one in plan.strategies)
    )
    yield from (plan for plan in settle_all(plain, question) if plan.strategies not in known)


def _more_ranks(lean: Plan, question: Question, *, slices: bool) -> Iterator[Remedy]:
    """Yield the plan that fits with fewest ranks more, among those that spread what is kept over all of them."""
    kept_bytes = KEPT * sum(param.num_bytes for param in question.model.params)
    least = max(lean.num_ranks + 1, math.ceil(kept_bytes / question.cluster.device.memory_bytes))
    for count in range(least, MOST_TIMES * least):
        spread = [Plan((Zero(count, level=3),)), *(Plan((Pipeline(count),), times * count) for times in (1, 2, 4))]
        spread += [Plan((Tensor(count),))] if slices else []
        passed = (replace(plan, passes=lean.passes) for plan in spread)
        for remedy in _leanest(f"{count} ranks instead of {lean.num_ranks}", passed, question):
            yield remedy
            return


def _size(plan: Plan, question: Question) -> int | None:
    """Return what the fullest rank holds; None where that is too much, or the plan cannot be carried out."""
    try:
        held = hold(plan, question.model, question.cluster, batch_size=question.batch_size, timing=question.timing)
        size = max(held)
    except PlanError:
        return None
    return size if size <= question.cluster.device.memory_bytes else None


def _powers(most: int) -> Iterator[int]:
    times = 2
    while times <= most:
        yield times
        times *= 2
