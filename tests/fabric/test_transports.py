"""All transports give the same results."""

import math
from functools import partial

import pytest
import torch

from tests.fabric.conftest import PROCESSES
from tests.fabric.run_ranks import on_local

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip
TRIO = (0, 1, 2)
ONE_HOST = [on_local, *PROCESSES]


def send_messages(fabric):
    """Every dtype, an empty tensor, a scalar, a transposed one; rank 0 overwrites what it has sent."""
    if fabric.rank == 0:
        tensors = [torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=dtype).T for dtype in DTYPES]
        fabric.send(1, "all", [*tensors, torch.empty(0, 3), torch.tensor(7)])
        for tensor in tensors:
            tensor.zero_()
        return None
    *tensors, empty, scalar = fabric.recv(0, "all")
    return [t.dtype for t in tensors], [t.tolist() for t in tensors], list(empty.shape), scalar.item()


@pytest.mark.long(quick=["local", "shm"])
def test_a_message_arrives_as_it_was_sent(run_scenario):
    dtypes, values, empty, scalar = run_scenario(send_messages, 2)[1]
    assert dtypes == DTYPES
    assert values == [[[0, 1], [1, 0], [1, 0]]] * len(DTYPES)
    assert (empty, scalar) == ([0, 3], 7)


def send_many_messages(fabric):
    """More messages than may be under way, some longer than the first piece of one."""
    if fabric.rank == 0:
        for index in range(200):
            fabric.send(1, f"x{index}", [torch.full((index * 7,), index)])
        return None
    return sum(fabric.recv(0, f"x{index}")[0].sum().item() for index in range(200))


@pytest.mark.long(quick=["local", "shm"])
def test_two_hundred_messages_arrive_in_order(run_scenario):
    assert run_scenario(send_many_messages, 2)[1] == sum(7 * index * index for index in range(200))


def cross(fabric):
    """Both send more than lies between two ranks, and receive afterwards."""
    other, own = 1 - fabric.rank, torch.full((1_000_000,), float(fabric.rank))
    for index in range(3):
        fabric.send(other, f"x{index}", [own])
    return [fabric.recv(other, f"x{index}")[0].unique().tolist() for index in range(3)]


@pytest.mark.long(quick=["local"])
def test_large_messages_pass_both_ways_at_once(run_scenario):
    """In shared memory both ranks waited for room until the deadline."""
    assert run_scenario(cross, 2) == [[[1.0]] * 3, [[0.0]] * 3]


def round_about(fabric):
    """All send in a circle of three, and receive afterwards what has come between two large messages."""
    following, before = (fabric.rank + 1) % 3, (fabric.rank - 1) % 3
    for index in range(40):
        fabric.send(following, f"small{index}", [torch.tensor(index)])
    fabric.send(following, "large", [torch.full((1_000_000,), fabric.rank)])
    small = [fabric.recv_any([before])[2][0].item() for _ in range(40)]
    return small == list(range(40)), fabric.recv(before, "large")[0].unique().item()


@pytest.mark.long(quick=["local"])
def test_large_messages_pass_in_a_circle_at_once(run_scenario):
    assert run_scenario(round_about, 3) == [(True, 2), (True, 0), (True, 1)]


def wait_for_another(fabric, wait):
    """Rank 0 waits for rank 1, which waits for rank 2, which first sends rank 0 more than lies between two ranks."""
    large = torch.full((1_000_000,), 2.0)
    if fabric.rank == 2:
        fabric.send(0, "large", [large])
        fabric.send(1, "go", [])
        return None
    if fabric.rank == 1:
        fabric.recv(2, "go")
    wait(fabric)
    return fabric.recv(2, "large")[0].unique().item() if fabric.rank == 0 else None


def in_a_message(fabric):
    wait_for_another(fabric, lambda actual: actual.send(0, "then", []) if actual.rank else actual.recv(1, "then"))
    return fabric.rank


def in_a_sum(fabric):
    ones = torch.ones(3)
    wait_for_another(fabric, lambda actual: actual.all_reduce("sum", ones, (0, 1)).wait())
    return ones.tolist()


@pytest.mark.long(quick=["on_local"])
@pytest.mark.parametrize("run_scenario", ONE_HOST)
def test_a_rank_that_waits_for_a_message_receives_those_of_others(run_scenario):
    """In shared memory all three waited until the deadline."""
    assert run_scenario(in_a_message, 3) == [0, 1, 2]


@pytest.mark.long(quick=["on_local"])
@pytest.mark.parametrize("run_scenario", ONE_HOST)
def test_a_rank_that_waits_for_an_all_reduce_receives_messages(run_scenario):
    assert run_scenario(in_a_sum, 3) == [[2.0] * 3, [2.0] * 3, [1.0] * 3]


def serve(fabric):
    """Rank 0 answers any peer, then receives from one peer although another one has sent first."""
    if fabric.rank:
        fabric.send(0, f"push{fabric.rank}", [torch.tensor(fabric.rank)])
        (answer,) = fabric.recv(0, "pull")
        return answer.item()
    seen = {}
    for _ in range(2):
        peer, label, (value,) = fabric.recv_any([1, 2])
        seen[peer] = (label, value.item())
        fabric.send(peer, "pull", [value * 10])
    return seen


@pytest.mark.long(quick=["local", "shm"])
def test_recv_any_receives_from_any_peer(run_scenario):
    assert run_scenario(serve, 3) == [{1: ("push1", 1), 2: ("push2", 2)}, 10, 20]


def pick(fabric):
    """Rank 2's message comes first, but rank 0 asks for rank 1's; nothing is lost."""
    if fabric.rank == 1:
        fabric.gather_values("rank 2 has sent", None, TRIO)
        fabric.send(0, "late", [])
        return None
    if fabric.rank == 2:
        fabric.send(0, "early", [torch.arange(1000)])
    fabric.gather_values("rank 2 has sent", None, TRIO)
    if fabric.rank == 2:
        return None
    return [fabric.recv_any([1])[:2], fabric.recv(2, "early")[0].sum().item()]


@pytest.mark.long(quick=["local", "shm"])
def test_messages_of_others_are_kept_for_later(run_scenario):
    assert run_scenario(pick, 3)[0] == [(1, "late"), 499500]


def sums(fabric):
    result = []
    for dtype in DTYPES[:6]:
        tensor = torch.full((2, 3), fabric.rank + 1, dtype=dtype).T
        fabric.all_reduce(f"{dtype}", tensor, TRIO).wait()
        result.append(tensor.unique().tolist())
    parameter = torch.nn.Parameter(torch.ones(3))
    fabric.all_reduce("parameter", parameter, TRIO).wait()
    fabric.all_reduce("empty", torch.empty(0), TRIO).wait()
    return [*result, parameter.tolist()]


@pytest.mark.long(quick=["local"])
def test_a_sum_is_the_same_everywhere(run_scenario):
    assert run_scenario(sums, 3) == [[[6]] * 6 + [[3.0, 3.0, 3.0]]] * 3


def shares(fabric):
    """Unequal ranges, one of them empty."""
    whole, bounds = torch.arange(7.0) + 10 * fabric.rank, [0, 2, 2, 7]
    fabric.reduce_scatter("grad", whole, bounds, TRIO).wait()
    own = slice(bounds[fabric.rank], bounds[fabric.rank + 1])
    shared = whole[own].tolist()
    whole[own] += fabric.rank
    fabric.all_gather("weight", whole, bounds, TRIO).wait()
    return shared, whole.tolist()


def reports(fabric):
    """Few numbers of each, so few that they travel inside of announcements."""
    rows = torch.full((3, 2), torch.nan, dtype=torch.float64)
    rows[fabric.rank] = torch.tensor([fabric.rank / 3, torch.inf], dtype=torch.float64)
    fabric.all_gather("commit", rows.view(-1), [0, 2, 4, 6], TRIO).wait()
    return rows.tolist()


@pytest.mark.long(quick=["local", "shm"])
def test_a_few_numbers_of_each_reach_all_as_they_are(run_scenario):
    assert run_scenario(reports, 3) == [[[0.0, math.inf], [1 / 3, math.inf], [2 / 3, math.inf]]] * 3


@pytest.mark.long(quick=["local", "shm"])
def test_shares_of_a_sum_join_to_the_whole(run_scenario):
    summed = [30.0, 33.0, 36.0, 39.0, 42.0, 45.0, 48.0]
    joined = [30.0, 33.0, 38.0, 41.0, 44.0, 47.0, 50.0]
    assert run_scenario(shares, 3) == [(summed[:2], joined), ([], joined), (summed[2:], joined)]


def casts(fabric):
    tensor = torch.tensor([True, False, fabric.rank == 2])
    fabric.broadcast("mask", tensor, TRIO, 2).wait()
    column = torch.full((2, 2), float(fabric.rank))[:, 1]
    fabric.broadcast("column", column, TRIO, 1).wait()
    return tensor.tolist(), column.tolist()


@pytest.mark.long(quick=["local", "shm"])
def test_everybody_gets_the_value_of_the_root(run_scenario):
    assert run_scenario(casts, 3) == [([True, False, True], [1.0, 1.0])] * 3


def values(fabric):
    fabric.barrier(TRIO)
    short = fabric.gather_values("short", {"rank": fabric.rank, "shape": (1, 2)}, TRIO)
    long = fabric.gather_values("long", "x" * 1000 * fabric.rank, TRIO)
    return short, [len(text) for text in long]


@pytest.mark.long(quick=["local", "shm"])
def test_gathered_values_are_in_group_order(run_scenario):
    assert run_scenario(values, 3) == [([{"rank": rank, "shape": [1, 2]} for rank in TRIO], [0, 1000, 2000])] * 3


def groups(fabric):
    """All are started before any is waited for, in orders that would block if starting did."""
    fabric.connect_groups([(0, 1), (1, 2), (0, 2), (2,)])
    ordered_groups = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[fabric.rank]
    tensors = {group: torch.tensor(float(fabric.rank)) for group in ordered_groups}
    works = [fabric.all_reduce(f"grad{group}", tensors[group], group) for group in ordered_groups]
    for work in works:
        work.wait()
        work.wait()
    fabric.barrier((fabric.rank,))
    return {group: tensor.item() for group, tensor in tensors.items()}


@pytest.mark.long(quick=["local", "shm"])
def test_starting_never_waits_for_another_member(run_scenario):
    assert run_scenario(groups, 3) == [
        {(0, 1): 1.0, (0, 2): 2.0},
        {(1, 2): 3.0, (0, 1): 1.0},
        {(0, 2): 2.0, (1, 2): 3.0},
    ]


def send_between_start_and_wait(fabric):
    """A message passes between a start and its wait."""
    tensor, pair = torch.ones(1000), (0, 1)
    if fabric.rank == 0:
        work = fabric.all_reduce("grad", tensor, pair)
        fabric.recv(1, "x")
    else:
        fabric.send(0, "x", [tensor])
        work = fabric.all_reduce("grad", tensor, pair)
    work.wait()
    return tensor.sum().item()


@pytest.mark.long(quick=["local", "shm"])
def test_a_message_may_pass_between_a_start_and_its_wait(run_scenario):
    assert run_scenario(send_between_start_and_wait, 2) == [2000.0, 2000.0]


def alone(fabric):
    tensor = torch.arange(3.0)
    fabric.all_reduce("a", tensor, (0,)).wait()
    fabric.reduce_scatter("b", tensor, [0, 3], (0,)).wait()
    fabric.all_gather("c", tensor, [0, 3], (0,)).wait()
    fabric.broadcast("d", tensor, (0,), 0).wait()
    fabric.barrier((0,))
    return tensor.tolist(), fabric.gather_values("e", (1, 2), (0,))


def test_a_group_of_one_does_nothing(run_scenario):
    assert run_scenario(alone, 1) == [([0.0, 1.0, 2.0], [[1, 2]])]


def verbs(fabric):
    """Three ranks with 1, 2 and 6, NaN on rank 1 in the last place."""
    actual = {}
    for verb in ("sum", "mean", "max", "min"):
        own = torch.tensor([[1.0, 2.0, 6.0][fabric.rank]] * 3 + [math.nan if fabric.rank == 1 else 0.0])
        fabric.all_reduce("loss", own, TRIO, verb).wait()
        whole = torch.full((3,), [1.0, 2.0, 6.0][fabric.rank], dtype=torch.float16)
        fabric.reduce_scatter("grad", whole, [0, 1, 2, 3], TRIO, verb).wait()
        actual[verb] = (own[0].item(), own[3].isnan().item(), whole[fabric.rank].item())
    return actual


@pytest.mark.long(quick=["local", "shm"])
def test_all_four_reductions(run_scenario):
    expected = {"sum": (9.0, True, 9.0), "mean": (3.0, True, 3.0), "max": (6.0, True, 6.0), "min": (1.0, True, 1.0)}
    assert run_scenario(verbs, 3) == [expected] * 3


def nans(fabric):
    """One rank after the other has NaN in the first place."""
    wrong = []
    for place in TRIO:
        for dtype in DTYPES[:4]:
            for verb in ("sum", "mean", "max", "min"):
                own = torch.full((3,), float(fabric.rank), dtype=dtype)
                own[0] = math.nan if fabric.rank == place else 1.0
                fabric.all_reduce("loss", own, TRIO, verb).wait()
                wrong += [] if own.isnan().tolist() == [True, False, False] else [(place, dtype, verb)]
    return wrong


@pytest.mark.long(quick=["local"])
def test_nan_wins_on_whichever_rank_it_is(run_scenario):
    """On gloo it lost where it was not on the first rank."""
    assert run_scenario(nans, 3) == [[]] * 3


def narrow(fabric):
    """In steps of 16 bits, 2048 + 1 + 1 would stay 2048, and 3 times 40000 is not a number."""
    actual = []
    for ask in ("sum", "mean"):
        own = torch.tensor([[2048.0, 1.0, 1.0][fabric.rank]] if ask == "sum" else [40000.0], dtype=torch.float16)
        whole = own.repeat(3)
        fabric.all_reduce("a", own, TRIO, ask).wait()
        fabric.reduce_scatter("b", whole, [0, 1, 2, 3], TRIO, ask).wait()
        actual += [own.item(), whole[fabric.rank].item()]
    return actual


@pytest.mark.long(quick=["local", "shm"])
def test_16_bit_numbers_are_added_up_in_32_bits_and_rounded_once(run_scenario):
    """A sum that hosts scatter is rounded on each host, too: 2048 + 1, and then 2048 + 1."""
    scattered = 2048.0 if isinstance(run_scenario, partial) else 2050.0
    assert [numbers[1] for numbers in run_scenario(narrow, 3)] == [scattered] * 3
    assert [numbers[::2] + numbers[3:] for numbers in run_scenario(narrow, 3)] == [[2050.0, 40000.0, 40000.0]] * 3


COUNTS = [[1, 2, 0], [0, 1, 3], [70000, 0, 1]]


def swap(fabric):
    """Rank i sends rank j so many numbers ij."""
    whole = torch.cat([torch.full((COUNTS[fabric.rank][other],), 10 * fabric.rank + other) for other in TRIO])
    received, work = fabric.all_to_all("tokens", whole, COUNTS, TRIO)
    work.wait()
    return received.unique_consecutive(return_counts=True)[0].tolist(), len(received)


@pytest.mark.long(quick=["local"])
def test_everyone_gets_from_everyone_in_their_order(run_scenario):
    assert run_scenario(swap, 3) == [([0, 20], 70001), ([1, 11], 3), ([12, 22], 4)]


def negated(value):
    """Return a number that torch negates lazily: the opposite is in memory."""
    view = torch.complex(torch.zeros(1), torch.tensor([-float(value)])).conj().imag
    assert view.is_neg()
    assert view.is_contiguous()
    return view


def pass_negated_views(fabric):
    """Sum, broadcast and send such numbers."""
    own, other, pair = fabric.rank + 1, 1 - fabric.rank, (0, 1)
    total, from_root = negated(own), negated(own)
    fabric.all_reduce("total", total, pair).wait()
    fabric.broadcast("from_root", from_root, pair, 1).wait()
    fabric.send(other, "view", [negated(own)])
    return total.item(), from_root.item(), fabric.recv(other, "view")[0].item()


@pytest.mark.long(quick=["local", "shm"])
def test_a_number_that_is_negated_lazily_travels_as_it_is_read(run_scenario):
    """Its memory was read, which has the opposite; messages of it were refused by torch."""
    assert run_scenario(pass_negated_views, 2) == [(3.0, 2.0, 2.0), (3.0, 2.0, 1.0)]
