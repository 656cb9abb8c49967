"""One case in PipeDream's released optimizer: ``pipedream_optimizer.py CHECKOUT PROFILE CASE``."""

import contextlib
import importlib
import io
import json
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

REPEAT_BELOW_S, REPETITIONS = 1.0, 5
SETTINGS = {
    "straight_pipeline": False,
    "use_memory_constraint": False,
    "use_fewer_machines": False,
    "activation_compression_ratio": None,
    "memory_size": 16e9,
}
"""Command line options, which the script reads from its module's globals."""


def median_time(find):
    """Return the time and the result of a call: one call, or for quick ones the median of several warm calls."""
    seconds, found = time_call(find)
    if seconds < REPEAT_BELOW_S:
        seconds = statistics.median(time_call(find)[0] for _ in range(REPETITIONS))
    return seconds, found


def time_call(find):
    began = time.perf_counter()
    found = find()
    return time.perf_counter() - began, found


def load_optimizer(checkout):
    """Return the optimizer's module, which is a script; its drawing library is replaced by a stub if missing."""
    if find_spec("graphviz") is None:
        sys.modules["graphviz"] = ModuleType("graphviz")
    sys.path[:0] = [str(checkout / "optimizer"), str(checkout)]
    importlib.import_module("numpy")  # otherwise imported while timed
    if not hasattr(importlib.import_module("graph"), "Graph"):
        sys.modules["graph"] = importlib.import_module("graph.graph")
    optimizer = importlib.import_module("optimizer_graph_hierarchical")
    vars(optimizer).update(SETTINGS)
    return optimizer


def slowest_stage_s(optimizer, profile, case):
    """Return the seconds of its plan's slowest stage, and of data parallelism."""
    with contextlib.redirect_stdout(io.StringIO()):
        return optimizer.main(
            all_num_machines=case["machines"],
            profile_filename=profile,
            network_bandwidths=case["bandwidth"],
            output_directory=None,
            **SETTINGS,
        )


if __name__ == "__main__":
    released, given = load_optimizer(Path(sys.argv[1])), json.loads(sys.argv[3])
    took_s, (stage_s, _) = median_time(lambda: slowest_stage_s(released, sys.argv[2], given))
    sys.stdout.write(json.dumps({"seconds": took_s, "stage_s": stage_s}))
