"""Link time of instructions by the location of ranks; computed by hand, for a tensor of 400 bytes."""

from fractions import Fraction

import pytest

from counterpoint.program.instruction import Collective, Commit, Send
from counterpoint.program.text import parse_instruction
from counterpoint.simulator.network import LinkLoad, NetworkModel
from counterpoint.world.cluster import Cluster, Level, Link

MEMORY, CARD = Link(1.0, 100.0), Link(10.0, 10.0)
APART = Cluster(levels=(Level("host", 2, MEMORY), Level("network", 4, CARD)))
SHARED = Cluster(levels=(Level("host", 2, MEMORY), Level("network", 4, CARD, is_shared=True)))


HALVES = [("reduce_scatter", "grad"), ("all_gather", "weight")]


def load(instruction_text, cluster, part=1, rank=0):
    network = NetworkModel(cluster, lambda value, code="": 400)
    parsed = parse_instruction(instruction_text)
    assert isinstance(parsed, Send | Collective | Commit)
    return network.link_load(parsed, Fraction(part), rank)


def test_a_message_takes_the_link_that_joins_its_ends():
    assert load("x1.0>1", SHARED) == LinkLoad(5.0)
    assert load("x1.0>2", SHARED) == LinkLoad(10.0, 40.0)
    assert load("x1.0>2", APART) == LinkLoad(50.0)


@pytest.mark.parametrize(
    ("verb", "times"), [("all_reduce(grad0)", 2), ("reduce_scatter(grad0)", 1), ("all_gather(weight0)", 1)]
)
def test_on_one_host_each_rank_adds_up_or_reads_its_part_of_what_the_other_has(verb, times):
    assert load(f"{verb}@0,1", SHARED) == LinkLoad(times * (1 + 400 / 2 / 100))


@pytest.mark.parametrize(
    ("verb", "times"), [("all_reduce(grad0)", 2), ("reduce_scatter(grad0)", 1), ("all_gather(weight0)", 1)]
)
def test_over_hosts_the_value_crosses_each_nic_once_in_a_ring_of_hosts(verb, times):
    """Inside 3 s; three rounds, in which three quarters of all bytes leave each host."""
    assert load(f"{verb}@0-7", SHARED) == LinkLoad(times * (3 + 3 * 10), times * 400 * 3 / 4 / 10)


def test_an_encoded_gradient_is_not_added_up_within_a_host():
    """Each of two ranks of a host sends three quarters of its gradient to the six of the other hosts."""
    assert load("reduce_scatter:int8(grad0)@0,1", SHARED) == LinkLoad(1 + 400 / 2 / 100)
    assert load("reduce_scatter:int8(grad0)@0-7", SHARED) == LinkLoad(7 * 10, 2 * 400 * 6 / 8 / 10)
    assert load("reduce_scatter:int8(grad0)@0-7", APART) == LinkLoad(7 * 10 + 400 * 6 / 8 / 10)
    assert load("all_gather:int8(weight0)@0-7", SHARED) == load("all_gather(weight0)@0-7", SHARED)


@pytest.mark.parametrize("group", ["0,1", "0-7"])
def test_an_exchange_of_momenta_is_an_all_to_all_and_a_gather(group):
    halves = [load(f"{half}:int8({name}0)@{group}", SHARED) for half, name in HALVES]
    whole = load(f"all_reduce:onebit(grad0)@{group}", SHARED)
    assert whole.private_s == sum(half.private_s for half in halves)
    assert whole.shared_s == sum(half.shared_s for half in halves)


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("all_gather:int8(weight0)@0,2", 8 / 2 + 5),
        ("reduce_scatter:int4(grad0)@0,2", 11 + 8),
        ("all_gather(weight0)@0,2", 0),
        ("all_reduce:int8(grad0)@0,2", 0),
    ],
)
def test_shards_are_encoded_and_decoded_by_the_processor(text, copies):
    instruction = parse_instruction(text)
    assert isinstance(instruction, Collective)
    network = NetworkModel(SHARED, lambda value, code="": 400)
    seconds = copies * 3 * 400 / SHARED.device.reached_bytes_per_s
    assert network.cpu_s(instruction, Fraction(1), 0) == pytest.approx(seconds)


def test_holders_of_parts_with_private_links_transfer_in_parallel():
    assert load("all_reduce(grad0)@0-7", APART) == LinkLoad(2 * (3 + 3 * 10 + 400 / 2 * 3 / 4 / 10))


def test_single_members_of_hosts_reduce_nothing_inside_them():
    assert load("all_reduce(grad0)@0,2", SHARED) == LinkLoad(2 * 10, 2 * 20)


def test_only_the_given_fraction_of_a_tensor_is_communicated():
    assert load("all_reduce(grad0)@0,2", SHARED, part=Fraction(1, 4)).shared_s == 10


def test_the_smallest_host_determines_the_number_of_parts_of_an_all_reduce():
    assert load("all_reduce(grad0)@0-2", APART) == LinkLoad(2 * (3 + 10 + 400 / 2 / 10))


def test_parts_without_a_holder_on_some_host_need_a_ring_of_all_members():
    """Two rounds; of three ranks one edge of the ring leaves each host."""
    assert load("reduce_scatter(grad0)@0-2", SHARED).private_s == 20
    assert load("reduce_scatter(grad0)@0-2", SHARED).shared_s == pytest.approx(400 * 2 / 3 / 10)


def test_a_broadcast_goes_from_host_to_host_in_a_tree():
    """Read on the first host, 3 rounds over 4 hosts are 2 in a tree, read on the others."""
    assert load("broadcast(weight0)@0-7", SHARED) == LinkLoad(5 + 2 * 10 + 5, 2 * 40)


def test_a_commit_goes_up_and_down_a_tree_of_the_slowest_link():
    assert load("commit@0-7", SHARED) == LinkLoad(2 * 3 * 10)
    assert load("commit@0,1", SHARED) == LinkLoad(2 * 1)


def test_a_slow_link_of_one_rank_slows_down_its_collectives():
    slow = Cluster(link=CARD, slow_links=((0, 1, 0.5),))
    assert load("all_reduce(grad0)@0-3", slow).seconds == 2 * 3 * (10 + 100 / 5)
    assert load("all_reduce(grad0)@2,3", slow).seconds == 2 * (10 + 200 / 10)


def test_a_slow_nic_of_one_host_slows_down_the_ring_of_all():
    slow = Cluster(levels=SHARED.levels, slow_links=((1, 3, 0.25),))
    assert load("all_reduce(grad0)@0-7", slow).shared_s == 4 * load("all_reduce(grad0)@0-7", SHARED).shared_s
