"""Orders of a pipeline: what each replica does when."""

import pytest
from hypothesis import given, strategies as st

from counterpoint.strategies.orders.order import Place
from counterpoint.strategies.orders.table import ORDERS


def turns(order, stage, replicas, micros):
    return " ".join(f"{d}{m}" for d, m in ORDERS[order](Place(stage, replicas, tuple(micros))))


@pytest.mark.parametrize(
    ("order", "stage", "read"),
    [
        ("gpipe", 0, "F0 F1 F2 B2 B1 B0"),
        ("gpipe", 1, "F0 F1 F2 B2 B1 B0"),
        ("one_f_one_b", 0, "F0 F1 B0 F2 B1 B2"),
        ("one_f_one_b", 1, "F0 B0 F1 B1 F2 B2"),
    ],
)
def test_an_order_of_two_stages_reads_as_in_its_paper(order, stage, read):
    assert turns(order, stage, (1, 1), range(3)) == read


def test_the_warmup_is_what_pipedream_computes():
    replicas = (12, 3, 1)
    assert [Place(stage, replicas, tuple(range(99))).warmup for stage in range(3)] == [1, 1, 0]
    assert [Place(stage, (1,) * 4, tuple(range(9))).warmup for stage in range(4)] == [3, 2, 1, 0]


def test_fewer_microbatches_than_warmup_fill_and_drain():
    assert turns("one_f_one_b", 0, (1,) * 4, range(2)) == "F0 F1 B0 B1"


@given(st.sampled_from(sorted(ORDERS)), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 9))
def test_every_order_does_each_microbatch_forward_before_backward_and_once(order, replicas, count):
    for stage in range(len(replicas)):
        done = list(ORDERS[order](Place(stage, tuple(replicas), tuple(range(count)))))
        assert sorted(done) == sorted((direction, m) for direction in "FB" for m in range(count))
        assert all(done.index(("F", m)) < done.index(("B", m)) for m in range(count))
