"""Ranks that start different collectives all get one error that names two of them, and no tensor changes."""

import re
import signal
import time
from functools import partial

import pytest
import torch

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric import LocalWorld
from tests.fabric.run_ranks import on_local

PAIR = (0, 1)
SORTED = "a group is a sorted tuple of ranks below 2, rank 0 included"


def two(first, second):
    """Rank 0 does the first, rank 1 the second."""
    return {0: first, 1: second}


def reduce(label="a", tensor=None, verb="sum"):
    return lambda fabric, own: fabric.all_reduce(label, own if tensor is None else tensor, PAIR, verb)


def cast(root):
    return lambda fabric, own: fabric.broadcast("a", own, PAIR, root)


def scatter(bounds):
    return lambda fabric, own: fabric.reduce_scatter("a", own, bounds, PAIR)


def join(bounds):
    return lambda fabric, own: fabric.all_gather("a", own, bounds, PAIR)


def swap(counts):
    return lambda fabric, own: fabric.all_to_all("a", own, counts, PAIR)[1]


def both(first, second):
    """One starts two and waits for the second."""

    def act(fabric, own):
        first(fabric, own)
        return second(fabric, own)

    return act


CASES = {
    "kind": (0, two(reduce(), cast(0)), "all_reduce sum of a", "broadcast of a"),
    "reduction": (0, two(scatter([0, 2, 4]), join([0, 2, 4])), "reduce_scatter sum of a", "all_gather of a"),
    "verb": (0, two(reduce(), reduce(verb="max")), "all_reduce sum of a", "all_reduce max of a"),
    "one more": (0, two(both(reduce("a"), reduce("b")), reduce("b")), "sum of a, float32", "sum of b, float32"),
    "order": (0, two(reduce("a"), reduce("b")), "sum of a, float32", "sum of b, float32"),
    "shape": (0, two(reduce(), reduce(tensor=torch.ones(8))), "float32 (4,)", "float32 (8,)"),
    "reshaped": (0, two(reduce(), reduce(tensor=torch.ones(2, 2))), "float32 (4,)", "float32 (2, 2)"),
    "dtype": (0, two(reduce(), reduce(tensor=torch.ones(4, dtype=torch.int32))), "float32 (4,)", "int32 (4,)"),
    "root": (0, two(cast(0), cast(1)), "root 0", "root 1"),
    "ranges": (0, two(scatter([0, 2, 4]), scatter([0, 1, 4])), "bounds (0, 2, 4)", "bounds (0, 1, 4)"),
    "later": (2, two(reduce(), reduce("b")), "sum of a, float32", "sum of b, float32"),
}
RARER = {
    "mean": (0, two(reduce(), reduce(verb="mean")), "all_reduce sum of a", "all_reduce mean of a"),
    "exchange": (0, two(swap([[2, 2], [2, 2]]), swap([[2, 2], [3, 1]])), "(2, 2, 2, 2)", "(2, 2, 3, 1)"),
    "name": (0, two(reduce("grad of w1"), reduce("grad of w2")), "sum of grad of w1", "sum of grad of w2"),
    "one less": (1, two(reduce("b"), both(reduce("a"), reduce("b"))), "sum of b, float32", "sum of a, float32"),
}


def differ(case, fabric):
    """Do something in common some times, then what this rank alone does."""
    turn, actions, *_ = (CASES | RARER)[case]
    for index in range(turn):
        fabric.all_reduce(f"common{index}", torch.ones(1), PAIR).wait()
    own, began = torch.full((4,), float(fabric.rank)), time.monotonic()
    try:
        actions[fabric.rank](fabric, own).wait()
    except PeerError as error:
        return str(error), own.tolist(), time.monotonic() - began
    return None


@pytest.mark.long(
    quick=["local-one more", "local-verb", "local-kind", "local-reduction", "local-dtype", "process_group-root"]
)
@pytest.mark.parametrize("case", CASES)
def test_all_members_get_one_error_and_keep_their_tensors(run_scenario, case):
    check_told(run_scenario, case)


@pytest.mark.parametrize("case", RARER)
def test_so_they_do_in_one_process_where_they_differ_in_less(case):
    check_told(on_local, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", RARER)
def test_so_they_do_between_processes_where_they_differ_in_less(processes, case):
    check_told(processes, case)


def check_told(run_scenario, case):
    """Both ranks know within two seconds what each of them does, and hold what they held."""
    turn, _, mine, theirs = (CASES | RARER)[case]
    (text, own, seconds), (other_text, other_own, other_seconds) = run_scenario(partial(differ, case), 2)
    assert max(seconds, other_seconds) < 2
    assert (own, other_own) == ([0.0] * 4, [1.0] * 4)
    assert text == other_text
    assert text.startswith(f"ranks 0 and 1 disagree on collective {turn} of their group: rank 0 starts ")
    assert text.index(mine) < text.index("; rank 1 starts ") < text.rindex(theirs)


def one_more(fabric):
    """Rank 1 has left when rank 0 starts its second."""
    fabric.all_reduce("a", torch.ones(1), PAIR).wait()
    if fabric.rank == 1:
        fabric.close()
        return signal.sigtimedwait([signal.SIGUSR1], 1.0)
    return fabric.all_reduce("b", torch.ones(1), PAIR).wait()


@pytest.mark.long(quick=["gloo"])
def test_a_collective_for_which_a_member_has_left_ends_at_once(processes):
    """In shared memory it lasted until the deadline, as long as the other process lived."""
    began = time.monotonic()
    text, _ = processes(one_more, 2, timeout_s=10.0)
    assert re.match(r"PeerError: rank 0 waited 0\.\d s for all_reduce sum of b with rank 1: ", text)
    assert "rank 1 has closed its fabric" in text or "the connection was lost" in text
    assert time.monotonic() - began < 5


def third(fabric):
    """Only rank 2 of three differs."""
    return fabric.gather_values("loss" if fabric.rank < 2 else "norm", 1.0, (0, 1, 2))


@pytest.mark.long(quick=["local", "shm"])
def test_the_two_that_are_named_are_those_that_differ(run_scenario):
    texts = run_scenario(third, 3)
    assert all("ranks 0 and 2 disagree" in text for text in texts)
    assert all("gather_values of loss" in text and "gather_values of norm" in text for text in texts)


def other_groups(fabric):
    """Rank 0 adds up with rank 1, which adds up with all three."""
    fabric.connect_groups([(0, 1), (0, 1, 2)])
    fabric.all_reduce("a", torch.ones(1), (0, 1) if fabric.rank == 0 else (0, 1, 2)).wait()


@pytest.mark.long(quick=["local"])
def test_members_of_different_groups_name_whom_they_wait_for(run_scenario):
    texts = run_scenario(other_groups, 3, timeout_s=1.0)
    assert all(text.startswith("PeerError: ") for text in texts)
    assert all("all_reduce sum of a" in text for text in texts)


def wrong_message(fabric):
    if fabric.rank == 0:
        fabric.send(1, "x1.1", [torch.ones(1)])
        return fabric.recv(1, "g0.0")
    return fabric.recv(0, "x1.0")


@pytest.mark.long(quick=["local", "shm"])
def test_a_message_with_another_label_is_refused(run_scenario):
    sender, receiver = run_scenario(wrong_message, 2, timeout_s=3.0)
    message = "rank 1 expects x1.0 from rank 0, but its next message is x1.1; messages arrive in the order in which"
    assert receiver.startswith(f"PeerError: {message}")
    assert "stopped because of rank 1: " in sender
    assert message in sender


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda f: f.all_reduce("a", torch.ones(2), (1, 0)), SORTED),
        (lambda f: f.all_reduce("a", torch.ones(2), (0, 2)), SORTED),
        (lambda f: f.all_reduce("a", torch.ones(2) > 0, (0, 1)), "bool cannot be reduced; keep a complex"),
        (lambda f: f.broadcast("a", torch.ones(2), (0, 1), 5), "the root must be a member"),
        (lambda f: f.all_gather("a", torch.ones(2), [0, 2], (0, 1)), "bounds (0, 2) do not split a tensor of shape (2,)"),
        (lambda f: f.all_gather("a", torch.ones(2), [0, 3, 2], (0, 1)), "bounds (0, 3, 2) do not split"),
        (lambda f: f.reduce_scatter("a", torch.ones(2, 2), [0, 2, 4], (0, 1)), "of shape (2, 2) among ranks 0, 1"),
        (lambda f: f.send(0, "x", []), "rank 0 cannot exchange x with rank 0: a peer is another rank below 2"),
        (lambda f: f.recv(2, "x"), "rank 0 cannot exchange x with rank 2: a peer is another rank below 2"),
    ],
)  # fmt: skip
def test_invalid_calls_are_rejected_at_once(ask, text):
    with LocalWorld(2) as world, pytest.raises(ProgramError, match=re.escape(text)):
        world.run(lambda fabric: ask(fabric) if fabric.rank == 0 else None)
