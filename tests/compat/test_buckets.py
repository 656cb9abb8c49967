"""DDP's buckets come to lie in shared memory; nothing else moves, and no memory is used that belongs to others."""

import pytest

from counterpoint.fabric.shm.native import native
from counterpoint.fabric.torch_backend.ddp_buckets import CAN_SWAP
from tests.compat.bucket_scenarios import moves_to_shared_memory, run_all
from tests.compat.process_groups import OVER_GLOO, on_ranks, once_on_ranks

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot exchange the memory under a storage"),
    pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}"),
]


def results_of(name):
    return [rank[name] for rank in once_on_ranks(run_all, 2, "counterpoint")]


@pytest.mark.long
def test_buckets_move_in_the_third_step_and_add_up_to_what_gloo_finds():
    theirs = on_ranks(moves_to_shared_memory, 2, "gloo")
    for (was_shared, total), (_, their_total) in zip(results_of("moves_to_shared_memory"), theirs, strict=True):
        assert was_shared == [False, False, True, True]
        assert total == pytest.approx(their_total, rel=1e-6)


def test_buckets_of_a_group_over_gloo_stay():
    assert [was_shared for was_shared, _ in on_ranks(moves_to_shared_memory, 2, OVER_GLOO)] == [[False] * 4] * 2


def test_the_memory_of_a_model_that_is_gone_serves_the_next():
    assert results_of("reuses_memory") == [[0, 0, 0]] * 2


def test_gradients_outlive_their_group_and_leave_the_heap_sound():
    assert results_of("outlives_group") == [(True, True)] * 2


def test_an_address_from_before_the_move_never_shows_what_belongs_to_others():
    assert results_of("keeps_addresses") == [(True, 7.0, True)] * 2


def test_what_python_hands_over_stays_where_it_is():
    assert results_of("keeps_python_memory") == [(True, True)] * 2


def test_without_memory_to_share_buckets_stay_and_are_added_up():
    alike = [total for _, total in results_of("moves_to_shared_memory")]
    assert results_of("runs_out_of_memory") == [(False, pytest.approx(total)) for total in alike]
