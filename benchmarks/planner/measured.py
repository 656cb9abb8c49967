"""What plans take on this machine: ranks in processes of their own, several plans of as many ranks in one job."""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.model.timing_file import write_timing
from counterpoint.world.cluster_file import write_cluster

SCRIPT = Path(__file__).with_name("ranks.py")
LAP_S = 0.25
LAPS, STEPS = 2, 3
"""How few of them tell how long a step takes, and what the machine's speed is meanwhile, however long steps are."""
CHOOSING = Path(__file__).with_name("choosing.py")


def on_host(cells, *, rounds, seconds):
    """Return the turns of cells that need equally many ranks, run on this host."""
    ranks, lines = cells[0].ranks, []
    asked = request(cells, rounds, seconds, lap_s=LAP_S)
    result = run_command(script_command(SCRIPT, [asked]), ranks, threads_per_rank=1, on_line=lines.append)
    texts = [line.text for line in lines]
    if result.exit_code:
        raise LaunchError(f"{ranks} ranks ended with {result.exit_code}: {result.report}\n" + "\n".join(texts[-12:]))
    return turns(texts, cells)


def in_lab(lab, cells, *, rounds, seconds, deadline_s):
    """Return the turns of cells on the hosts of a lab, one rank on each; one where a plan is hopelessly slow."""
    asked = request(cells, rounds, seconds, lap_s=seconds, gives_up=True)
    ended = lab.run_ranks([sys.executable, str(SCRIPT), asked], deadline_s=deadline_s)
    return turns([line for one in ended for line in one.text().splitlines()], cells)


def chosen_in_lab(lab, letter, cluster, timing, *, measure, deadline_s):
    """Return what one of the ranks tells of the plan that is taken on the hosts of a lab; see choosing.py.

    Args:
        lab: one rank runs on each of its hosts.
        letter: the model.
        cluster: what the planner knows of the hosts.
        timing: what it knows of the model.
        measure: how many plans are tried beside data parallelism.
        deadline_s: for all of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "cluster.yaml"), Path(folder, "timing.json")]
        for file, text in zip(files, (write_cluster(cluster), write_timing(timing)), strict=True):
            file.write_text(text, encoding="utf-8")
        command = [sys.executable, str(CHOOSING), letter, str(measure), *map(str, files)]
        ended = lab.run_ranks(command, deadline_s=deadline_s)
    told = [json.loads(line) for one in ended for line in one.text().splitlines() if line.startswith('{"rank"')]
    return told[0]


def request(cells, rounds, seconds, *, lap_s, gives_up=False):
    """Return what ranks.py is told."""
    named = [[cell.letter, cell.strategy, cell.micros] for cell in cells]
    least = {"laps": LAPS, "fewest": STEPS, "gives_up": gives_up}
    return json.dumps({"cells": named, "rounds": rounds, "seconds": seconds, "lap_s": lap_s, **least})


def turns(texts, cells):
    """Return for each cell its turns: seconds of a step, of one process beside it, how much slower some at once are."""
    told = [json.loads(text[text.index('{"rank"') :]) for text in texts if '{"rank"' in text]
    rows = [[one for one in told if one["rank"] == rank] for rank in range(cells[0].ranks)]
    if min(map(len, rows)) != max(map(len, rows)) or not told:
        counts = [len(row) for row in rows]
        raise LaunchError(f"the ranks have told what {counts} turns took\n" + "\n".join(texts[-12:]))
    found = {cell: [] for cell in cells}
    for own in zip(*rows, strict=True):
        first = own[0]
        cell = next(cell for cell in cells if [cell.letter, cell.strategy, cell.micros] == first["cell"])
        all_s, two_s = (first.get(name, 0.0) - first["meeting"] for name in ("together", "pair"))
        slowdowns = {cells[0].ranks: all_s / first["alone"]} | ({2: two_s / first["alone"]} if "pair" in first else {})
        taken = {"beside_s": first["beside"], "slowdowns": slowdowns}
        laps = list(zip(*(one["laps"] for one in own), strict=True))
        found[cell].append({"step_s": step_s(laps, first["count"]), "least_s": least_s(laps, first["count"]), **taken})
    return found


def step_s(laps, count):
    """Return the mean step of a lap, the median over that half of the laps in which others computed least.

    Ranks wait for each other in a step, and not at its end; so a lap lasts as long as its slowest rank says, which for
    a single step is more than what it adds.

    Args:
        laps: one after the other, of each rank; see ranks.py.
        count: steps of a lap.
    """
    rows = []
    for own in laps:
        others_s = own[0][2] - sum(computed for _, computed, _ in own)
        rows.append((max(0.0, others_s) / own[0][0], longest_s(own) / count))
    rows.sort()
    return median(step for _, step in rows[: (len(rows) + 1) // 2])


def least_s(laps, count):
    """Return the mean step of the shortest lap."""
    return min(map(longest_s, laps)) / count


def longest_s(own):
    """Return how long one lap was, given what each rank says of it."""
    return max(seconds for seconds, _, _ in own)
