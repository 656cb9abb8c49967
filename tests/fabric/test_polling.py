"""Polling a collective, and the key-value store for notices between ranks."""

import pytest
import torch

from counterpoint.errors import PeerError
from counterpoint.fabric.shared_store import SharedStore
from counterpoint.rpc.job_key import JobKey
from tests.fabric.run_ranks import on_local

KEY = JobKey(bytes(32))


def asks(fabric):
    """Rank 0 asks before rank 1 has started, and after."""
    everybody = (0, 1)
    if fabric.rank == 1:
        fabric.recv(0, "rank 0 has asked")
    tensor = torch.ones(40_000, 3).T
    work = fabric.all_reduce("x", tensor, everybody)
    result = []
    if fabric.rank == 0:
        result.append(work.completes_within(0.01))
        fabric.send(1, "rank 0 has asked", [])
    while not work.completes_within(0.5):
        pass
    return [*result, work.completes_within(0.0), tensor.unique().tolist()]


def disagrees(fabric):
    work = fabric.all_reduce(f"x{fabric.rank}", torch.ones(3), (0, 1))
    try:
        while not work.completes_within(0.5):
            pass
    except PeerError as error:
        return str(error).split(":")[0]


@pytest.mark.long(quick=["gloo"])
def test_a_collective_is_not_complete_before_all_have_started_it(processes):
    assert processes(asks, 2) == [[False, True, [2.0]], [True, [2.0]]]


def test_a_transport_that_cannot_poll_waits():
    def waits(fabric):
        return fabric.all_reduce("x", torch.ones(2), (0, 1)).completes_within(0.0)

    assert on_local(waits, 2) == [True, True]


@pytest.mark.long(quick=["shm", "process_group"])
def test_polling_raises_a_mismatch(processes):
    assert processes(disagrees, 2) == ["ranks 0 and 1 disagree on collective 0 of their group"] * 2


def test_values_in_a_shared_store_are_readable_until_they_are_deleted():
    server = SharedStore.serve("127.0.0.1", KEY)
    client = SharedStore.connect("127.0.0.1", server.port, KEY, 5.0)
    client.set("here", "ü")
    assert (server.get("here"), server.get("there"), server.increment("n"), client.increment("n")) == ("ü", None, 1, 2)
    server.delete("here")
    assert client.get("here") is None
    assert not client.is_lost
