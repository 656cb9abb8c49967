"""Lossy sums give up "equals solo"; instead they equal the same workers simulated one after the other."""

import pytest

from counterpoint.plan.plan import Plan
from counterpoint.testing import parity
from counterpoint.training.plan_resolution import share_params_per_host
from tests.equivalence.compression import parameter_error, parameter_errors_as_rank
from tests.process.forked_ranks import run_forked

CODES = ["fp16", "bf16", "int8", "twobit:0.02", "sign", "topk:0.05", "powersgd:2"]
CODED = [
    *(f"data(4, compress={code})" for code in CODES),
    "data(2, compress=int8) + overlap",
    "data(2, compress=powersgd:1) + overlap",
    "data(3, compress=topk)",
    "pipeline(2) * data(2, compress=sign)",
    "data(2) * data(2, compress=topk:0.05)",
    "data(2, compress=int8) * zero(2, level=1)",
]
ADASUM = [
    *(f"data({count}, reduce=adasum)" for count in (2, 3, 4)),
    "pipeline(2) * data(2, reduce=adasum)",
    "data(2) * data(2, reduce=adasum) + overlap",
]


@pytest.mark.long(
    quick=[
        "data(4, compress=fp16)",
        "data(4, compress=bf16)",
        "data(2, compress=int8) + overlap",
        "pipeline(2) * data(2, reduce=adasum)",
    ]
)
@pytest.mark.parametrize("strategy", [*CODED, *ADASUM])
def test_a_lossy_sum_equals_its_workers_simulated_one_after_the_other(strategy):
    assert parameter_error(strategy) <= parity.TOLERANCE


@pytest.mark.long(quick=["data(4, compress=topk:0.05)"])
@pytest.mark.parametrize("strategy", ["data(4, compress=topk:0.05)", "data(4, reduce=adasum)"])
def test_a_lossy_sum_is_not_taken_for_the_same_as_solo(strategy):
    assert parity.check_parity("mlp", strategy).params > 1e-3


@pytest.mark.parametrize(
    "text", ["data(4, compress=sign)", "data(2) * data(2, compress=int8)", "data(4, reduce=adasum)"]
)
def test_replicas_of_one_host_do_not_share_their_update_where_a_code_sums(text):
    """With one copy of the weights nothing would be sent, so that nothing could be encoded."""
    plan = Plan.parse(text)
    assert share_params_per_host(plan, (0, 0, 0, 0)) == plan


@pytest.mark.long
@pytest.mark.process
def test_two_processes_sum_in_codes_as_the_reference_does():
    rows = [
        "data(2, compress=int8)",
        "data(2, compress=bf16)",
        "data(2, compress=powersgd:2)",
        "data(2, reduce=adasum)",
    ]
    result = run_forked(parameter_errors_as_rank, ranks=2, args=[rows])
    assert len(result) == 2
    assert not [(row, far) for one in result for row, far in zip(rows, one, strict=True) if not far <= parity.TOLERANCE]
