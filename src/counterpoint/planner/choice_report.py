"""Report the choice of a plan: why it was chosen, what each of the others loses, what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from counterpoint.model.model_profile import ModelProfile
from counterpoint.plan.plan import Plan
from counterpoint.planner.activations import describe_activations
from counterpoint.planner.choose import (
    DATA_PARALLEL_TOLERANCE,
    MEASURED_TOLERANCE,
    NOISY_TOLERANCE,
    PREDICTED_TOLERANCE,
    PlanChoice,
    is_pure_data_parallel,
    simulator_for_problem,
)
from counterpoint.planner.ranking import (
    PlanRanking,
    Prediction,
    attribute_time,
    format_activation_passes,
    format_plan,
    is_activation_pass,
    predict_trace,
)
from counterpoint.program.text import format_group
from counterpoint.viz.number_format import format_bytes, format_number, format_seconds
from counterpoint.viz.page import StatCard
from counterpoint.viz.plan_comparison import ComparedPlan, PlanComparison

COLUMNS = ("plan", "micros", "step ms", "compute", "comm", "idle", "update", "sent", "memory", "why not")
"""Columns of :func:`table_row`; times are in milliseconds, memory is that of the ranks that need least and most."""
TEXT_COLUMNS = frozenset({"plan", "why not"})
"""Columns that hold text instead of numbers."""

TRIAL_COLUMNS = ("plan", "predicted ms", "measured ms", "measured / predicted", "of the best")
"""Columns of :func:`trial_rows`."""

MAX_ROWS = 20
"""Plans in the table of a page, in addition to those that were tried."""


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
        f"{prediction.plan}{'' if prediction.is_synchronous else ' *'}{format_activation_passes(prediction.plan)}",
        str(prediction.plan.num_microbatches),
        *map(format_ms, times),
        format_bytes(prediction.sent_bytes),
        format_memory(prediction),
        prediction.why_not(first),
    )


def format_memory(prediction: Prediction) -> str:
    """Return the peak memory of ranks: one size if all are equal, otherwise the least and the most."""
    least, most = (
        format_bytes(min(prediction.rank_bytes, default=prediction.memory_bytes)),
        format_bytes(prediction.memory_bytes),
    )
    return most if least == most else f"{least} - {most}"


def format_ms(seconds: float) -> str:
    """Format a time in milliseconds with three digits."""
    return format_number(float(f"{1e3 * seconds:.3g}"))


def trial_rows(choice: PlanChoice) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the plans that were tried, the fastest first."""
    trials = sorted(choice.trials, key=lambda trial: trial.step_s)
    for trial in trials:
        predicted = choice.find_prediction(trial.plan)
        comparison = (format_ms(predicted.step_s), f"{trial.step_s / predicted.step_s:.2f}") if predicted else ("", "")
        times = (comparison[0], format_ms(trial.step_s), comparison[1], f"{trial.step_s / trials[0].step_s:.2f}")
        yield format_plan(trial.plan), *times


def explain_choice(choice: PlanChoice) -> list[str]:
    """Return which plan was chosen and why, and what could not be tried."""
    reason = _measured_reason(choice) if choice.trials else _predicted_reason(choice)
    return [
        f"{format_plan(choice.plan)} was chosen: {reason}",
        *_explain_activations(choice),
        *_explain_memory(choice),
        *_explain_compilation(choice),
        *(f"{format_plan(failed.plan)} could not be tried: {failed.reason}" for failed in choice.failed_trials),
        *explain_skipped(choice.ranking),
    ]


def explain_skipped(ranking: PlanRanking) -> list[str]:
    """Return which plans were not fully evaluated, if any."""
    return [*_explain_pruned(ranking), *_explain_not_evaluated(ranking)]


def _explain_pruned(ranking: PlanRanking) -> list[str]:
    if not ranking.pruned:
        return []
    first, *others = map(format_plan, ranking.pruned)
    rest = f" and {len(others)} more plans of the list" if others else ""
    verb = "are" if others else "is"
    bound = "a lower bound of its step, from the work of one rank or the traffic of one host,"
    return [f"{first}{rest} {verb} certainly slower: {bound} exceeds the fastest step"]


def _explain_not_evaluated(ranking: PlanRanking) -> list[str]:
    if not ranking.not_evaluated:
        return []
    first, *others = map(format_plan, ranking.not_evaluated)
    rest = f" and {len(others)} more plans of the list were" if others else " was"
    return [f"the time budget ended before {first}{rest} evaluated; a larger --time-budget evaluates all of them"]


def _explain_activations(choice: PlanChoice) -> list[str]:
    """Return the change that made the chosen plan fit, if no plan fits without one."""
    if not any(map(is_activation_pass, choice.plan.passes)):
        return []
    if any(not any(map(is_activation_pass, one.plan.passes)) for one in choice.ranking.eligible):
        return []
    return [
        f"no plan fits that keeps all activations; the smallest change that fits: {describe_activations(choice.plan)}"
    ]


def _explain_memory(choice: PlanChoice) -> list[str]:
    """Return the peak memory of each rank under the chosen plan, if ranks differ."""
    predicted = choice.find_prediction(choice.plan)
    rank_bytes = predicted.rank_bytes if predicted is not None else ()
    if len(set(rank_bytes)) < 2:
        return []
    ranks_by_size: dict[int, list[int]] = {}
    for rank, size in enumerate(rank_bytes):
        ranks_by_size.setdefault(size, []).append(rank)
    parts = (
        f"{format_bytes(size)} on rank{'s' if len(ranks) > 1 else ''} {format_group(tuple(ranks))}"
        for size, ranks in ranks_by_size.items()
    )
    return [f"its ranks need {', '.join(parts)}"]


def _explain_compilation(choice: PlanChoice) -> list[str]:
    """Return whether compiling the model pays, if its compiled times were measured."""
    profile = choice.problem.profile
    if profile is None or profile.compiled is None:
        return []
    samples = max(1, choice.problem.batch_size // choice.plan.global_num_microbatches)
    return [f"compile={profile.compiled.compilation}: {describe_repayment(profile, samples)}"]


def describe_repayment(profile: ModelProfile, samples: int) -> str:
    """Return after how many microbatches the time of compiling is paid back, as text.

    Args:
        profile: with times of the compiled model.
        samples: of a microbatch.
    """
    assert profile.compiled is not None, "compiled times were measured"
    compiled = profile.for_compilation(profile.compiled.compilation)
    eager_s, compiled_s = (one.at_microbatch_size(samples).unpartitioned.seconds for one in (profile, compiled))
    count = profile.microbatches_to_repay(samples)
    times = (
        f"forward and backward of {samples} samples take {format_seconds(compiled_s)} compiled and "
        f"{format_seconds(eager_s)} eagerly"
    )
    if math.isinf(count):
        return f"{times}, so compiling never pays"
    compile_s = format_seconds(profile.compiled.compile_s)
    return (
        f"{times}; the {compile_s} of compiling are paid back after {format_number(int(count))} microbatches of a rank"
    )


def _predicted_reason(choice: PlanChoice) -> str:
    best = choice.ranking.eligible[0].plan
    if choice.plan == best:
        return "it is predicted to be the fastest synchronous plan"
    return f"it is predicted within {_percent(PREDICTED_TOLERANCE)} of {_describe_fastest(best)}, and simpler"


def _measured_reason(choice: PlanChoice) -> str:
    best, chosen = min(choice.trials, key=lambda trial: trial.step_s), choice.find_trial(choice.plan)
    if chosen is None or chosen == best:
        return "it was measured to be the fastest synchronous plan"
    if chosen.step_s <= MEASURED_TOLERANCE * best.step_s:
        return f"it was measured within {_percent(MEASURED_TOLERANCE)} of {_describe_fastest(best.plan)}, and simpler"
    if is_pure_data_parallel(chosen.plan):
        percent = _percent(DATA_PARALLEL_TOLERANCE)
        return f"it was measured within {percent} of {_describe_fastest(best.plan)}, as runs differ, and simpler"
    percent = _percent(NOISY_TOLERANCE)
    return f"it was measured within {percent} of {_describe_fastest(best.plan)}, as fast in some rounds, and simpler"


def _percent(times: float) -> str:
    return f"{100 * (times - 1):.0f} %"


def _describe_fastest(plan: Plan) -> str:
    return f"{format_plan(plan)}, the fastest synchronous plan"


def build_comparison(choice: PlanChoice, num_plans: int = 3) -> PlanComparison:
    """Return the choice for a page, with the timelines of a number of the best plans."""
    predictions, simulator = choice.ranking.predictions, simulator_for_problem(choice.problem)
    tried = {trial.plan: trial for trial in choice.trials}
    attributed = [
        attribute_time(prediction, simulator)
        for index, prediction in enumerate(predictions)
        if index < MAX_ROWS or prediction.plan in tried or prediction.plan == choice.plan
    ]
    rows = [_with_trial(choice, table_row(prediction, attributed[0]), prediction.plan) for prediction in attributed]
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
    """Yield the chosen plan, then those that were tried, or else those predicted to be fastest."""
    problem = choice.problem
    eligible = [prediction.plan for prediction in choice.ranking.eligible]
    tried = [trial.plan for trial in sorted(choice.trials, key=lambda trial: trial.step_s)]
    plans = dict.fromkeys([choice.plan, *(tried or eligible)])
    for plan in islice(plans, num_plans):
        trial = choice.find_trial(plan)
        simulated = predict_trace(
            plan, problem.model, problem.cluster, batch_size=problem.batch_size, profile=problem.profile
        )
        yield ComparedPlan(format_plan(plan), simulated, trial.trace if trial is not None else None)


def stat_cards(choice: PlanChoice) -> Sequence[StatCard]:
    """Return the most important numbers of a choice."""
    predicted, trial = choice.find_prediction(choice.plan), choice.find_trial(choice.plan)
    cards = [StatCard("plan", format_plan(choice.plan)), StatCard("plans compared", len(choice.ranking.predictions))]
    times = [
        ("predicted step", predicted.step_s if predicted is not None else None),
        ("measured step", trial.step_s if trial is not None else None),
    ]
    for name, seconds in times:
        if seconds is not None:
            value, unit = format_seconds(seconds).split()
            cards.append(StatCard(name, value, unit))
    if predicted is not None:
        cards.append(StatCard("memory of a rank", format_memory(predicted)))
    return cards
