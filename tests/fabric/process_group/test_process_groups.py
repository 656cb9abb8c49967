"""Process groups: every collective on any ranges, and errors although most collectives are not compared beforehand."""

import os
import re
import signal
import time
from functools import partial

import pytest
import torch

from counterpoint.errors import PeerError
from tests.fabric.random_programs import RandomProgram, differing
from tests.fabric.run_ranks import on_gloo, on_local, on_process_groups, resources
from tests.fabric.test_faults import come_and_go

pytestmark = pytest.mark.process
PAIR, TRIO = (0, 1), (0, 1, 2)
BOUNDS = {
    "equal": [0, 4, 8, 12],
    "nearly equal": [0, 40, 80, 119],  # padded
    "unequal": [0, 1, 1, 50],  # exchanged
    "one has all": [0, 0, 7, 7],
    "empty": [0, 0, 0, 0],
}
DTYPES = [torch.float64, torch.bfloat16, torch.int32]


def collectives_on_any_ranges(fabric):
    """Return each rank's result of every collective on every kind of ranges, twice: announced, and known."""
    result = {}
    for turn in range(2):
        for name, bounds in BOUNDS.items():
            for dtype in DTYPES:
                whole = (torch.arange(bounds[-1]) % 11 + fabric.rank).to(dtype)
                own = slice(bounds[fabric.rank], bounds[fabric.rank + 1])
                summed, gathered = whole.clone(), whole.clone()
                fabric.reduce_scatter("grad", summed, bounds, TRIO).wait()
                fabric.all_gather("weight", gathered, bounds, TRIO).wait()
                lengths = [bounds[1], bounds[2] - bounds[1], bounds[3] - bounds[2]]
                counts = [lengths, lengths[::-1], [1, 0, 2]]
                received, work = fabric.all_to_all(
                    "tokens", torch.full((sum(counts[fabric.rank]),), fabric.rank, dtype=dtype), counts, TRIO
                )
                work.wait()
                largest = whole.clone()
                fabric.all_reduce("norm", largest, TRIO, "max").wait()
                fabric.broadcast("root's", whole, TRIO, 2).wait()
                tensors = (summed[own], gathered, received, largest, whole)
                result[turn, name, dtype] = [tensor.double().tolist() for tensor in tensors]
    fabric.check_same_order(TRIO)
    return result


@pytest.mark.long
def test_every_collective_takes_ranges_of_any_lengths():
    assert on_process_groups(collectives_on_any_ranges, 3) == on_local(collectives_on_any_ranges, 3)


@pytest.mark.long
def test_random_programs_end_as_in_one_process():
    program = RandomProgram(5, 3)
    for mine, theirs in zip(on_process_groups(program, 3), on_local(program, 3), strict=True):
        assert isinstance(mine, dict), mine
        assert not differing(mine, theirs, is_exact=False)


def train_steps(fabric, steps, group=PAIR, size=4):
    """Start the collectives of each step, and compare their order at its end, as a commit does."""
    for step in steps:
        works = [fabric.all_reduce(f"grad{name}", torch.ones(size), group) for name in step]
        for work in works:
            work.wait()
        fabric.check_same_order(group)


def fail_in_the_last_step(common, mine, theirs, fabric, group=PAIR):
    """Run common steps, then one that differs on rank 0; return the error, and how long it took."""
    train_steps(fabric, common, group)
    began = time.monotonic()
    with pytest.raises(PeerError) as failure:
        train_steps(fabric, [theirs if fabric.rank else mine], group)
    return str(failure.value), time.monotonic() - began


STEPS = ["abc"] * 3
CASES = {  # the last step on rank 0 and on rank 1, and the first collective that differs
    "swapped": (STEPS, "acb", "abc", 10, ("gradc", "gradb")),
    "one more": (STEPS, "abcd", "abc", 12, ("gradd", "nothing")),
    "one less": (STEPS, "ac", "abc", 10, ("gradc", "gradb")),
    "both seen before": (["abc", "acb", "abc", "acb"], "acb", "abc", 13, ("gradc", "gradb")),
    "first step": ([], "ab", "ba", 0, ("grada", "gradb")),
}


@pytest.mark.long(quick=["both seen before"])
@pytest.mark.parametrize("case", CASES)
def test_a_collective_that_differs_is_named_within_the_step(case):
    common, mine, theirs, index, (first, second) = CASES[case]
    answers = on_process_groups(partial(fail_in_the_last_step, common, mine, theirs), 2)
    for text, seconds in answers:
        assert f"disagree on collective {index} of their group: rank 0 starts all_reduce sum of {first}, " in text
        assert second == "nothing" or f"; rank 1 starts all_reduce sum of {second}, " in text
        assert seconds < 4, "not the timeout of 10 s"


def test_order_is_compared_in_groups_within_the_group_only():
    """Rank 2 is in no common group with what differs between the others, and is told by their error."""
    texts = on_process_groups(partial(compare_in_a_subgroup, TRIO), 3)
    assert all("all_reduce sum of gradb" in text and "all_reduce sum of gradc" in text for text in texts[:2])
    assert "stopped because of rank " in texts[2]


def compare_in_a_subgroup(everybody, fabric):
    fabric.connect_groups([PAIR, everybody])
    if fabric.rank < 2:
        for name in ("abc", "acb", "abc"):
            for label in name:
                fabric.all_reduce(f"grad{label}", torch.ones(4), PAIR).wait()
        for label in "acb" if fabric.rank else "abc":
            fabric.all_reduce(f"grad{label}", torch.ones(4), PAIR).wait()
    fabric.check_same_order(everybody)
    return fabric.gather_values("loss", 1.0, everybody)


def killed(wait, fabric):
    """Rank 1 is killed in the fourth step, in which the others wait for it; how long it took them, and the error."""
    fabric.connect_groups([(0, 1), TRIO])
    train_steps(fabric, STEPS, TRIO, 1000)
    pass_on(fabric)
    fabric.barrier(TRIO)
    began = time.monotonic()
    with pytest.raises(PeerError) as failure:
        killed_after_a_barrier(fabric, wait)
    return str(failure.value), time.monotonic() - began


def killed_after_a_barrier(fabric, wait):
    fabric.barrier(TRIO)  # which rank 1 may leave before the others do
    if fabric.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if wait == "collective":
        train_steps(fabric, ["abc"], TRIO, 1000)
    else:
        pass_on(fabric)


def pass_on(fabric):
    """Rank 1 sends to both others."""
    if fabric.rank == 1:
        fabric.send(0, "x", [torch.ones(1000)])
        fabric.send(2, "x", [torch.ones(1000)])
    else:
        fabric.recv(1, "x")


@pytest.mark.long(quick=["message"])
@pytest.mark.parametrize("wait", ["collective", "message"])
def test_a_killed_rank_is_named_within_two_seconds(wait):
    first, dead, last = on_process_groups(partial(killed, wait), 3, timeout_s=20.0)
    assert dead is None
    assert all("rank 1 has ended; look at the output of rank 1" in text for text, _ in (first, last)), (first, last)
    assert max(first[1], last[1]) < 2


def wait_apart(fabric):
    """Ranks 0 and 1 wait for each other's part of a known collective, and rank 2 aborts."""
    fabric.connect_groups([(0, 1), (1, 2)])
    if fabric.rank < 2:
        for _ in range(2):
            fabric.all_reduce("grad", torch.ones(1000), PAIR).wait()
    fabric.barrier(TRIO)
    if fabric.rank == 2:
        return fabric.abort("the loss is nan in step 7")
    if fabric.rank == 0:
        return fabric.all_reduce("grad", torch.ones(1000), PAIR).wait()
    return signal.sigtimedwait([signal.SIGUSR1], 1.0)


@pytest.mark.long
def test_an_abort_ends_ranks_that_wait_for_others():
    began = time.monotonic()
    text = on_process_groups(wait_apart, 3, timeout_s=20.0)[0]
    assert re.match(
        r"PeerError: rank 0 waited [01]\.\d s for all_reduce sum of grad with rank 1: stopped because of ", text
    )
    assert "rank 2: the loss is nan in step 7" in text
    assert time.monotonic() - began < 8


def late(fabric):
    """Rank 2 does not start the second of two known collectives."""
    for _ in range(2):
        for label in "ab":
            fabric.all_reduce(label, torch.ones(3), TRIO).wait()
    fabric.all_reduce("a", torch.ones(3), TRIO).wait()
    if fabric.rank == 2:
        return signal.sigtimedwait([signal.SIGUSR1], 2.0)
    return fabric.all_reduce("b", torch.ones(3), TRIO).wait()


@pytest.mark.long
def test_the_ranks_that_have_not_started_a_collective_are_named():
    texts = on_process_groups(late, 3, timeout_s=1.0)[:2]
    assert any(
        re.match(
            rf"PeerError: rank {rank} waited \d\.\d s for all_reduce sum of b with ranks .*: the timeout of 1\.0 s has "
            r"passed; rank 2 has not started it ",
            text,
        )
        for rank, text in enumerate(texts)
    ), texts


def crossing_messages(fabric):
    """Each sends to the next before it receives: first contact in a circle, then several tensors, and many messages."""
    following, before = (fabric.rank + 1) % 3, (fabric.rank - 1) % 3
    before_threads = resources()[0]
    seen = []
    for index in range(40):
        tensors = [torch.full((index, 3), fabric.rank), torch.tensor(index / 2), torch.empty(0, 2), torch.ones(5) > 0]
        fabric.send(following, f"x{index}", tensors)
        for tensor in tensors:
            tensor.zero_()
    for index in range(40):
        received = fabric.recv(before, f"x{index}")
        seen += [[tensor.sum().item() for tensor in received], [tuple(tensor.shape) for tensor in received]]
    return seen == [
        part for index in range(40) for part in ([3 * index * before, index / 2, 0, 5], [(index, 3), (), (0, 2), (5,)])
    ], resources()[0] - before_threads < 30


def test_messages_of_several_tensors_pass_in_a_circle():
    assert on_process_groups(crossing_messages, 3) == [(True, True)] * 3


def test_closed_process_groups_leave_no_thread_and_no_file():
    more = on_gloo(partial(come_and_go, "process_group"), 3)
    assert not [answer for answer in more if isinstance(answer, str)], more
    assert all(max(counts) <= 0 for counts, _ in more), more
