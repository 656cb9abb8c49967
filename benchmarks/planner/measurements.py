"""What plans take on this machine: ranks in processes of their own, several plans of as many ranks in one job."""

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
"""How few laps and steps of these tell how long a step takes, and steps what the machine's speed is meanwhile."""
LEAST_S = 60.0
"""There are rounds for so long at least, however short they are."""
LAB_S, DEADLINE_S = 0.75, 1800
"""Seconds of a turn between hosts, and of all of them."""
MAX_FOREIGN_CORES = 0.1
"""Cores that others may take during a lap that counts."""
CHOOSING = Path(__file__).with_name("choose_plan.py")


def measure_on_host(cells, *, rounds, seconds):
    """Return the turns of cells that need equally many ranks, run on this host."""
    ranks, lines = cells[0].ranks, []
    asked = format_request(cells, rounds, seconds, lap_s=LAP_S, laps=LAPS, beside=NUM_REFERENCE_STEPS, gives_up=False)
    result = run_command(script_command(SCRIPT, [asked]), ranks, threads_per_rank=1, on_line=lines.append)
    texts = [line.text for line in lines]
    if result.exit_code:
        raise LaunchError(f"{ranks} ranks ended with {result.exit_code}: {result.report}\n" + "\n".join(texts[-12:]))
    return parse_turns(texts, cells)


def measure_in_lab(lab, cells, cluster, timing, *, measure, rounds):
    """Return what is chosen on the hosts of a lab, and the turns of cells and of what is chosen; see choose_plan.py.

    A plan that is hopelessly slow has one turn.

    Args:
        lab: one rank runs on each of its hosts.
        cells: of one model.
        cluster: what the planner knows of the hosts.
        timing: what it knows of the model.
        measure: how many plans are tried beside data parallelism.
        rounds: of turns.
    """
    asked = format_request(cells, rounds, LAB_S, lap_s=LAB_S, laps=1, beside=1, gives_up=True)
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
    """Return what ranks.py is told."""
    named = [[cell.letter, cell.strategy, cell.micros] for cell in cells]
    least = {"fewest": STEPS, "least_s": LEAST_S}
    return json.dumps({"cells": named, "rounds": rounds, "seconds": seconds, **least, **how})


def parse_turns(texts, cells):
    """Return for each cell its turns: seconds of a step, and its laps, each with how fast the machine was then."""
    told = [json.loads(text[text.index('{"rank"') :]) for text in texts if '{"rank"' in text]
    rows = [[one for one in told if one["rank"] == rank] for rank in range(cells[0].ranks)]
    if min(map(len, rows)) != max(map(len, rows)) or not told:
        counts = [len(row) for row in rows]
        raise LaunchError(f"the ranks have told what {counts} turns took\n" + "\n".join(texts[-12:]))
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
    """Return how fast the machine was during a lap: what a step of one process took, and how fast each of some at once.

    Args:
        before: what was taken before it, see ranks.py.
        after: what was taken after it.
    """
    crowds = {}
    for name in ("crowd", "memory_crowd"):
        parts = [[rate / taken[name][0] for rate in taken[name]] for taken in (before, after)]
        crowds[name] = tuple(map(fmean, zip(*parts, strict=True)))
    turns = tuple(map(fmean, zip(before["turns"], after["turns"], strict=True)))
    seconds = {name: fmean([before[name], after[name]]) for name in ("beside_s", "message_s")}
    return {**seconds, "turns": turns, **crowds}


def foreign_cores(lap):
    """Return how many cores others took during a lap, of which each rank told.

    Args:
        lap: seconds that it lasted, that the rank computed, and that all cores did, of each rank.
    """
    return max(0.0, lap[0][2] - sum(computed for _, computed, _ in lap)) / lap[0][0]


def quiet_laps(laps):
    """Return the laps in which others hardly computed, and at least that half in which they did least."""
    quiet = sum(lap["others"] <= MAX_FOREIGN_CORES for lap in laps)
    return sorted(laps, key=itemgetter("others"))[: max(quiet, (len(laps) + 1) // 2)]


def lap_duration_s(own):
    """Return how long one lap was, given what each rank says of it.

    Ranks wait for each other in a step, and not at its end; so a lap lasts as long as its slowest rank says, which for
    a single step is more than what it adds.
    """
    return max(seconds for seconds, _, _ in own)
