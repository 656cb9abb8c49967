"""The choice of a plan in words and figures: why it was taken, what each of the others loses, what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import (
    DATA_PARALLEL_TOLERANCE,
    MEASURED_TOLERANCE,
    NOISY_TOLERANCE,
    PREDICTED_TOLERANCE,
    PlanChoice,
    is_pure_data_parallel,
    simulator_for_problem,
)
from counterpoint.planner.ranking import PlanRanking, Prediction, attribute_time, format_plan, predict_trace
from counterpoint.program.text import format_group
from counterpoint.viz.number_format import format_bytes, format_number, format_seconds
from counterpoint.viz.page import StatCard
from counterpoint.viz.plan_comparison import ComparedPlan, PlanComparison

COLUMNS = ("plan", "micros", "step ms", "compute", "comm", "idle", "update", "sent", "memory", "why not")
"""What :func:`cells` has of a plan; times are in milliseconds, memory is that of the fullest rank or of all."""
TEXT_COLUMNS = frozenset({"plan", "why not"})
"""Those of them that are words, and not figures."""

TRIAL_COLUMNS = ("plan", "predicted ms", "measured ms", "measured / predicted", "of the best")
"""What :func:`trial_rows` has of a plan that was tried."""

MAX_ROWS = 20
"""A page has so many plans in its table, beside those that were tried."""


def table_row(prediction: Prediction, first: Prediction) -> tuple[str, ...]:
    """Return the row of a plan, and why it loses to the first one."""
    times = (
        prediction.step_s,
        prediction.compute_s,
        prediction.communication_s,
        prediction.idle_s,
        prediction.update_s,
    )
    return (
        f"{prediction.plan}{'' if prediction.is_synchronous else ' *'}",
        str(prediction.plan.num_microbatches),
        *map(format_ms, times),
        format_bytes(prediction.sent_bytes),
        format_memory(prediction),
        prediction.why_not(first),
    )


def format_memory(prediction: Prediction) -> str:
    """Return what ranks hold: one figure where all hold the same, else the least and the most."""
    least, most = (
        format_bytes(min(prediction.rank_bytes, default=prediction.memory_bytes)),
        format_bytes(prediction.memory_bytes),
    )
    return most if least == most else f"{least} - {most}"


def format_ms(seconds: float) -> str:
    """Write a time in milliseconds with three digits."""
    return format_number(float(f"{1e3 * seconds:.3g}"))


def trial_rows(choice: PlanChoice) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the plans that were tried, the fastest first."""
    trials = sorted(choice.trials, key=lambda trial: trial.step_s)
    for trial in trials:
        predicted = choice.find_prediction(trial.plan)
        foretold = (format_ms(predicted.step_s), f"{trial.step_s / predicted.step_s:.2f}") if predicted else ("", "")
        times = (foretold[0], format_ms(trial.step_s), foretold[1], f"{trial.step_s / trials[0].step_s:.2f}")
        yield format_plan(trial.plan), *times


def explain_choice(choice: PlanChoice) -> list[str]:
    """Return what is taken and why, and what could not be tried."""
    return [
        f"{format_plan(choice.plan)} is taken: {_measured_reason(choice) if choice.trials else _predicted_reason(choice)}",
        *_explain_memory(choice),
        *(f"{format_plan(one.plan)} could not be tried: {one.reason}" for one in choice.failed_trials),
        *explain_skipped(choice.ranking),
    ]


def explain_skipped(ranking: PlanRanking) -> list[str]:
    """Return which plans nobody has looked at to the end, if there are any."""
    return [*_explain_pruned(ranking), *_explain_not_evaluated(ranking)]


def _explain_pruned(ranking: PlanRanking) -> list[str]:
    if not ranking.pruned:
        return []
    first, *others = map(format_plan, ranking.pruned)
    rest = f" and {len(others)} more plans of the list" if others else ""
    verb = "are" if others else "is"
    least = "what one of the ranks does alone, or what those of one host send through its card"
    return [f"{first}{rest} {verb} surely slower: {least}, takes longer than the fastest step"]


def _explain_not_evaluated(ranking: PlanRanking) -> list[str]:
    if not ranking.not_evaluated:
        return []
    first, *others = map(format_plan, ranking.not_evaluated)
    rest = f" and {len(others)} more plans of the list were" if others else " was"
    return [f"the time was over before {first}{rest} looked at; a longer --time-budget looks at all of them"]


def _explain_memory(choice: PlanChoice) -> list[str]:
    """Return what each rank holds under the plan that is taken, where ranks hold different amounts."""
    predicted = choice.find_prediction(choice.plan)
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


def _predicted_reason(choice: PlanChoice) -> str:
    best = choice.ranking.eligible[0].plan
    if choice.plan == best:
        return "of the plans that keep the numbers it is predicted fastest"
    return f"it is predicted within {_percent(PREDICTED_TOLERANCE)} of {_describe_fastest(best)}, and simpler"


def _measured_reason(choice: PlanChoice) -> str:
    best, taken = min(choice.trials, key=lambda trial: trial.step_s), choice.find_trial(choice.plan)
    if taken is None or taken == best:
        return "of the plans that keep the numbers it is measured fastest"
    if taken.step_s <= MEASURED_TOLERANCE * best.step_s:
        return f"it is measured within {_percent(MEASURED_TOLERANCE)} of {_describe_fastest(best.plan)}, and simpler"
    if is_pure_data_parallel(taken.plan):
        return f"it is measured within {_percent(DATA_PARALLEL_TOLERANCE)} of {_describe_fastest(best.plan)}, as runs differ, and simpler"
    percent = _percent(NOISY_TOLERANCE)
    return f"it is measured within {percent} of {_describe_fastest(best.plan)}, as fast in some turns, and simpler"


def _percent(times: float) -> str:
    return f"{100 * (times - 1):.0f} %"


def _describe_fastest(plan: Plan) -> str:
    return f"{format_plan(plan)}, the fastest that keeps the numbers"


def build_comparison(choice: PlanChoice, num_plans: int = 3) -> PlanComparison:
    """Return the choice as a page shows it, with the timelines of so many of the best plans."""
    found, replay = choice.ranking.predictions, simulator_for_problem(choice.problem)
    tried = {trial.plan: trial for trial in choice.trials}
    shown = [
        attribute_time(one, replay)
        for at, one in enumerate(found)
        if at < MAX_ROWS or one.plan in tried or one.plan == choice.plan
    ]
    rows = [_with_trial(choice, table_row(one, shown[0]), one.plan) for one in shown]
    titles = COLUMNS if not tried else (*COLUMNS[:3], "measured ms", *COLUMNS[3:])
    return PlanComparison(
        tuple(explain_choice(choice)), titles, tuple(rows), TEXT_COLUMNS, tuple(_compared_plans(choice, num_plans))
    )


def _with_trial(choice: PlanChoice, row: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    if not choice.trials:
        return row
    trial = choice.find_trial(plan)
    return (*row[:3], format_ms(trial.step_s) if trial is not None else "", *row[3:])


def _compared_plans(choice: PlanChoice, num_plans: int) -> Iterator[ComparedPlan]:
    """Yield the plan that is taken, then those that were tried, or else those predicted to be fastest."""
    question = choice.problem
    kept = [found.plan for found in choice.ranking.eligible]
    tried = [trial.plan for trial in sorted(choice.trials, key=lambda trial: trial.step_s)]
    wanted = dict.fromkeys([choice.plan, *(tried or kept)])
    for plan in islice(wanted, num_plans):
        trial = choice.find_trial(plan)
        simulated = predict_trace(
            plan, question.model, question.cluster, batch_size=question.batch_size, profile=question.profile
        )
        yield ComparedPlan(format_plan(plan), simulated, trial.trace if trial is not None else None)


def stat_cards(choice: PlanChoice) -> Sequence[StatCard]:
    """Return the numbers to see first of a choice."""
    predicted, trial = choice.find_prediction(choice.plan), choice.find_trial(choice.plan)
    found = [StatCard("plan", format_plan(choice.plan)), StatCard("plans weighed", len(choice.ranking.predictions))]
    times = [
        ("predicted step", predicted.step_s if predicted is not None else None),
        ("measured step", trial.step_s if trial is not None else None),
    ]
    for name, seconds in times:
        if seconds is not None:
            value, unit = format_seconds(seconds).split()
            found.append(StatCard(name, value, unit))
    if predicted is not None:
        found.append(StatCard("memory of a rank", format_memory(predicted)))
    return found
