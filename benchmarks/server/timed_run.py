"""One turn of a side: processes say in a folder that they are ready, begin when all are, and leave what they measured.

A folder, because the hosts of the lab share files and nothing else.
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
            raise TimeoutError(f"{path} was not there after {timeout_s:g} s")
        time.sleep(POLL_S)


def time_steps(folder, name, step, *, warm_up, steps, first=0):
    """Call ``step(number)`` until it has been timed so often, together with all others; leave seconds and losses."""
    folder = Path(folder)
    losses = [step(number) for number in range(first, first + warm_up)]
    (folder / f"ready.{name}").touch()
    wait_for_file(folder / "go")
    began, spent = time.perf_counter(), time.process_time()
    losses += [step(number) for number in range(first + warm_up, first + warm_up + steps)]
    elapsed, spent = time.perf_counter() - began, time.process_time() - spent
    told = {"steps": steps, "elapsed": elapsed, "processor_s": spent}
    write_result(folder, name, told | {"losses": [float(loss) for loss in losses]})
    return first + warm_up + steps


def keep_stepping(folder, step, number):
    """Keep the others company until all have measured."""
    while not (Path(folder) / "over").exists():
        step(number)
        number += 1


def write_result(folder, name, found):
    draft = Path(folder) / f"draft.{name}"
    draft.write_text(json.dumps(found))
    draft.rename(Path(folder) / f"found.{name}")


def run_contenders(folder, names, check):
    """Return what the processes have found, by name, and how many processors all of them took meanwhile.

    Args:
        folder: of the turn.
        names: who measures.
        check: raises where a process has ended.
    """
    folder = Path(folder)
    clocks = []
    for stage in ("ready", "found"):
        until = time.monotonic() + TIMEOUT_S
        while missing := [name for name in names if not (folder / f"{stage}.{name}").exists()]:
            check()
            if time.monotonic() > until:
                raise TimeoutError(f"{missing} were not {stage} after {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        clocks.append((time.perf_counter(), descendants_cpu_s()))
        (folder / {"ready": "go", "found": "over"}[stage]).touch()
    found = {name: json.loads((folder / f"found.{name}").read_text()) for name in names}
    window_s, spent_s = (after - before for before, after in zip(*clocks, strict=True))
    return found, spent_s / window_s


def descendants_cpu_s():
    """Return what all processes that have come from this one, and still run, have spent of the processor."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(path.parent.name)] = int(words[1])
        spent[int(path.parent.name)] = int(words[11]) + int(words[12])
    mine = {os.getpid()}
    while more := {one for one, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(spent.get(one, 0) for one in mine - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
