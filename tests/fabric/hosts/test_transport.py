"""Hierarchical collectives over several hosts give the results of flat ones."""

import os
import signal
import time
from functools import partial

import pytest
import torch

from counterpoint.errors import PeerError
from counterpoint.fabric.cast_reductions import start_cast_all_reduce
from counterpoint.fabric.shm.native import native
from tests.fabric.run_ranks import on_hosts, on_local

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}"),
]
UNEVEN, SWAPPED, LARGE, MIXED = (0, 0, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1, 2, 1, 0, 1)


def everything(fabric):
    """Every collective over everybody, several under way at once."""
    group, rank = tuple(range(fabric.num_ranks)), fabric.rank
    bounds = [index * (index + 1) // 2 * 100 for index in range(len(group) + 1)]
    length, result = bounds[-1], {}
    own = fabric.empty(length, torch.float32)
    own[:] = torch.arange(length) % 7 + rank
    shares, summed, joined, mean = own.clone(), own.clone(), own.clone(), own.clone().view(2, -1).T
    cast, largest = torch.full((3, 2), rank), (torch.arange(5) * (-1) ** rank + rank).double()
    works = [
        fabric.all_reduce("sum", own, group),
        fabric.reduce_scatter("shares", shares, bounds, group, "mean"),
        fabric.reduce_scatter("summed", summed, bounds, group),
        fabric.all_gather("joined", joined, bounds, group),
        fabric.all_reduce("mean", mean, group, "mean"),
        *(fabric.broadcast(f"cast{root}", cast[index], group, root) for index, root in enumerate((0, *group[-2:]))),
        fabric.all_reduce("largest", largest, group, "max"),
    ]
    for work in works:
        work.wait()
    result["parts"] = [whole[bounds[rank] : bounds[rank + 1]].tolist() for whole in (shares, summed)]
    result["wholes"] = [own.tolist(), joined.tolist(), mean.tolist(), cast.tolist(), largest.tolist()]
    counts = [[1 + (i + j) % 3 for j in group] for i in group]
    received, work = fabric.all_to_all("tokens", torch.full((sum(counts[rank]),), rank), counts, group)
    work.wait()
    return {**result, "received": received.tolist(), "values": fabric.gather_values("rank", rank, group)}


@pytest.mark.long(quick=["hosts0"])
@pytest.mark.parametrize("hosts", [UNEVEN, SWAPPED, LARGE, MIXED])
def test_every_collective_gives_what_it_gives_in_one_process(hosts):
    ours, expected = (run_scenario(everything, len(hosts)) for run_scenario in (partial(on_hosts, hosts), on_local))
    assert ours == expected


def two_orders(fabric):
    """Two groups that share ranks 0 and 1 on one host, started in opposite orders."""
    groups = [(0, 1, 2), (0, 1, 3)]
    fabric.connect_groups(groups)
    mine = [group for group in groups if fabric.rank in group]
    tensors = {group: torch.full((1000,), float(fabric.rank)) for group in mine}
    works = [fabric.all_reduce("a", tensors[group], group) for group in (mine if fabric.rank else mine[::-1])]
    for work in works:
        work.wait()
    return [tensors[group][0].item() for group in mine]


@pytest.mark.long
def test_groups_that_share_a_host_may_start_in_any_order():
    assert on_hosts((0, 0, 1, 1), two_orders, 4) == [[3.0, 4.0], [3.0, 4.0], [3.0], [4.0]]


def serve(fabric):
    """Rank 0 receives from rank 1 on its host and rank 2 on another, alternately and by name, in the order of each."""
    if fabric.rank:
        for index in range(20):
            fabric.send(0, f"{fabric.rank}.{index}", [torch.full((index * 100,), index)])
        return fabric.recv(0, "end")[0].item()
    labels = [fabric.recv_any([1, 2])[1] for _ in range(20)]
    here, elsewhere = (sum(label.startswith(f"{peer}.") for label in labels) for peer in (1, 2))
    labels += [f"1.{index}" for index in range(here, 20) if fabric.recv(1, f"1.{index}") is not None]
    labels += [f"2.{index}" for index in range(elsewhere, 20) if fabric.recv(2, f"2.{index}") is not None]
    for peer in (1, 2):
        fabric.send(peer, "end", [torch.tensor(peer)])
    return [[label for label in labels if label.startswith(f"{peer}.")] for peer in (1, 2)]


@pytest.mark.long
def test_local_and_remote_messages_arrive_in_the_order_of_each_sender():
    expected = [[f"{peer}.{index}" for index in range(20)] for peer in (1, 2)]
    assert on_hosts(UNEVEN, serve, 3) == [expected, 1, 2]


def meet_in_memory(fabric):
    """Ranks 0 and 1 write into memory that they share; rank 2 is elsewhere."""
    result = fabric.shared_zeros("memory of all", 3, torch.float32, (0, 1, 2))
    fabric.barrier_async("all are here", (0, 1, 2)).wait()
    if fabric.rank == 2:
        return list(fabric.hosts), result
    memory = fabric.shared_zeros("memory of two", 3, torch.float32, (0, 1))
    memory[fabric.rank] = fabric.rank + 1
    fabric.barrier_async("both have written", (0, 1)).wait()
    values = memory.tolist()
    fabric.barrier((0, 1))
    return list(fabric.hosts), result, values


def test_ranks_of_one_host_have_memory_in_common_and_others_none():
    here = ([0, 0, 2], None, [1.0, 2.0, 0.0])
    assert on_hosts(UNEVEN, meet_in_memory, 3) == [here, here, ([0, 0, 2], None)]


def disagree(fabric):
    """Rank 1 adds up another tensor than rank 0 of its host and rank 2 elsewhere."""
    began = time.monotonic()
    try:
        fabric.all_reduce("b" if fabric.rank == 1 else "a", torch.ones(4), (0, 1, 2)).wait()
    except PeerError as error:
        return str(error), time.monotonic() - began
    return None


def test_a_disagreement_on_one_host_reaches_the_others_at_once():
    answers = on_hosts(UNEVEN, disagree, 3)
    assert len({text for text, _ in answers}) == 1
    assert answers[2][0].startswith(
        "ranks 0 and 1 disagree on collective 0 of their group: rank 0 starts all_reduce sum"
    )
    assert max(seconds for _, seconds in answers) < 2


def dies(is_formed, fabric):
    """Rank 3 is killed while the others wait: rank 2 beside it, ranks 0 and 1 elsewhere."""
    if is_formed:
        fabric.connect_groups([(0, 1, 2, 3)])
    fabric.barrier((0, 1, 2, 3))
    if fabric.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if fabric.rank == 0:
        return fabric.recv(1, "never")
    return fabric.all_reduce("a", torch.ones(1000), (0, 1, 2, 3)).wait()


@pytest.mark.long(quick=["False"])
@pytest.mark.parametrize("is_formed", [True, False])
def test_a_rank_that_ends_on_another_host_is_named(is_formed):
    began = time.monotonic()
    answers = on_hosts((0, 0, 1, 1), partial(dies, is_formed), 4, timeout_s=20.0)
    assert time.monotonic() - began < 15
    assert answers[3] is None
    assert all("rank 3 has ended" in text for text in answers[:3]), answers


def in_a_circle(fabric):
    """Rank 1 sends rank 0 more than a pipe holds, and then what rank 0 waits for, by way of the other host."""
    if fabric.rank == 0:
        token = fabric.recv(2, "token")[0].item()
        return token + fabric.recv(1, "much")[0].sum().item()
    if fabric.rank == 1:
        fabric.send(0, "much", [torch.ones(4 << 20)])
        fabric.send(3, "token", [torch.ones(1)])
    else:
        source, target = {2: (3, 0), 3: (1, 2)}[fabric.rank]
        fabric.send(target, "token", list(fabric.recv(source, "token")))
    return None


def test_who_waits_for_another_host_takes_in_what_its_own_host_sends():
    began = time.monotonic()
    assert on_hosts((0, 0, 1, 1), in_a_circle, 4)[0] == 1 + (4 << 20)
    assert time.monotonic() - began < 8


class CountingConnection:
    """A connection between hosts that counts the bytes that this member sends to others."""

    def __init__(self, gloo):
        self.gloo, self.num_bytes = gloo, 0

    def __getattr__(self, name):
        return getattr(self.gloo, name)

    def alltoall_base(self, received, sent, incoming, outgoing, options):
        self.num_bytes += sum(outgoing)
        return self.gloo.alltoall_base(received, sent, incoming, outgoing, options)

    def allreduce(self, tensors, options):
        self.num_bytes += sum(2 * one.nbytes * (self.gloo.size() - 1) // self.gloo.size() for one in tensors)
        return self.gloo.allreduce(tensors, options)


def draw(rank):
    return torch.randn(4000, generator=torch.Generator().manual_seed(rank))


def count_sum(dtype, fabric):
    """Return the sum of all ranks' numbers in a dtype, and the bytes that this rank sends to other hosts for it."""
    group, whole = tuple(range(fabric.num_ranks)), draw(fabric.rank)
    fabric.connect_groups([group])
    inter = fabric._routes[group].inter
    counters = {id(gloo): CountingConnection(gloo) for gloo in (inter.gloo, inter.ranges) if gloo is not None}
    inter.gloo, inter.ranges = counters.get(id(inter.gloo)), counters[id(inter.ranges)]
    if dtype is None:
        fabric.all_reduce("sum", whole, group).wait()
    else:
        start_cast_all_reduce(fabric, "sum", whole, whole.to(dtype), group).wait()
    return whole.tolist(), sum(counter.num_bytes for counter in counters.values())


def bytes_of_hosts(hosts, counted):
    return [sum(count for at, (_, count) in zip(hosts, counted, strict=True) if at == host) for host in (0, 1)]


@pytest.mark.long(quick=["bfloat16-hosts1"])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), LARGE, (0, 1, 1, 0, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sums_in_16_bits_halve_what_hosts_send_and_round_the_sum_of_each_host(dtype, hosts):
    """They were sent as 32 bits, and once by each rank where hosts have different numbers of ranks."""
    count = len(hosts)
    wide, narrow = (on_hosts(hosts, partial(count_sum, one), count) for one in (None, dtype))
    numbers = [draw(rank).to(dtype).float() for rank in range(count)]
    of_hosts = [[number for at, number in zip(hosts, numbers, strict=True) if at == host] for host in (0, 1)]
    rounded = [sum(own[1:], start=own[0]).to(dtype).float() for own in of_hosts]
    assert bytes_of_hosts(hosts, wide) == [4000 * 4] * 2
    assert bytes_of_hosts(hosts, narrow) == [4000 * 2] * 2
    assert [whole for whole, _ in narrow] == [sum(rounded).to(dtype).float().tolist()] * count


def average_large(fabric):
    """Return the own range of a mean of numbers whose sum is infinite in fp16."""
    whole = torch.full((8,), 40_000.0 + 64 * fabric.rank, dtype=torch.float16)
    fabric.reduce_scatter("mean", whole, [0, 2, 4, 6, 8], (0, 1, 2, 3), "mean").wait()
    return whole[2 * fabric.rank :][:2].tolist()


@pytest.mark.long
def test_a_mean_in_16_bits_is_finite_where_the_sum_of_a_host_is_not():
    assert on_hosts((0, 0, 1, 1), average_large, 4) == [[40_096.0] * 2] * 4
