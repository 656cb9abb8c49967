"""Communication through shared memory; computed by hand, for a tensor of 400 bytes and 2 s per message."""

from fractions import Fraction

import pytest

from counterpoint.program.instruction import Collective, Commit, Recv, Send
from counterpoint.program.text import parse_instruction
from counterpoint.program.units import host_shareable_units
from counterpoint.simulator.memory_traffic import READ_PASSES
from counterpoint.simulator.network import NetworkModel
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Device, Level, Link
from counterpoint.world.cluster_file import format_cluster, parse_cluster
from tests.simulator.programs import FakeCosts, program

MEMORY = Cluster(Device(memory_bytes_per_s=100.0), levels=(Level("host", 2, Link(1.0, 400.0, is_shared_memory=True)),))
CONTENTION = Cluster(MEMORY.device, levels=MEMORY.levels, compute_contention=(1.0, 0.5))


def cpu_s(text, *, shares_memory=False):
    instruction = parse_instruction(text)
    assert isinstance(instruction, Send | Recv | Collective | Commit)
    return NetworkModel(MEMORY, lambda value, code="": 400).cpu_s(
        instruction, Fraction(1), 0, shares_memory=shares_memory
    )


def link_s(text):
    instruction = parse_instruction(text)
    assert isinstance(instruction, Send | Collective | Commit)
    return NetworkModel(MEMORY, lambda value, code="": 400).link_load(instruction, Fraction(1), 0).seconds


class SharedMemoryCosts(FakeCosts):
    """One tick of CPU time for the sender and one for the receiver, and no link time."""

    def __init__(self):
        super().__init__(0.0)

    def cpu_s(self, instruction, fraction, rank, *, shares_memory=False):
        return 1.0


def ends(rows, cluster=MEMORY):
    """When the last instruction of each rank ends."""
    trace = simulate(program(*rows), SharedMemoryCosts(), cluster)
    return [max(event.stop_s for event in trace.events if event.rank == rank) for rank in range(trace.num_ranks)]


def test_a_message_keeps_its_sender_and_then_its_receiver_busy():
    assert ends(["F0.0 x1.0>1 F0.1", "x1.0<0 F1.0"]) == [3, 4]


def test_a_message_that_is_there_already_still_has_to_be_taken():
    assert ends(["F0.0 x1.0>1", "F1.1 F1.2 F1.3 x1.0<0 F1.0"]) == [2, 5]


def test_a_started_all_reduce_costs_cpu_time_where_it_is_awaited():
    row = "B0.0 all_reduce_start(grad0)@0,1 F0.1 all_reduce_wait(grad0)@0,1"
    assert ends([row, row]) == [3, 3]


def test_ranks_that_copy_at_the_same_time_contend():
    assert ends(["all_reduce(grad0)@0,1 F0.0", "all_reduce(grad0)@0,1 F0.0"], CONTENTION) == [4, 4]


def test_receive_update_and_reply_of_a_server_are_sequential():
    """Worker: 1 to push; server: 1 to receive, 1 to update, 1 to reply; worker: 1 to receive."""

    class Served(SharedMemoryCosts):
        def server_update_s(self, unit, server, worker):
            return 1.0, 0.0

    trace = simulate(program("push(grad0)>1 pull(weight0)<1", "apply_and_reply(0)@0"), Served(), MEMORY)
    assert max(event.stop_s for event in trace.events) == 5


@pytest.mark.parametrize(
    ("instruction", "seconds"),
    [
        ("x1.0>1", 1.0),
        ("x1.0<1", 1.0),
        ("all_gather(weight0)@0,1", 0.5 + 3 * 4),
        ("reduce_scatter(grad0)@0,1", 0.5 + 2 * 4),
        ("all_reduce(grad0)@0,1", 0.5 + 3 * 4),
        ("all_reduce(y1.0)@0,1", 0.5 + 6 * 4),
        ("commit@0,1", 1.0),
    ],
)
def test_cpu_time_of_communication(instruction, seconds):
    assert cpu_s(instruction) == pytest.approx(seconds)


def test_replicas_with_shared_parameters_only_read_each_others_gradients():
    assert cpu_s("reduce_scatter(grad0)@0,1", shares_memory=True) == 0.5 + READ_PASSES * 4 / 2
    assert cpu_s("all_gather(weight0)@0,1", shares_memory=True) == 0.5


def test_units_that_are_freed_or_gathered_twice_are_not_shareable():
    row = "all_gather(weight0)@0,1 F0.0 reduce_scatter(grad0)@0,1 U0 all_gather(weight0)@0,1 reduce_scatter(grad1)@0,1 U1 all_gather(weight1)@0,1"
    assert host_shareable_units(map(parse_instruction, row.split())) == {(1,): (0, 1)}


def test_a_cluster_file_states_which_links_are_shared_memory():
    assert parse_cluster(format_cluster(MEMORY)) == MEMORY
    assert "copied" not in format_cluster(Cluster())


def test_shared_memory_occupies_no_link():
    assert [link_s(instruction) for instruction in ("x1.0>1", "all_reduce(grad0)@0,1", "commit@0,1")] == [0, 0, 0]
