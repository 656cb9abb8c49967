"""The dynamic program compared with PipeDream's released optimizer, alternately, on each published case."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.planner.pipeline.layer_graph import find_cuts, parse_graph
from counterpoint.planner.pipeline.partition import PartitionLevel, ReleasedObjective, find_partition
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from pipedream_optimizer import REPEAT_BELOW_S, median_time  # noqa: E402 - from the folder of this benchmark

ROOT = HERE.parents[1]
CHECKOUT = ROOT / "build" / "peers" / "pipedream"
PROFILES = ROOT / "tests" / "planner" / "pipeline" / "profiles"
CASES = json.loads((PROFILES / "reference.json").read_text(encoding="utf-8"))["cases"]
ROUNDS, DEADLINE_S = 3, 600
MIN_SPEEDUP, TOLERANCE_S = 10, 1e-9
COLUMNS = ("model", "parts", "GB/s", "ours ms", "theirs ms", "times", "slowest stage ms", "theirs")


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    is_there = (CHECKOUT / "optimizer").is_dir()
    found = []
    for case in CASES[: 2 if options.is_quick else None]:
        options.report_progress(case_name(case))
        found.append(summarize_case(case, alternate(case, options.num_rounds(ROUNDS, minimum=1), is_there=is_there)))
    missed = [line for one in found for line in find_misses(one)]
    if not is_there:
        missed.append(f"the released optimizer is not at {CHECKOUT}, so it was not timed; see README.md")
    notes = {"times": "speed-up over the released optimizer, both warm, from the text of the profile to the plan"}
    return BenchmarkResult(COLUMNS, tuple(make_row(one) for one in found), tuple(missed), {"cases": found}, notes)


def alternate(case, rounds, *, is_there):
    """Return the result and the time of both in each round; one round for slow cases."""
    turns = []
    for _ in range(rounds):
        turns.append({"ours": run_counterpoint(case), "theirs": run_pipedream(case) if is_there else None})
        if is_there and turns[-1]["theirs"]["seconds"] > REPEAT_BELOW_S:
            break
    return turns


def run_counterpoint(case):
    """Return the seconds of the slowest stage and of finding it, from the text of the profile."""
    levels = [PartitionLevel(*level) for level in zip(case["machines"], case["bandwidth"], strict=True)]

    def find():
        profile = parse_graph(profile_path(case).read_text(encoding="utf-8"))
        return find_partition(find_cuts(profile.without_inputs()), levels, ReleasedObjective())

    seconds, found = median_time(find)
    return {"seconds": seconds, "stage_s": found.slowest_s}


def run_pipedream(case):
    """Return the same for the released optimizer."""
    command = [
        sys.executable,
        str(HERE / "pipedream_optimizer.py"),
        str(CHECKOUT),
        str(profile_path(case)),
        json.dumps(case),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode:
        raise LaunchError(f"the released optimizer ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def summarize_case(case, turns):
    """Return a case with the medians of its rounds."""
    sides = [side for side in ("ours", "theirs") if turns[0][side] is not None]
    seconds = {side: statistics.median(turn[side]["seconds"] for turn in turns) for side in sides}
    stages = {side: turns[0][side]["stage_s"] for side in sides}
    given = {key: case[key] for key in ("model", "machines", "bandwidth", "stage_s")}
    return {**given, "seconds": seconds, "stages": stages, "turns": turns}


def find_misses(one):
    """Yield the missed bars of a case."""
    seconds, stages = one["seconds"], {**one["stages"], "reference.json": one["stage_s"]}
    for side in stages.keys() - {"ours"}:
        if not stages["ours"] <= stages[side] + TOLERANCE_S:
            yield f"{case_name(one)}: the slowest stage takes {stages['ours']:.9f} s, {side}: {stages[side]:.9f} s"
    if "theirs" in seconds and not seconds["theirs"] >= MIN_SPEEDUP * seconds["ours"]:
        yield f"{case_name(one)}: {seconds['theirs'] / seconds['ours']:.1f} times as fast, {MIN_SPEEDUP} required"
    if "theirs" in stages and not abs(stages["theirs"] - one["stage_s"]) <= TOLERANCE_S:
        yield f"{case_name(one)}: the optimizer finds {stages['theirs']:.9f} s, reference.json: {one['stage_s']:.9f} s"


def make_row(one):
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


def case_name(case):
    return f"{case['model']} on {'x'.join(map(str, case['machines']))} at {case['bandwidth'][-1] / 1e9:g} GB/s"


def profile_path(case):
    return PROFILES / f"{case['model']}.txt"


def ms(seconds):
    return f"{1e3 * seconds:.2f}"
