"""What goes wrong between ranks ends as Horovod's error, which names who and what, on every rank that is left."""

import pytest

from tests.compat.horovod import fault_scenarios as faults
from tests.compat.horovod.rank_runner import on_ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.long(quick=["other_shapes-parts1"])
@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        (faults.other_names, ["all_reduce mean of loss of rank 0, float32 (2,)", "of loss of rank 1, float32 (2,)"]),
        (faults.other_shapes, ["allgather of rows: rank 0 has torch.float32 of shape (2, 3), rank 1 has", "(2, 4)"]),
        (faults.other_models, ["of 2 parameters, ", "of 4 parameters, "]),
        pytest.param(
            faults.another_order, ["left.weight to right.bias", "right.weight to left.bias"], marks=pytest.mark.slow
        ),
        (faults.other_sets, ["process set of ranks [0]", "process set of ranks [1]"]),
        (faults.gathers_after_another_has_joined, ["rank 1 joined", "pad the data so that all ranks"]),
    ],
)
def test_all_ranks_that_disagree_get_an_error_with_the_operation_of_each(scenario, parts):
    for result in on_ranks((scenario,), 2):
        text = result[scenario.__name__]
        assert text.startswith("HorovodInternalError: ")
        assert [part for part in parts if part not in text] == []


def test_a_program_that_polls_forever_gets_an_error_that_names_the_missing_ranks():
    first, _ = on_ranks((faults.asks_for_what_never_comes,), 2, deadline_s=1.0)
    text = first["asks_for_what_never_comes"]
    assert text.startswith("HorovodInternalError: rank 0 waited 1.")
    assert "for allreduce of loss with rank 1: the timeout of 1.0 s has passed" in text


def test_a_rank_that_ends_is_named():
    first, second = on_ranks((faults.is_gone,), 2)
    assert second is None
    assert first["is_gone"].startswith("HorovodInternalError: ")
    assert "rank 1 has ended" in first["is_gone"]
