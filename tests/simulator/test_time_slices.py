"""Ranks of a host that has fewer cores take turns at short pieces of work; in milliseconds, worked out by hand."""

from fractions import Fraction

import pytest

from counterpoint.program.instruction import Recv, Send
from counterpoint.program.text import parse_instruction
from counterpoint.simulator.network import NetworkModel
from counterpoint.simulator.simulate import simulate, simulate_every_rank
from counterpoint.world.cluster import Cluster, Level, Link, TimeSlicing
from tests.simulator.programs import FakeCosts, compile_text, program

ONE, TWO = Cluster(time_slicing=TimeSlicing(1)), Cluster(time_slicing=TimeSlicing(2))


class ShortCosts(FakeCosts):
    """A millisecond for every word that computes, and nothing on links."""

    def __init__(self):
        super().__init__(0.0)

    def compute_s(self, instruction, fraction):
        return 1e-3 * super().compute_s(instruction, fraction)


def stops(rows, cluster, costs=None):
    """When the last word of each rank that computes ends."""
    trace = simulate(program(*rows), costs or ShortCosts(), cluster)
    last = [max(event.stop_s for event in trace.events if event.rank == rank) for rank in range(len(rows))]
    return pytest.approx([1e3 * stop_s for stop_s in last])


@pytest.mark.parametrize(("ranks", "stop"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_those_who_come_at_one_moment_are_as_late_as_the_last_of_them(ranks, stop):
    assert stops([f"F{rank}.0" for rank in range(ranks)], TWO) == [stop] * ranks


def test_who_comes_later_waits_until_who_has_the_core_waits():
    assert stops(["F0.0 x1.0>1 F0.1 B0.1", "x1.0<0 F1.0"], ONE) == [3, 4]


def test_who_has_waited_comes_behind_those_who_came_meanwhile():
    """The first has waited for the second, which goes on for as long as it need not wait."""
    assert stops(["F0.0 x1.0>1 g0.0<1 B0.0", "x1.0<0 F1.0 B1.0 g0.0>0 F1.1"], ONE) == [5, 4]


def test_a_core_goes_to_the_next_one_after_a_slice_of_time():
    assert stops(["F0.0 x1.0>1 F0.1 F0.2 F0.3 F0.4", "x1.0<0 F1.0"], ONE) == [6, 4]


def test_long_words_go_on_side_by_side():
    crowd = Cluster(compute_contention=(1.0, 0.5), time_slicing=TimeSlicing(1))
    assert stops(["F0.0 x1.0>1 F0.1", "x1.0<0 F1.0"], crowd, FakeCosts(0.0)) == [3000, 3000]


def test_in_its_turn_each_is_as_fast_as_its_host_has_ranks():
    assert stops(["F0.0", "F1.0", "F2.0"], Cluster(time_slicing=TimeSlicing(4, (1.0, 0.8, 0.5)))) == [2, 2, 2]
    assert stops(["F0.0", "F1.0", "F2.0"], Cluster(time_slicing=TimeSlicing(4, (1.0, 0.8)))) == [1.25, 1.25, 1.25]


def test_ranks_of_two_hosts_have_turns_of_their_own():
    hosts = (Level("host", 1, Link()), Level("network", 2, Link()))
    assert stops(["F0.0", "F1.0"], Cluster(levels=hosts, time_slicing=TimeSlicing(1, (1.0, 0.5)))) == [1, 1]


@pytest.mark.parametrize(("text", "seconds"), [("x1.0>1", 3.0), ("x1.0<0", 3.0)])
def test_a_message_takes_each_end_half_of_what_it_takes_between_other_work(text, seconds):
    levels = (Level("host", 2, Link(1.0, 400.0, is_shared_memory=True)),)
    word = parse_instruction(text)
    assert isinstance(word, Send | Recv)
    network = NetworkModel(
        Cluster(levels=levels, time_slicing=TimeSlicing(2, message_s=5.0)), lambda value, code="": 400
    )
    assert network.cpu_s(word, Fraction(1), 0) == seconds


@pytest.mark.parametrize("plan", ["data(4)", "gpipe(4)", "pipeline(2) * data(2)", "tensor(2) * data(2)", "bsp(3)"])
def test_one_rank_of_each_class_takes_the_turns_of_all(plan):
    made = compile_text(plan, m=4)
    cluster = Cluster(compute_contention=(1.0, 0.9, 0.6), time_slicing=TimeSlicing(2, (1.0, 0.9, 0.8, 0.7)))
    assert simulate(made.program, ShortCosts(), cluster) == simulate_every_rank(made.program, ShortCosts(), cluster)
