"""The dynamic program beside PipeDream's released optimizer, in turns, on each case that is published for it."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.planner.objectives import Released
from counterpoint.planner.partition import Level, partition
from counterpoint.planner.profile import read_profile
from counterpoint.planner.states import find_states
from counterpoint.testing.claims import Options, Result

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from theirs import QUICK_S, turn  # noqa: E402 - from the folder of this benchmark

ROOT = HERE.parents[1]
CHECKOUT = ROOT / "build" / "peers" / "pipedream"
PROFILES = ROOT / "tests" / "planner" / "profiles"
CASES = json.loads((PROFILES / "reference.json").read_text(encoding="utf-8"))["cases"]
ROUNDS, DEADLINE_S = 3, 600
LEAST_TIMES, TOLERANCE_S = 10, 1e-9
COLUMNS = ("model", "parts", "GB/s", "ours ms", "theirs ms", "times", "slowest stage ms", "theirs")


def measure(options: Options) -> Result:
    is_there = (CHECKOUT / "optimizer").is_dir()
    found = []
    for case in CASES:
        options.tell(named(case))
        found.append(judged(case, in_turns(case, options.rounds or ROUNDS, is_there=is_there)))
    missed = [line for one in found for line in misses(one)]
    if not is_there:
        missed.append(f"the released optimizer is not at {CHECKOUT}, so that it was not timed; see the README here")
    notes = {"times": "as fast as the released optimizer, both warm, from the text of the profile to the plan"}
    return Result(COLUMNS, tuple(row(one) for one in found), tuple(missed), {"cases": found}, notes)


def in_turns(case, rounds, *, is_there):
    """Return what both find in each round and how long that takes; one round is enough where it is long."""
    turns = []
    for _ in range(rounds):
        turns.append({"ours": ours(case), "theirs": theirs(case) if is_there else None})
        if is_there and turns[-1]["theirs"]["seconds"] > QUICK_S:
            break
    return turns


def ours(case):
    """Return the seconds of the slowest stage and of finding it, beginning with the text of the profile."""
    levels = [Level(*level) for level in zip(case["machines"], case["bandwidth"], strict=True)]

    def find():
        profile = read_profile(path_of(case).read_text(encoding="utf-8"))
        return partition(find_states(profile.without_inputs()), levels, Released())

    seconds, found = turn(find)
    return {"seconds": seconds, "stage_s": found.slowest_s}


def theirs(case):
    """Return the same of the released optimizer."""
    command = [sys.executable, str(HERE / "theirs.py"), str(CHECKOUT), str(path_of(case)), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode:
        raise LaunchError(f"the released optimizer ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def judged(case, turns):
    """Return a case with the medians of its turns."""
    sides = [side for side in ("ours", "theirs") if turns[0][side] is not None]
    seconds = {side: statistics.median(turn[side]["seconds"] for turn in turns) for side in sides}
    stages = {side: turns[0][side]["stage_s"] for side in sides}
    given = {key: case[key] for key in ("model", "machines", "bandwidth", "stage_s")}
    return {**given, "seconds": seconds, "stages": stages, "turns": turns}


def misses(one):
    """Yield what a case misses."""
    seconds, stages = one["seconds"], {**one["stages"], "reference.json": one["stage_s"]}
    for side in stages.keys() - {"ours"}:
        if not stages["ours"] <= stages[side] + TOLERANCE_S:
            yield f"{named(one)}: the slowest stage takes {stages['ours']:.9f} s, that of {side} {stages[side]:.9f} s"
    if "theirs" in seconds and not seconds["theirs"] >= LEAST_TIMES * seconds["ours"]:
        yield f"{named(one)}: {seconds['theirs'] / seconds['ours']:.1f} times as fast, {LEAST_TIMES} promised"
    if "theirs" in stages and not abs(stages["theirs"] - one["stage_s"]) <= TOLERANCE_S:
        yield f"{named(one)}: the optimizer finds {stages['theirs']:.9f} s, reference.json says {one['stage_s']:.9f} s"


def row(one):
    seconds, stages = one["seconds"], one["stages"]
    is_there = "theirs" in seconds
    return (
        one["model"],
        "x".join(map(str, one["machines"])),
        ", ".join(f"{speed / 1e9:g}" for speed in one["bandwidth"]),
        ms(seconds["ours"]),
        ms(seconds["theirs"]) if is_there else "",
        f"{seconds['theirs'] / seconds['ours']:.0f}" if is_there else "",
        ms(stages["ours"]),
        ms(stages["theirs"] if is_there else one["stage_s"]),
    )


def named(case):
    return f"{case['model']} on {'x'.join(map(str, case['machines']))} at {case['bandwidth'][-1] / 1e9:g} GB/s"


def path_of(case):
    return PROFILES / f"{case['model']}.txt"


def ms(seconds):
    return f"{1e3 * seconds:.2f}"
