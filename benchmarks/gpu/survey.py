"""Every strategy, system and kind of model on the device, with the CPU's numbers in float64; waits of the host.

The cases are those of the tests (``counterpoint.testing.device_survey``). Processes take them one by one: one that
crashes or hangs is a line of the result, and a new process takes the next one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from benchmarks.gpu.checks import Check, passes_if, skip
from benchmarks.gpu.target import Target
from counterpoint.errors import PlanError
from counterpoint.testing.device_survey import BUILDERS, CASES, TOLERANCE, SurveyCase, largest_difference, train

NUM_STEPS = 4
"""Checks of a loss are made in the first, second, third and fifth step: the fourth has as few waits as most have."""
CASE_S = 40.0
DRY_CASES = (SurveyCase("mlp", "data(2)"), SurveyCase("mlp", "solo", "trainer"))


def measure(target: Target) -> Iterator[Check]:
    """Yield one check for each model, and one for the waits."""
    cases = target.size(CASES, DRY_CASES)
    results = run_cases(cases, str(target.device), target)
    for model in BUILDERS:
        chosen = [result for case, result in zip(cases, results, strict=True) if case.model == model]
        yield check_of(model, chosen) if chosen else skip(model, "not in a dry run")
    yield check_waits(results)


def check_of(model: str, results: Sequence[dict]) -> Check:
    """Return whether all cases of a model have the CPU's numbers."""
    counts = collections.Counter(result["outcome"] for result in results)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    wrong = [
        f"{result['case']}: {result.get('error', result.get('difference'))}"
        for result in results
        if result["outcome"] != "same"
    ]
    largest = max((result["difference"] for result in results if result["outcome"] == "same"), default=0.0)
    reason = "; ".join(wrong) or f"differences at most {TOLERANCE}; {largest:.1e}"
    return Check(f"{model}, {len(results)} plans", passes_if(not wrong), text, reason, {"cases": list(results)})


def check_waits(results: Sequence[dict]) -> Check:
    """Return whether no step waits more often than it has ranks."""
    counted = {result["case"]: result["waits"] for result in results if result.get("waits") is not None}
    too_many = {case: waits for case, waits in counted.items() if sum(waits.values()) > most_waits(case)}
    most = max((sum(waits.values()) for waits in counted.values()), default=0)
    reason = "; ".join(f"{case}: {waits}" for case, waits in too_many.items()) or "at most one for each rank"
    return Check("waits of the host in a step", passes_if(not too_many), f"at most {most}", reason, {"waits": counted})


def most_waits(case: str) -> int:
    """Return how many waits a step of a plan may have: one for each rank, which gives its report."""
    plan = case.split(" | ")[1]
    return 4 if " * " in plan else 3 if plan.startswith(("server", "downpour", "easgd")) else 2


# One case, in whichever process.


def run_case(case: SurveyCase, device: str) -> dict[str, Any]:
    """Train a case on the CPU and on the device; return how they compare."""
    waits: collections.Counter | None = None

    def observe(step: Callable[[], float]) -> float:
        nonlocal waits
        with count_waits(device) as waits:
            return step()

    result: dict[str, Any] = {"case": str(case)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = train(case, "cpu", num_steps=NUM_STEPS)
            actual = train(case, device, num_steps=NUM_STEPS, observe_last=observe)
        difference = largest_difference(actual, expected)
        outcome = "same" if difference <= TOLERANCE else "differs"
        return {**result, "outcome": outcome, "difference": difference, "waits": None if waits is None else dict(waits)}
    except Exception as error:  # noqa: BLE001 - an outcome of the survey
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "counterpoint/" in f.filename]
        lines = ["/".join(f.filename.split("/")[-3:]) + f":{f.lineno}" for f in frames[::-1][:4]]
        outcome = "refused" if isinstance(error, PlanError) else "error"
        return {**result, "outcome": outcome, "error": f"{type(error).__name__}: {str(error)[:400]}", "at": lines}


def count_waits(device: str) -> AbstractContextManager[collections.Counter]:
    """Return a context that counts by source line how often the host waits for the device."""
    return count_cuda_waits() if device.startswith("cuda") else count_stand_in_waits()


@contextmanager
def count_stand_in_waits() -> Iterator[collections.Counter]:
    from counterpoint.testing.stand_in_device import DEVICE

    by_line: collections.Counter = collections.Counter()
    with DEVICE.count_host_waits() as waits:
        yield by_line
    for (_, line), count in waits.items():
        by_line[line] += count
    DEVICE.require_no_races()


@contextmanager
def count_cuda_waits() -> Iterator[collections.Counter]:
    waits: collections.Counter = collections.Counter()

    def record(message: Any, *_: object, **__: object) -> None:
        if "synchroniz" in str(message):
            waits[source_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def source_line() -> str:
    """Return the innermost line of the library."""
    for frame in reversed(traceback.extract_stack()):
        if "counterpoint/" in frame.filename and "benchmarks" not in frame.filename:
            return "/".join(frame.filename.split("/")[-3:]) + f":{frame.lineno}"
    return "autograd thread"


# All cases, divided among processes.


def run_cases(cases: Sequence[SurveyCase], device: str, target: Target) -> list[dict]:
    """Return the result of each case."""
    if not target.num_workers:
        return [run_case(case, device) for case in cases]
    workers = [CaseWorker(target.context, run_case, device) for _ in range(target.num_workers)]
    idle = collections.deque(workers)

    def take(case: SurveyCase) -> dict:
        seconds = min(CASE_S, target.seconds_left() - 5)
        if seconds <= 0:
            return {"case": str(case), "outcome": "not run", "error": "the part's time was over"}
        worker = idle.pop()
        try:
            return worker.run(case, seconds)
        finally:
            idle.append(worker)

    try:
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
            return list(pool.map(take, cases))
    finally:
        for worker in workers:
            worker.end()


class CaseWorker:
    """A process that runs cases until one kills it; then another.

    Args:
        context: of multiprocessing.
        run: of a case and a device.
        device: that it computes on.
    """

    def __init__(self, context: Any, run: Callable[[Any, str], dict], device: str) -> None:
        self.context, self.run_case, self.device = context, run, device
        self.process: Any = None
        self.pipe: Any = None

    def run(self, case: SurveyCase, timeout_s: float) -> dict:
        """Return the result of a case."""
        if self.process is None:
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=serve_cases, args=(theirs, self.run_case, self.device))
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(case)
            if self.pipe.poll(timeout_s):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self.end()
            return {"case": str(case), "outcome": "crashes", "error": f"the process ended with exit code {code}"}
        self.end()
        return {"case": str(case), "outcome": "hangs", "error": f"killed after {timeout_s:.0f} s"}

    def end(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.pipe.close()
            self.process.kill()
            self.process.join()
            self.process = None


def serve_cases(pipe: Any, run: Callable[[Any, str], dict], device: str) -> None:
    """Run the cases that come, in a process of its own."""
    torch.set_num_threads(1)
    if device.startswith("stand_in"):
        from counterpoint.testing.stand_in_accelerator import StandInAccelerator  # registers it

        StandInAccelerator()
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(run(case, device))
