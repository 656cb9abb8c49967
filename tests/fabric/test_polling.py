"""A collective can be asked whether it is complete; a board has words for those that wait."""

import torch

from counterpoint.errors import PeerError
from counterpoint.fabric.shared_store import SharedStore
from tests.fabric.run_ranks import on_local


def asks(fabric):
    """Rank 0 asks before rank 1 has started, and after."""
    everybody = (0, 1)
    if fabric.rank == 1:
        fabric.recv(0, "rank 0 has asked")
    tensor = torch.ones(40_000, 3).T
    work = fabric.all_reduce("x", tensor, everybody)
    found = []
    if fabric.rank == 0:
        found.append(work.completes_within(0.01))
        fabric.send(1, "rank 0 has asked", [])
    while not work.completes_within(0.5):
        pass
    return [*found, work.completes_within(0.0), tensor.unique().tolist()]


def disagrees(fabric):
    work = fabric.all_reduce(f"x{fabric.rank}", torch.ones(3), (0, 1))
    try:
        while not work.completes_within(0.5):
            pass
    except PeerError as error:
        return str(error).split(":")[0]


def test_a_collective_is_not_complete_before_all_have_started_it(processes):
    assert processes(asks, 2) == [[False, True, [2.0]], [True, [2.0]]]


def test_a_transport_that_cannot_tell_waits():
    def waits(fabric):
        return fabric.all_reduce("x", torch.ones(2), (0, 1)).completes_within(0.0)

    assert on_local(waits, 2) == [True, True]


def test_whoever_asks_is_told_of_a_disagreement(processes):
    assert processes(disagrees, 2) == ["ranks 0 and 1 disagree on collective 0 of their group"] * 2


def test_words_on_a_board_are_read_by_others_until_they_are_cleared():
    kept = SharedStore.serve("127.0.0.1", 5.0)
    guest = SharedStore.connect("127.0.0.1", kept.port, 5.0)
    guest.set("here", "ü")
    assert (kept.get("here"), kept.get("there"), kept.increment("n"), guest.increment("n")) == ("ü", None, 1, 2)
    kept.delete("here")
    assert guest.get("here") is None
    assert not guest.is_lost
