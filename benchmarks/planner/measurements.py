"""Measured step times: ranks in separate processes, several plans with the same number of ranks in one job."""

import json
import sys
import tempfile
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median

from cells import Cell

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.model.model_profile import format_profile
from counterpoint.world.cluster_file import format_cluster

SCRIPT = Path(__file__).with_name("ranks.py")
LAP_S = 0.25
LAPS, STEPS, NUM_REFERENCE_STEPS = 4, 3, 2
"""Minimum laps, steps per lap, and reference steps."""
MIN_DURATION_S = 60.0
"""Minimum duration of all rounds."""
LAB_S, DEADLINE_S = 0.75, 1800
"""Seconds of a run between hosts, and the timeout of all runs."""
MAX_FOREIGN_CORES = 0.1
"""Maximum number of cores used by other programs during a lap that counts."""
CHOOSING = Path(__file__).with_name("choose_plan.py")


def measure_on_host(cells, *, rounds, seconds, min_duration_s=MIN_DURATION_S):
    """Return the runs of cells with equal numbers of ranks, on this host."""
    ranks, lines = cells[0].ranks, []
    how = {"lap_s": LAP_S, "laps": LAPS, "beside": NUM_REFERENCE_STEPS, "gives_up": False, "least_s": min_duration_s}
    asked = format_request(cells, rounds, seconds, **how)
    result = run_command(script_command(SCRIPT, [asked]), ranks, threads_per_rank=1, on_line=lines.append)
    texts = [line.text for line in lines]
    if result.exit_code:
        raise LaunchError(f"{ranks} ranks ended with {result.exit_code}: {result.report}\n" + "\n".join(texts[-12:]))
    return parse_turns(texts, cells)


def measure_in_lab(  # noqa: PLR0913 - the plans, what the planner knows, and how long to measure
    lab, cells, cluster, timing, *, measure, rounds, min_duration_s=MIN_DURATION_S
):
    """Return the choice on simulated hosts, and the runs of the cells and of the chosen plans; see choose_plan.py.

    A very slow plan is run once.

    Args:
        lab: one rank runs on each of its hosts.
        cells: of one model.
        cluster: of the planner.
        timing: the model's profile.
        measure: number of plans measured in addition to data parallelism.
        rounds: of runs.
        min_duration_s: of all rounds.
    """
    how = {"lap_s": LAB_S, "laps": 1, "beside": 1, "gives_up": True, "least_s": min_duration_s}
    asked = format_request(cells, rounds, LAB_S, **how)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "cluster.yaml"), Path(folder, "timing.json")]
        for file, text in zip(files, (format_cluster(cluster), format_profile(timing)), strict=True):
            file.write_text(text, encoding="utf-8")
        command = [sys.executable, str(CHOOSING), cells[0].letter, str(measure), *map(str, files), asked]
        ended = lab.run_ranks(command, deadline_s=DEADLINE_S)
    texts = [line for one in ended for line in one.text().splitlines()]
    told = next(json.loads(line) for line in texts if line.startswith('{"rank"') and '"taken"' in line)
    chosen = [Cell(cells[0].letter, *told[name]) for name in ("taken", "foreseen")]
    others = [line for line in texts if '"taken"' not in line]
    return told, parse_turns(others, list(dict.fromkeys([*cells, *chosen])))


def format_request(cells, rounds, seconds, **how):
    """Return the request for ranks.py."""
    named = [[cell.letter, cell.strategy, cell.micros] for cell in cells]
    return json.dumps({"cells": named, "rounds": rounds, "seconds": seconds, "fewest": STEPS, **how})


def parse_turns(texts, cells):
    """Return the runs of each cell: seconds per step, and the laps, each with the speed of the machine."""
    told = [json.loads(text[text.index('{"rank"') :]) for text in texts if '{"rank"' in text]
    rows = [[one for one in told if one["rank"] == rank] for rank in range(cells[0].ranks)]
    if min(map(len, rows)) != max(map(len, rows)) or not told:
        counts = [len(row) for row in rows]
        raise LaunchError(f"the ranks reported {counts} runs\n" + "\n".join(texts[-12:]))
    found = {cell: [] for cell in cells}
    for own in zip(*rows, strict=True):
        first = own[0]
        cell = next(cell for cell in cells if [cell.letter, cell.strategy, cell.micros] == first["cell"])
        count = first["count"]
        laps = list(zip(*(one["laps"] for one in own), strict=True))
        paces = [mean_conditions(*both) for both in pairwise(first["paces"])]
        each = [
            {"step_s": lap_duration_s(lap) / count, "others": foreign_cores(lap), **now}
            for lap, now in zip(laps, paces, strict=True)
        ]
        found[cell].append({"step_s": median(one["step_s"] for one in quiet_laps(each)), "laps": each})
    return found


def mean_conditions(before, after):
    """Return the mean of the reference measurements before and after a lap.

    Args:
        before: see ranks.py.
        after: likewise.
    """
    crowds = {}
    for name in ("crowd", "memory_crowd"):
        parts = [[rate / taken[name][0] for rate in taken[name]] for taken in (before, after)]
        crowds[name] = tuple(map(fmean, zip(*parts, strict=True)))
    turns = tuple(map(fmean, zip(before["turns"], after["turns"], strict=True)))
    seconds = {name: fmean([before[name], after[name]]) for name in ("beside_s", "message_s")}
    return {**seconds, "turns": turns, **crowds}


def foreign_cores(lap):
    """Return the number of cores used by other programs during a lap.

    Args:
        lap: by rank: seconds, CPU seconds of the rank, and CPU seconds of all cores.
    """
    return max(0.0, lap[0][2] - sum(computed for _, computed, _ in lap)) / lap[0][0]


def quiet_laps(laps):
    """Return the laps with little use by other programs, and at least half of all laps."""
    quiet = sum(lap["others"] <= MAX_FOREIGN_CORES for lap in laps)
    return sorted(laps, key=itemgetter("others"))[: max(quiet, (len(laps) + 1) // 2)]


def lap_duration_s(own):
    """Return the duration of a lap, from the durations on each rank.

    Ranks wait for each other within a step but not at its end, so a lap takes as long as on its slowest rank.
    """
    return max(seconds for seconds, _, _ in own)
