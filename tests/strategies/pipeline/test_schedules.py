"""Pipeline schedules: in which order each stage replica acts, and how much it has in flight."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from counterpoint.strategies.pipeline.schedules.registry import find_schedule
from counterpoint.strategies.pipeline.schedules.schedule import StageReplica
from tests.program.verify.random_plans import TESTED_SCHEDULES


def action_texts(name, stage, replicas_per_stage, micros, chunks=1):
    """Write actions as in the papers; a prime marks the second chunk."""
    replica = StageReplica(stage, replicas_per_stage, tuple(micros), chunks)
    return " ".join(
        f"{action.kind}{action.micro}{chr(39) * action.chunk}"
        for action in find_schedule(name, chunks).actions(replica)
    )


@pytest.mark.parametrize(
    ("schedule", "stage", "read"),
    [
        ("gpipe", 0, "F0 F1 F2 B2 B1 B0"),
        ("gpipe", 1, "F0 F1 F2 B2 B1 B0"),
        ("one_f_one_b", 0, "F0 F1 B0 F2 B1 B2"),
        ("one_f_one_b", 1, "F0 B0 F1 B1 F2 B2"),
        ("zero_bubble", 0, "F0 F1 Bi0 Bw0 F2 Bi1 Bw1 Bi2 Bw2"),
        ("zero_bubble", 1, "F0 Bi0 F1 Bi1 Bw0 F2 Bi2 Bw1 Bw2"),
    ],
)
def test_a_schedule_of_two_stages_reads_as_in_its_paper(schedule, stage, read):
    assert action_texts(schedule, stage, (1, 1), range(3)) == read


@pytest.mark.parametrize(
    ("schedule", "stage", "read"),
    [
        ("interleaved", 0, "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"),
        ("interleaved", 1, "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3"),
        ("zero_bubble", 0, "F0 F1 F2 F0' Bi0' Bw0' F1' Bi1' Bw1' F3 Bi0 Bw0 F2' Bi2' Bw2' Bi1 Bw1 F3' Bi3' Bw3' "
                           "Bi2 Bw2 Bi3 Bw3"),
        ("zero_bubble", 1, "F0 F0' F1 F1' Bi0' Bw0' F2 Bi0 Bw0 F2' Bi1' Bw1' F3 Bi1 Bw1 F3' Bi2' Bw2' Bi2 Bi3' Bi3 "
                           "Bw2 Bw3' Bw3"),
    ],
)  # fmt: skip
def test_two_chunks_on_each_of_two_stages_alternate_as_in_the_paper(schedule, stage, read):
    assert action_texts(schedule, stage, (1, 1), range(4), 2) == read


def test_the_warmup_is_what_pipedream_computes():
    replicas_per_stage = (12, 3, 1)
    assert [StageReplica(stage, replicas_per_stage, tuple(range(99))).warmup for stage in range(3)] == [1, 1, 0]
    assert [StageReplica(stage, (1,) * 4, tuple(range(9))).warmup for stage in range(4)] == [3, 2, 1, 0]


def test_fewer_microbatches_than_warmup_fill_and_drain():
    assert action_texts("one_f_one_b", 0, (1,) * 4, range(2)) == "F0 F1 B0 B1"
    assert action_texts("interleaved", 0, (1,) * 4, range(1), 2) == "F0 F0' B0' B0"
    assert action_texts("zero_bubble", 0, (1,) * 4, range(2)) == "F0 F1 Bi0 Bw0 Bi1 Bw1"
    assert action_texts("zero_bubble", 3, (1,) * 4, range(1), 2) == "F0 F0' Bi0' Bw0' Bi0 Bw0"


def test_microbatches_that_do_not_divide_into_groups_of_as_many_as_stages_make_larger_groups():
    assert action_texts("interleaved", 1, (1, 1), range(5), 2).startswith("F0 F1 F2 F0' B0' F1' B1' F2' B2' F3 B0")


@given(st.sampled_from(TESTED_SCHEDULES), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 9))
def test_every_schedule_does_each_microbatch_forward_before_backward_and_once(
    name_and_chunks, replicas_per_stage, count
):
    name, chunks = name_and_chunks
    replicas_per_stage = tuple(replicas_per_stage) if chunks == 1 else (1,) * len(replicas_per_stage)
    for stage in range(len(replicas_per_stage)):
        replica = StageReplica(stage, replicas_per_stage, tuple(range(count)), chunks)
        done: list[tuple[object, ...]] = [tuple(action) for action in find_schedule(name, chunks).actions(replica)]
        kinds = ["F", "Bi", "Bw"] if any(kind == "Bi" for kind, *_ in done) else ["F", "B"]
        assert sorted(done) == sorted((what, m, c) for what in kinds for m in range(count) for c in range(chunks))
        for before, after in pairwise(kinds):
            pairs = [((before, *rest), (after, *rest)) for what, *rest in done if what == before]
            assert all(done.index(first) < done.index(second) for first, second in pairs)


@given(st.sampled_from(TESTED_SCHEDULES), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 9))
def test_no_more_is_in_flight_than_a_schedule_says(name_and_chunks, replicas_per_stage, count):
    name, chunks = name_and_chunks
    schedule = find_schedule(name, chunks)
    replicas_per_stage = tuple(replicas_per_stage) if chunks == 1 else (1,) * len(replicas_per_stage)
    for stage in range(len(replicas_per_stage)):
        replica = StageReplica(stage, replicas_per_stage, tuple(range(count)), chunks)
        now, peak = 0, 0
        for action in schedule.actions(replica):
            now += Counter({"F": 1, "B": -1, "Bw": -1})[action.kind]
            peak = max(peak, now)
        assert peak <= schedule.in_flight(replica)
        assert peak == schedule.in_flight(replica) or (name, chunks) == ("zero_bubble", 2)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_in_flight_is_what_the_papers_say(n):
    """In microbatches of a whole stage: 1F1B n - s, zero bubble n, interleaved n (1 + (n-1)/(n v)) on the first one."""
    for name, chunks, first in [("one_f_one_b", 1, n), ("zero_bubble", 1, n), ("zero_bubble", 2, 2 * n),
                                ("interleaved", 2, 3 * n - 1), ("interleaved", 4, 5 * n - 1)]:  # fmt: skip
        replica = StageReplica(0, (1,) * n, tuple(range(4 * n)), chunks)
        assert find_schedule(name, chunks).in_flight(replica) == first
    last = StageReplica(n - 1, (1,) * n, tuple(range(4 * n)))
    assert [find_schedule(name, 1).in_flight(last) for name in ("gpipe", "one_f_one_b", "zero_bubble")] == [4 * n, 1, n]
