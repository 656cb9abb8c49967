"""The choice of a plan in words and figures: why it was taken, what each of the others loses, what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from counterpoint.drawing.figures import Figure
from counterpoint.drawing.scale import format_bytes, format_number, format_seconds
from counterpoint.drawing.weighing import Weighed, Weighing
from counterpoint.plan import Plan
from counterpoint.planner.choose import (
    DATA_AS_FAST,
    EVER_AS_FAST,
    NEARLY_AS_FAST,
    PERHAPS_AS_FAST,
    Choice,
    is_plain,
    replay_of,
)
from counterpoint.planner.rank import Prediction, Ranking, foresee, named, split
from counterpoint.program.text import format_group

TITLES = ("plan", "micros", "step ms", "compute", "comm", "idle", "update", "sent", "memory", "why not")
"""What :func:`cells` has of a plan; times are in milliseconds, memory is that of the fullest rank or of all."""
TEXTS = frozenset({"plan", "why not"})
"""Those of them that are words, and not figures."""

TRIAL_TITLES = ("plan", "predicted ms", "measured ms", "measured / predicted", "of the best")
"""What :func:`trial_cells` has of a plan that was tried."""

MOST_ROWS = 20
"""A page has so many plans in its table, beside those that were tried."""


def cells(found: Prediction, first: Prediction) -> tuple[str, ...]:
    """Return the row of a plan, and why it loses to the first one."""
    times = (found.step_s, found.compute_s, found.communication_s, found.idle_s, found.update_s)
    return (
        f"{found.plan}{'' if found.is_synchronous else ' *'}",
        str(found.plan.num_microbatches),
        *map(milliseconds, times),
        format_bytes(found.sent_bytes),
        memory(found),
        found.why_not(first),
    )


def memory(found: Prediction) -> str:
    """Return what ranks hold: one figure where all hold the same, else the least and the most."""
    least, most = format_bytes(min(found.rank_bytes, default=found.memory_bytes)), format_bytes(found.memory_bytes)
    return most if least == most else f"{least} - {most}"


def milliseconds(seconds: float) -> str:
    """Write a time in milliseconds with three digits."""
    return format_number(float(f"{1e3 * seconds:.3g}"))


def trial_cells(choice: Choice) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the plans that were tried, the fastest first."""
    trials = sorted(choice.trials, key=lambda trial: trial.step_s)
    for trial in trials:
        predicted = choice.predicted(trial.plan)
        foretold = (milliseconds(predicted.step_s), f"{trial.step_s / predicted.step_s:.2f}") if predicted else ("", "")
        times = (foretold[0], milliseconds(trial.step_s), foretold[1], f"{trial.step_s / trials[0].step_s:.2f}")
        yield named(trial.plan), *times


def explain(choice: Choice) -> list[str]:
    """Return what is taken and why, and what could not be tried."""
    return [
        f"{named(choice.plan)} is taken: {_measured_reason(choice) if choice.trials else _predicted_reason(choice)}",
        *_held(choice),
        *(f"{named(one.plan)} could not be tried: {one.reason}" for one in choice.untried),
        *explain_unseen(choice.ranking),
    ]


def explain_unseen(ranking: Ranking) -> list[str]:
    """Return which plans nobody has looked at to the end, if there are any."""
    return [*_explain_slower(ranking), *_explain_late(ranking)]


def _explain_slower(ranking: Ranking) -> list[str]:
    if not ranking.slower:
        return []
    first, *others = map(named, ranking.slower)
    rest = f" and {len(others)} more plans of the list" if others else ""
    verb = "are" if others else "is"
    least = "what one of the ranks does alone, or what those of one host send through its card"
    return [f"{first}{rest} {verb} surely slower: {least}, takes longer than the fastest step"]


def _explain_late(ranking: Ranking) -> list[str]:
    if not ranking.unseen:
        return []
    first, *others = map(named, ranking.unseen)
    rest = f" and {len(others)} more plans of the list were" if others else " was"
    return [f"the time was over before {first}{rest} looked at; a longer --time-budget looks at all of them"]


def _held(choice: Choice) -> list[str]:
    """Return what each rank holds under the plan that is taken, where ranks hold different amounts."""
    predicted = choice.predicted(choice.plan)
    sizes = predicted.rank_bytes if predicted is not None else ()
    if len(set(sizes)) < 2:
        return []
    alike: dict[int, list[int]] = {}
    for rank, size in enumerate(sizes):
        alike.setdefault(size, []).append(rank)
    told = (
        f"{format_bytes(size)} on rank{'s' if len(ranks) > 1 else ''} {format_group(tuple(ranks))}"
        for size, ranks in alike.items()
    )
    return [f"its ranks hold {', '.join(told)}"]


def _predicted_reason(choice: Choice) -> str:
    best = choice.ranking.kept[0].plan
    if choice.plan == best:
        return "of the plans that keep the numbers it is predicted fastest"
    return f"it is predicted within {_percent(PERHAPS_AS_FAST)} of {_fastest(best)}, and simpler"


def _measured_reason(choice: Choice) -> str:
    best, taken = min(choice.trials, key=lambda trial: trial.step_s), choice.tried(choice.plan)
    if taken is None or taken == best:
        return "of the plans that keep the numbers it is measured fastest"
    if taken.step_s <= NEARLY_AS_FAST * best.step_s:
        return f"it is measured within {_percent(NEARLY_AS_FAST)} of {_fastest(best.plan)}, and simpler"
    if is_plain(taken.plan):
        return f"it is measured within {_percent(DATA_AS_FAST)} of {_fastest(best.plan)}, as runs differ, and simpler"
    percent = _percent(EVER_AS_FAST)
    return f"it is measured within {percent} of {_fastest(best.plan)}, as fast in some turns, and simpler"


def _percent(times: float) -> str:
    return f"{100 * (times - 1):.0f} %"


def _fastest(plan: Plan) -> str:
    return f"{named(plan)}, the fastest that keeps the numbers"


def account(choice: Choice, count: int = 3) -> Weighing:
    """Return the choice as a page shows it, with the timelines of so many of the best plans."""
    found, replay = choice.ranking.predictions, replay_of(choice.question)
    tried = {trial.plan: trial for trial in choice.trials}
    shown = [
        split(one, replay)
        for at, one in enumerate(found)
        if at < MOST_ROWS or one.plan in tried or one.plan == choice.plan
    ]
    rows = [_with_trial(choice, cells(one, shown[0]), one.plan) for one in shown]
    titles = TITLES if not tried else (*TITLES[:3], "measured ms", *TITLES[3:])
    return Weighing(tuple(explain(choice)), titles, tuple(rows), TEXTS, tuple(_steps(choice, count)))


def _with_trial(choice: Choice, row: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    if not choice.trials:
        return row
    trial = choice.tried(plan)
    return (*row[:3], milliseconds(trial.step_s) if trial is not None else "", *row[3:])


def _steps(choice: Choice, count: int) -> Iterator[Weighed]:
    """Yield the plan that is taken, then those that were tried, or else those predicted to be fastest."""
    question = choice.question
    kept = [found.plan for found in choice.ranking.kept]
    tried = [trial.plan for trial in sorted(choice.trials, key=lambda trial: trial.step_s)]
    wanted = dict.fromkeys([choice.plan, *(tried or kept)])
    for plan in islice(wanted, count):
        trial = choice.tried(plan)
        simulated = foresee(
            plan, question.model, question.cluster, batch_size=question.batch_size, timing=question.timing
        )
        yield Weighed(named(plan), simulated, trial.trace if trial is not None else None)


def figures(choice: Choice) -> Sequence[Figure]:
    """Return the numbers to see first of a choice."""
    predicted, trial = choice.predicted(choice.plan), choice.tried(choice.plan)
    found = [Figure("plan", named(choice.plan)), Figure("plans weighed", len(choice.ranking.predictions))]
    times = [
        ("predicted step", predicted.step_s if predicted is not None else None),
        ("measured step", trial.step_s if trial is not None else None),
    ]
    for name, seconds in times:
        if seconds is not None:
            value, unit = format_seconds(seconds).split()
            found.append(Figure(name, value, unit))
    if predicted is not None:
        found.append(Figure("memory of a rank", memory(predicted)))
    return found
