"""Memory passes of communication, and messages larger than the shared-memory pipe."""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from counterpoint.model.model_profile import Overheads
from counterpoint.program.instruction import Push, Recv, Send
from counterpoint.program.text import parse_instruction
from counterpoint.simulator.contention import CpuDemand
from counterpoint.simulator.instruction_times import time_instructions
from counterpoint.simulator.measured_costs import MeasuredCosts
from counterpoint.simulator.memory_traffic import memory_passes
from counterpoint.simulator.network import PIPE_CAPACITY_BYTES, NetworkModel
from counterpoint.simulator.sim_input import message_cpu_demand
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Link
from tests.model.profiles import build_profile, layer_profile
from tests.simulator.programs import FakeCosts, program
from tests.simulator.test_measured_costs import MODEL, predicted

ZERO = "zero(2, level=2)"  # of what it keeps of a gradient, it makes a copy
LAYOUT = Path(__file__).parents[2] / "native" / "layout.h"


def passes_of(text, *, shares_memory=False):
    instructions = tuple(map(parse_instruction, text.split()))
    return [each for each in memory_passes(instructions, lambda instruction: shares_memory) if each]


@pytest.mark.parametrize(
    ("row", "passes"),
    [
        ("F0.0 B0.0 all_reduce(grad0)@0,1 U0", []),
        ("B0.0 reduce_scatter(grad0)@0,1 free(grad0) U0 all_gather(weight0)@0,1", [1.5]),
        ("all_gather(weight0)@0,1,2,3 F0.0 free(weight0)", [0.75]),
        ("B0.0 grad0>1 weight0<1", [3]),
        ("grad0<1 grad0<2 U0 weight0>1", [3]),
        ("B0.0 grad0<1 U0", [3]),
        ("B0.0 grad0>1 grad0<1", []),
        ("B0.0 push(grad0)>1 pull(weight0)<1", [3]),
        ("F0.0 x1.0>1 g1.0<1 B0.0 U0", []),
        ("Bi0.0 Bw0.0 grad0<1 U0", [3]),
    ],
)
def test_gradients_are_added_to_what_is_there_and_weights_copied_to_where_they_are_used(row, passes):
    assert passes_of(row) == passes


def test_replicas_with_shared_parameters_copy_nothing():
    assert passes_of("B0.0 reduce_scatter(grad0)@0,1 U0 all_gather(weight0)@0,1", shares_memory=True) == []


def test_a_pipe_holds_what_it_holds():
    text = LAYOUT.read_text(encoding="utf-8")
    result = re.search(r"PIPE_BYTES = (\d+) << (\d+)", text)
    assert result is not None
    assert int(result[1]) << int(result[2]) == PIPE_CAPACITY_BYTES


@pytest.mark.parametrize(("size", "is_streamed"), [(PIPE_CAPACITY_BYTES, False), (PIPE_CAPACITY_BYTES + 1, True)])
def test_both_ends_of_a_message_larger_than_the_pipe_are_busy_all_the_time(size, is_streamed):
    network = NetworkModel(Cluster(link=Link(0.0, float(size), is_shared_memory=True)), lambda value, code="": size)
    sent, received = map(parse_instruction, ("x1.0>1", "x1.0<0"))
    assert isinstance(sent, Send | Push)
    assert isinstance(received, Recv)
    assert network.is_streamed(sent, 0) == is_streamed
    assert [network.cpu_s(instruction, Fraction(1), 0) for instruction in (sent, received)] == [
        1.0 if is_streamed else 0.5
    ] * 2


class StreamedCosts(FakeCosts):
    """Every message is larger than its pipe, and takes a tick."""

    def cpu_s(self, instruction, fraction, rank, *, shares_memory=False):
        return 1.0

    def is_streamed(self, instruction, rank):
        return True


def test_a_streamed_message_is_received_while_it_is_sent():
    trace = simulate(program("F0.0 x1.0>1 F0.1", "x1.0<0 F1.0"), StreamedCosts(0.0))
    assert max(event.stop_s for event in trace.events if event.rank == 1) == 3.0


@pytest.mark.parametrize("third", [1.0, 0.5])
def test_the_two_ends_of_a_streamed_message_contend_like_one_rank(third):
    """One of two processors remains for the third rank, however slow three computing ranks would be."""
    trace = simulate(
        program("x1.0>1", "x1.0<0", "F2.0 F3.0"), StreamedCosts(0.0), Cluster(compute_contention=(1.0, 1.0, third))
    )
    assert {event.rank: event.stop_s for event in trace.events}[2] == 2.0


@pytest.mark.parametrize(("own_s", "share"), [(0.0, 0.5), (1.0, 0.75), (3.0, 0.875)])
def test_additional_work_for_a_streamed_message_counts_in_full(own_s, share):
    instruction = parse_instruction("x1.0>1")
    assert isinstance(instruction, Send)
    assert message_cpu_demand(instruction, StreamedCosts(), 0, extra_s=own_s) == CpuDemand(
        1.0 + own_s, is_streamed=True, busy_fraction=share
    )


def test_measured_costs_include_memory_traffic():
    plain, moving = (
        build_profile(MODEL, [layer_profile(1.0, 2.0)] * 3, add_s_per_byte=per_byte) for per_byte in (0.0, 0.03)
    )
    more_s = predicted(ZERO, moving, batch_size=4).step_s - predicted(ZERO, plain, batch_size=4).step_s
    assert more_s == pytest.approx(1.5 / 3 * 0.03 * 3 * 4 * 64)


def test_a_rank_without_updates_pays_the_overhead_of_a_step_too():
    costs = MeasuredCosts(
        (layer_profile(1.0, 2.0),), Overheads(step_s=1.0), 0.0, 0.0, (0.0,), lambda value, code="": 0, FakeCosts()
    )
    rows = [tuple(map(parse_instruction, row.split())) for row in ("B0.0 commit@0,1 U0", "B0.0 grad0>0 commit@0,1")]
    hands = [time_instructions(row, costs, rank=rank).cpu_demands for rank, row in enumerate(rows)]
    assert (hands[0][1].seconds, hands[1][2].seconds) == (0.0, 1.0)
