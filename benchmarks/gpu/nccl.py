"""NCCL among 2 and 4 ranks on one GPU: collectives, the library's transport, and plans whose ranks are processes.

The driver loads NCCL 2.30 or newer with ``LD_PRELOAD``, and sets ``NCCL_MULTI_RANK_GPU_ENABLE=1``: NCCL accepts several
ranks on one device since then. Times are of no use here, since the ranks share the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import ranks
from benchmarks.gpu.checks import Check, passes_if, skip
from benchmarks.gpu.target import Target
from counterpoint.testing.device_survey import TOLERANCE, SurveyCase, largest_difference, train

NEEDED = (2, 30)
RUN_S = 25.0
NAMED_S = 2.0
PLANS = ("data(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)", "tensor(2)")
DRY_PLANS = ("data(2)", "pipeline(2)")


def measure(target: Target) -> Iterator[Check]:
    """Yield one check for each number of ranks, kind of failure and plan."""
    missing = why_missing(target)
    if missing:
        yield skip("collectives", missing)
        return
    device = "cpu" if target.is_dry_run else "cuda"

    def run(function: Any, num_ranks: int) -> list:
        limit_s = min(target.size(RUN_S, 60.0), target.seconds_left() - 5)
        return ranks.run_ranks(target.context, function, num_ranks, device, limit_s)

    for num_ranks in target.size((2, 4), (2,)):
        yield check_results(f"torch.distributed, {num_ranks} ranks", run(ranks.run_collectives, num_ranks))
        yield check_results(f"transport, {num_ranks} ranks", run(ranks.run_uneven, num_ranks))
    yield check_error("mismatch", run(ranks.run_mismatch, 2), "disagree on collective", 2 * NAMED_S)
    yield check_error("kill -9", run(ranks.run_killed, 2)[:1], "rank 1 has ended", NAMED_S)
    yield from check_plans(target, run)


def why_missing(target: Target) -> str:
    """Return why several ranks cannot use one GPU; empty if they can."""
    if target.is_dry_run:
        return ""
    if not torch.distributed.is_nccl_available():
        return "this torch has no NCCL"
    version = torch.cuda.nccl.version()
    if version[:2] < NEEDED:
        found = ".".join(map(str, version))
        return f"NCCL {found} refuses several ranks on one GPU, 2.30 does not: benchmarks/gpu/pack.sh"
    return ""


def check_results(name: str, answers: list) -> Check:
    """Return whether every collective of every rank had the right result."""
    wrong = []
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict):
            wrong.append(f"rank {rank}: {answer}")
        elif False in answer.values():
            wrong.append(f"rank {rank}: {[key for key, value in answer.items() if value is False]}")
    text = "" if wrong else f"{sum(value is True for value in answers[0].values())} right"
    return Check(name, passes_if(not wrong), text, "; ".join(wrong) or "exact", {"answers": answers})


def check_error(name: str, answers: list, text: str, limit_s: float) -> Check:
    """Return whether each rank named what was wrong, in time."""
    told = [answer for answer in answers if isinstance(answer, dict)]
    seconds = max((answer["seconds"] for answer in told), default=0.0)
    named = len(told) == len(answers) and all(text in answer["error"] for answer in told)
    holds = named and seconds <= limit_s
    reason = f"'{text}' within {limit_s:.0f} s" + ("" if holds else f", but: {answers}")
    return Check(name, passes_if(holds), f"{seconds:.1f} s", reason, {"answers": answers})


def check_plans(target: Target, run: Any) -> Iterator[Check]:
    """Yield whether plans whose ranks are processes have the CPU's numbers; as long as they are refused, why."""
    plans = target.size(PLANS, DRY_PLANS)
    for index, plan in enumerate(plans):
        answers = run(partial(ranks.run_training, plan, str(target.device)), 2)
        refusals = {answer["refused"] for answer in answers if isinstance(answer, dict) and "refused" in answer}
        if refusals:
            for refused in plans[index:] if not index else (plan,):
                yield skip(f"{refused} in processes", next(iter(refusals)))
            if not index:
                return
            continue
        yield check_plan(plan, answers)


def check_plan(plan: str, answers: list) -> Check:
    """Return whether all ranks have the CPU's numbers."""
    name = f"{plan} in processes"
    if not all(isinstance(answer, dict) for answer in answers):
        return Check(name, "FAIL", reason=str(answers), figures={"answers": answers})
    expected = train(SurveyCase("mlp", plan), "cpu")
    outcomes = [
        (answer["losses"], {name: torch.tensor(value, dtype=torch.float64) for name, value in answer["values"].items()})
        for answer in answers
    ]
    difference = max(largest_difference(outcome, expected) for outcome in outcomes)
    return Check(name, passes_if(difference <= TOLERANCE), f"{difference:.1e}", f"at most {TOLERANCE} from the CPU's")
