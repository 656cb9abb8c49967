"""Missing waits between streams: by torch's sanitizer of CUDA, or by the stand-in device's order of streams.

The driver sets ``TORCH_CUDA_SANITIZER=1``, which torch reads when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.gpu.checks import Check, passes_if, skip
from benchmarks.gpu.survey import run_case
from benchmarks.gpu.target import Target
from counterpoint.testing.device_survey import SurveyCase

CASES = (
    SurveyCase("mlp", "data(2) + overlap"),
    SurveyCase("mlp", "zero(2, level=3)"),
    SurveyCase("mlp", "solo", "trainer"),  # reads and copies batches ahead
)


def measure(target: Target) -> Iterator[Check]:
    """Yield for each case whether it trains without a race."""
    if not target.is_dry_run and os.environ.get("TORCH_CUDA_SANITIZER") != "1":
        yield skip("no race", "TORCH_CUDA_SANITIZER=1 is not set")
        return
    for case in CASES:
        result = run_case(case, str(target.device))
        reason = result.get("error", "no race, and the CPU's numbers")
        yield Check(
            str(case).removeprefix("mlp | "),
            passes_if(result["outcome"] == "same"),
            result["outcome"],
            reason,
            {"case": result},
        )
    yield skip("offload", "the survey's cases have no passes; tests/device/test_offload.py has the stand-in device's")
