"""What plans take on this machine: ranks in processes of their own, several plans of as many ranks in one job."""

import json
import sys
from pathlib import Path
from statistics import median

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command

SCRIPT = Path(__file__).with_name("ranks.py")


def on_host(cells, *, rounds, seconds):
    """Return the turns of cells that need equally many ranks, run on this host."""
    ranks, lines = cells[0].ranks, []
    result = run_command(
        script_command(SCRIPT, [request(cells, rounds, seconds)]), ranks, threads_per_rank=1, on_line=lines.append
    )
    texts = [line.text for line in lines]
    if result.exit_code:
        raise LaunchError(f"{ranks} ranks ended with {result.exit_code}: {result.report}\n" + "\n".join(texts[-12:]))
    return turns(texts, cells)


def in_lab(lab, cells, *, rounds, seconds, deadline_s):
    """Return the turns of cells on the hosts of a lab, one rank on each."""
    ended = lab.run_ranks([sys.executable, str(SCRIPT), request(cells, rounds, seconds)], deadline_s=deadline_s)
    return turns([line for one in ended for line in one.text().splitlines()], cells)


def request(cells, rounds, seconds):
    """Return what ranks.py is told."""
    named = [[cell.letter, cell.strategy, cell.micros] for cell in cells]
    return json.dumps({"cells": named, "rounds": rounds, "seconds": seconds})


def turns(texts, cells):
    """Return for each cell its turns: seconds of a step, and of a step of one process beside it."""
    told = [json.loads(text[text.index('{"rank"') :]) for text in texts if '{"rank"' in text]
    if len(told) != cells[0].ranks:
        raise LaunchError(f"{len(told)} of {cells[0].ranks} ranks have told what they took\n" + "\n".join(texts[-12:]))
    told.sort(key=lambda one: one["rank"])
    found = {cell: [] for cell in cells}
    for own in zip(*(one["turns"] for one in told), strict=True):
        cell = next(cell for cell in cells if [cell.letter, cell.strategy, cell.micros] == own[0]["cell"])
        laps = [one["laps"] for one in own]
        beside = {"beside_s": median(own[0]["alone"]), "together_s": median(own[0]["together"])}
        found[cell].append({"step_s": step_s(laps), "least_s": least_s(laps), **beside})
    return found


def step_s(laps):
    """Return the mean step of a lap, the median over that half of the laps in which others computed least.

    Ranks wait for each other in a step, and not at its end; so a lap lasts as long as its slowest rank says, which for
    a single step is more than what it adds.

    Args:
        laps: of each rank; see ranks.py.
    """
    rows = []
    for own in zip(*laps, strict=True):
        others_s = own[0][2] - sum(computed for _, computed, _ in own)
        rows.append((max(0.0, others_s) / sum(own[0][0]), mean_s(own)))
    rows.sort()
    return median(step for _, step in rows[: (len(rows) + 1) // 2])


def mean_s(own):
    """Return the mean step of one lap of each rank."""
    return max(sum(steps) / len(steps) for steps, _, _ in own)


def least_s(laps):
    """Return the mean step of the shortest lap."""
    return min(mean_s(own) for own in zip(*laps, strict=True))
