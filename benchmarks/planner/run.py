"""Predictions and measurements: twelve plans of three models on this machine, and chosen plans between hosts."""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import measurements  # noqa: E402 - from the folder of this benchmark
import predictions  # noqa: E402 - likewise
from cells import CELLS, LAB_RATES, PLANS_BETWEEN, WORKLOADS, Cell  # noqa: E402 - likewise

from benchmarks.lab import Lab  # noqa: E402 - likewise

ROUNDS, SECONDS, NUM_MEASURED_PLANS = 3, 1.0, 4
MEDIAN, WORST, CORRELATION = 0.10, 0.25, 0.9
MAX_SLOWDOWN, MIN_NEAR_FRACTION = 1.10, 0.9


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Args:
        letters: of the models.
        cells: plans on this machine.
        plans_between: plans between hosts, by the number of hosts.
        rates: of the links between hosts.
        num_probes: of the machine.
        num_profiles: of each size of microbatches, at least.
        min_duration_s: of all rounds of a run.
    """

    letters: tuple
    cells: list
    plans_between: dict
    rates: tuple
    num_probes: int = 3
    num_profiles: int = 4
    min_duration_s: float = measurements.MIN_DURATION_S


FULL = Extent(tuple(WORKLOADS), CELLS, PLANS_BETWEEN, LAB_RATES)
QUICK = Extent(
    ("digits",),
    [cell for cell in CELLS if cell.letter == "digits" and cell.strategy in {"solo", "data(2)", "pipeline(2)"}],
    {2: PLANS_BETWEEN[2][:2]},
    LAB_RATES[1:2],
    num_probes=1,
    num_profiles=1,
    min_duration_s=0.0,
)
COLUMNS = ("model", "where", "plan", "ms", "predicted", "off", "over the fastest", "over data")


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    known, here = {}, []
    extent = QUICK if options.is_quick else FULL
    for letter in extent.letters:
        options.report_progress(f"{letter}: probe and profile")
        cluster, beside_s = predictions.probe_machine(extent.num_probes)
        cells = [*extent.cells, *lab_cells(extent)]
        known[letter] = predictions.profile_model(letter, cells, beside_s[letter], extent.num_profiles), cluster
        here += on_this_machine(letter, *known[letter], extent, options)
    rows, figures, missed = list(map(make_row, here)), {"here": here}, list(find_misses(here, extent.letters))
    notes = {
        "off": "predicted / measured - 1, at the machine's speed during the measurement",
        "chosen": f"chosen by strategy='auto', num_measured_plans={NUM_MEASURED_PLANS}",
        "predicted": "the choice without measurements",
    }
    if reason := Lab.unavailable_reason():
        missed.append(f"simulated hosts are not available: {reason}")
    else:
        there = figures["lab"] = between_hosts(known, extent, options)
        rows += map(make_lab_row, there)
        missed += find_lab_misses(there)
    return BenchmarkResult(COLUMNS, tuple(rows), tuple(missed), figures, notes)


def on_this_machine(letter, model, cluster, extent, options):
    """Return the results of all cells of a model on this machine."""
    found, seconds = [], 0.0 if options.is_quick else SECONDS
    for ranks in sorted({cell.ranks for cell in extent.cells}):
        options.report_progress(f"{letter}: plans of {ranks} rank{'s' if ranks > 1 else ''}")
        asked = [cell for cell in extent.cells if cell.letter == letter and cell.ranks == ranks]
        cells = [predictions.with_explicit_split(cell, model, cluster) for cell in asked]
        turns = measurements.measure_on_host(
            cells,
            rounds=options.num_rounds(ROUNDS, minimum=2),
            seconds=seconds,
            min_duration_s=extent.min_duration_s,
        )
        own = [compare_prediction(cell, turns[cell], model, cluster) for cell in cells]
        options.report_progress("".join(map(format_progress, own)))
        found += own
    return found


def make_row(one):
    """Return the table row of one plan on this machine."""
    return (
        one["model"],
        f"{one['ranks']} ranks",
        one["plan"],
        ms(one["step_s"]),
        ms(one["said_s"]),
        relative_error(one),
        "",
        "",
    )


def compare_prediction(cell, turns, model, cluster):
    """Return the lap with the median error of a cell, each predicted at its measured speed."""
    laps = measurements.quiet_laps([lap for turn in turns for lap in turn["laps"]])
    said = [(predict_at_speed(cell, lap, model, cluster), lap["step_s"]) for lap in laps]
    foreseen_s, step_s = sorted(said, key=lambda pair: pair[0] / pair[1])[len(said) // 2]
    own = {"model": cell.letter, "plan": cell.strategy, "ranks": cell.ranks}
    probed_s = predictions.predict_step_s(cell, model, cluster)
    return {**own, "step_s": step_s, "said_s": foreseen_s, "probed_s": probed_s, "turns": turns}


def predict_at_speed(cell, lap, model, cluster):
    """Return the prediction for a cell at the speed measured around a lap."""
    calmed, here = predictions.at_measured_speed(model, cluster, lap["beside_s"])
    return predictions.predict_step_s(cell, calmed, predictions.with_contention(here, lap))


def find_misses(found, letters):
    """Yield the missed bars on this machine."""
    errors = [abs(one["said_s"] / one["step_s"] - 1) for one in found]
    if not statistics.median(errors) <= MEDIAN:
        yield f"the median error is {statistics.median(errors):.1%}, at most {MEDIAN:.0%} required"
    worst = max(found, key=lambda one: abs(one["said_s"] / one["step_s"] - 1))
    if not max(errors) <= WORST:
        yield f"{worst['plan']} of {worst['model']} is off by {max(errors):.1%}, at most {WORST:.0%} required"
    for letter in letters:
        own = [one for one in found if one["model"] == letter]
        rank = correlation([one["probed_s"] for one in own], list(map(probed_step_s, own)))
        if not rank >= CORRELATION:
            yield f"the rank correlation of {letter} is {rank:.2f}, at least {CORRELATION} required"
    rank = correlation([one["said_s"] for one in found], [one["step_s"] for one in found])
    if not rank >= CORRELATION:
        yield f"the rank correlation of all is {rank:.2f}, at least {CORRELATION} required"


def probed_step_s(one):
    """Return a measured step time scaled to the speed of the profile and the probe.

    Plans are measured at times when the machine's speed differs by more than the plans do, so their order is compared
    at one speed.
    """
    return one["step_s"] * one["probed_s"] / one["said_s"]


def correlation(some, others):
    """Return Spearman's rank correlation."""
    places = [[sorted(values).index(value) for value in values] for values in (some, others)]
    return statistics.correlation(*places)


def lab_cells(extent):
    """Return all cells between hosts that are measured in addition to chosen plans."""
    return [
        Cell(letter, *plan) for letter in extent.letters for plans in extent.plans_between.values() for plan in plans
    ]


def between_hosts(known, extent, options):
    """Return the results between hosts: by model, number of hosts and rate, with the chosen plan marked."""
    found = []
    for hosts, plans in extent.plans_between.items():
        for rate in extent.rates:
            with Lab(hosts=hosts, rate=rate) as lab:
                level = predictions.lab_level(lab)
                for letter, (model, here) in known.items():
                    options.report_progress(f"{letter} on {hosts} hosts, {rate or 'unshaped'}")
                    network = predictions.cluster_of_lab(level, here)
                    cells = [predictions.with_explicit_split(Cell(letter, *plan), model, network) for plan in plans]
                    own = measure_lab_cell(
                        lab, cells, model, network, options.num_rounds(ROUNDS, minimum=1), extent.min_duration_s
                    )
                    found += [{**one, "rate": rate or "unshaped"} for one in own]
                    options.report_progress("".join([*map(format_progress, own), *map(format_trial, own[0]["trials"])]))
    return found


def measure_lab_cell(lab, cells, model, network, rounds, min_duration_s):
    """Return the results of plans for one model, number of hosts and rate, including the chosen plans."""
    told, turns = measurements.measure_in_lab(
        lab,
        cells,
        network,
        model.timing,
        measure=NUM_MEASURED_PLANS,
        rounds=rounds,
        min_duration_s=min_duration_s,
    )
    taken, foreseen = Cell(cells[0].letter, *told["taken"]), Cell(cells[0].letter, *told["foreseen"])
    first, cells = cells[0], list(turns)
    steps = {cell: [turn["step_s"] for turn in turns[cell]] for cell in cells}
    fastest = min(cells, key=lambda cell: statistics.median(steps[cell]))
    return [
        {
            **compare_prediction(cell, turns[cell], model, network),
            "over_fastest": ratio(steps[cell], steps[fastest]),
            "over_data": ratio(steps[cell], steps[first]),
            "is_taken": cell == taken,
            "is_foreseen": cell == foreseen,
            "trials": told["trials"],
        }
        for cell in cells
    ]


def format_progress(one):
    """Return a line of progress about one plan."""
    ratios = f", {one['over_data']:.2f} of data{', chosen' * one['is_taken']}" if "over_data" in one else ""
    return f"\n    {one['plan']}: {ms(one['step_s'])} ms, predicted {ms(one['said_s'])}{ratios}"


def format_trial(trial):
    """Return a line about a plan's measurement before the choice."""
    plan, _, step_s, _ = trial
    return f"\n    tried before: {plan}, {ms(step_s)} ms"


def ratio(some, others):
    """Return the median over rounds of the ratio of step times."""
    return statistics.median(own / other for own, other in zip(some, others, strict=False))


def make_lab_row(one):
    """Return the table row of one plan between hosts."""
    marks = [word for word, is_so in (("chosen", one["is_taken"]), ("predicted", one["is_foreseen"])) if is_so]
    return (
        one["model"],
        f"{one['ranks']} hosts, {one['rate']}",
        f"{one['plan']}{' (' + ', '.join(marks) + ')' if marks else ''}",
        ms(one["step_s"]),
        ms(one["said_s"]),
        relative_error(one),
        f"{one['over_fastest']:.2f}",
        f"{one['over_data']:.2f}",
    )


def find_lab_misses(found):
    """Yield the missed bars of chosen plans."""
    chosen = [one for one in found if one["is_taken"]]
    for one in chosen:
        if not one["over_data"] <= 1:
            where = f"{one['ranks']} hosts, {one['rate']}"
            yield f"{one['plan']} of {one['model']} on {where}, is slower than data parallelism"
    near = sum(one["over_fastest"] <= MAX_SLOWDOWN for one in chosen)
    if not near >= MIN_NEAR_FRACTION * len(chosen):
        yield f"{near} of {len(chosen)} chosen plans are close to the fastest, {MIN_NEAR_FRACTION:.0%} required"


def ms(seconds):
    return f"{1e3 * seconds:.1f}"


def relative_error(one):
    return f"{one['said_s'] / one['step_s'] - 1:+.0%}"
