"""Synchronized timing of processes through a folder: they signal ready, start together, and write their results.

A folder, because simulated hosts share only the file system.
"""

import json
import os
import time
from pathlib import Path

POLL_S, TIMEOUT_S = 0.002, 150.0


def wait_for_file(path, timeout_s=TIMEOUT_S):
    until = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} does not exist after {timeout_s:g} s")
        time.sleep(POLL_S)


def time_steps(folder, name, step, *, warm_up, steps, first=0):
    """Time calls of ``step(number)`` after a common start, and write seconds and losses to the folder."""
    folder = Path(folder)
    losses = [step(number) for number in range(first, first + warm_up)]
    (folder / f"ready.{name}").touch()
    wait_for_file(folder / "go")
    started_s, cpu_s = time.perf_counter(), time.process_time()
    losses += [step(number) for number in range(first + warm_up, first + warm_up + steps)]
    elapsed, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    timing = {"steps": steps, "elapsed": elapsed, "processor_s": cpu_s}
    write_result(folder, name, timing | {"losses": [float(loss) for loss in losses]})
    return first + warm_up + steps


def keep_stepping(folder, step, number):
    """Keep running steps until all processes have measured."""
    while not (Path(folder) / "done").exists():
        step(number)
        number += 1


def write_result(folder, name, result):
    draft = Path(folder) / f"draft.{name}"
    draft.write_text(json.dumps(result))
    draft.rename(Path(folder) / f"found.{name}")


def run_contenders(folder, names, check):
    """Return the results of all processes by name, and the number of CPUs they used together.

    Args:
        folder: of the run.
        names: of the measuring processes.
        check: raises if a process has exited.
    """
    folder = Path(folder)
    clocks = []
    for stage in ("ready", "found"):
        until = time.monotonic() + TIMEOUT_S
        while missing := [name for name in names if not (folder / f"{stage}.{name}").exists()]:
            check()
            if time.monotonic() > until:
                raise TimeoutError(f"{missing} have not signalled {stage} after {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        clocks.append((time.perf_counter(), descendants_cpu_s()))
        (folder / {"ready": "go", "found": "done"}[stage]).touch()
    results = {name: json.loads((folder / f"found.{name}").read_text()) for name in names}
    window_s, spent_s = (after - before for before, after in zip(*clocks, strict=True))
    return results, spent_s / window_s


def descendants_cpu_s():
    """Return the CPU seconds of all running descendants of this process."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has exited
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    pids = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= children
    return sum(ticks.get(pid, 0) for pid in pids - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
