"""Ranks of a host with fewer cores share them in time slices; in milliseconds, computed by hand."""

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
    """A millisecond for every instruction that computes, and no link time."""

    def __init__(self):
        super().__init__(0.0)

    def compute_s(self, instruction, fraction):
        return 1e-3 * super().compute_s(instruction, fraction)


def stops(rows, cluster, costs=None):
    """When the last computation of each rank ends."""
    trace = simulate(program(*rows), costs or ShortCosts(), cluster)
    last = [max(event.stop_s for event in trace.events if event.rank == rank) for rank in range(len(rows))]
    return pytest.approx([1e3 * stop_s for stop_s in last])


@pytest.mark.parametrize(("ranks", "stop"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_ranks_queued_at_the_same_moment_finish_with_the_last_of_them(ranks, stop):
    assert stops([f"F{rank}.0" for rank in range(ranks)], TWO) == [stop] * ranks


def test_a_later_rank_waits_until_the_rank_on_the_core_waits():
    assert stops(["F0.0 x1.0>1 F0.1 B0.1", "x1.0<0 F1.0"], ONE) == [3, 4]


def test_a_rank_that_has_waited_is_queued_after_those_that_came_meanwhile():
    """The first has waited for the second, which continues as long as it does not have to wait."""
    assert stops(["F0.0 x1.0>1 g0.0<1 B0.0", "x1.0<0 F1.0 B1.0 g0.0>0 F1.1"], ONE) == [5, 4]


def test_a_core_goes_to_the_next_one_after_a_slice_of_time():
    assert stops(["F0.0 x1.0>1 F0.1 F0.2 F0.3 F0.4", "x1.0<0 F1.0"], ONE) == [6, 4]


def test_long_instructions_share_cores():
    contention = Cluster(compute_contention=(1.0, 0.5), time_slicing=TimeSlicing(1))
    assert stops(["F0.0 x1.0>1 F0.1", "x1.0<0 F1.0"], contention, FakeCosts(0.0)) == [3000, 3000]


def test_the_speed_in_a_time_slice_depends_on_the_ranks_of_the_host():
    assert stops(["F0.0", "F1.0", "F2.0"], Cluster(time_slicing=TimeSlicing(4, (1.0, 0.8, 0.5)))) == [2, 2, 2]
    assert stops(["F0.0", "F1.0", "F2.0"], Cluster(time_slicing=TimeSlicing(4, (1.0, 0.8)))) == [1.25, 1.25, 1.25]


def test_ranks_of_two_hosts_have_separate_run_queues():
    hosts = (Level("host", 1, Link()), Level("network", 2, Link()))
    assert stops(["F0.0", "F1.0"], Cluster(levels=hosts, time_slicing=TimeSlicing(1, (1.0, 0.5)))) == [1, 1]


@pytest.mark.parametrize(("text", "seconds"), [("x1.0>1", 3.0), ("x1.0<0", 3.0)])
def test_each_end_of_a_message_takes_half_of_its_contended_cpu_time(text, seconds):
    levels = (Level("host", 2, Link(1.0, 400.0, is_shared_memory=True)),)
    instruction = parse_instruction(text)
    assert isinstance(instruction, Send | Recv)
    network = NetworkModel(
        Cluster(levels=levels, time_slicing=TimeSlicing(2, message_s=5.0)), lambda value, code="": 400
    )
    assert network.cpu_s(instruction, Fraction(1), 0) == seconds


@pytest.mark.parametrize("plan", ["data(4)", "gpipe(4)", "pipeline(2) * data(2)", "tensor(2) * data(2)", "bsp(3)"])
def test_one_rank_of_each_class_represents_all_in_the_run_queue(plan):
    compiled = compile_text(plan, m=4)
    cluster = Cluster(compute_contention=(1.0, 0.9, 0.6), time_slicing=TimeSlicing(2, (1.0, 0.9, 0.8, 0.7)))
    assert simulate(compiled.program, ShortCosts(), cluster) == simulate_every_rank(
        compiled.program, ShortCosts(), cluster
    )
