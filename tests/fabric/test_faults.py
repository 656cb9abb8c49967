"""Ranks that are late, dead or never started: the others name them within the timeout, and leave nothing behind."""

import os
import re
import signal
import socket
import threading
import time
from contextlib import closing
from functools import partial
from operator import gt
from pathlib import Path

import pytest
import torch

from counterpoint.errors import LaunchError, PeerError
from counterpoint.fabric import Address, connect
from counterpoint.fabric.c10d import TCPStore
from counterpoint.fabric.rendezvous import bind_port
from tests.fabric.run_ranks import on_gloo, on_hosts, resources

pytestmark = pytest.mark.process
TRIO = (0, 1, 2)


def fail(how, fabric):
    """Rank 1 waits in some way for rank 0, which dies, or does something else for longer than the deadline."""
    fabric.connect_groups([(0, 1)])
    fabric.barrier((0, 1))
    if fabric.rank == 0:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.sigtimedwait([signal.SIGUSR1], 1.5)


def in_recv(how, fabric):
    fail(how, fabric)
    return fabric.recv(0, "x1.0") if fabric.rank else None


def in_any(how, fabric):
    fail(how, fabric)
    return fabric.recv_any([0])[1] if fabric.rank else None


def in_sum(how, fabric):
    fail(how, fabric)
    return fabric.all_reduce("grad0", torch.ones(1000), (0, 1)).wait() if fabric.rank else None


WAITS = {in_recv: "x1.0 with rank 0", in_any: "any message with rank 0", in_sum: "all_reduce sum of grad0 with rank 0"}


@pytest.mark.long(quick=["shm-in_sum", "gloo-in_recv", "process_group-in_any"])
@pytest.mark.serial
@pytest.mark.parametrize("wait", WAITS)
def test_a_late_peer_is_named_when_the_deadline_has_passed(processes, wait):
    began = time.monotonic()
    text = processes(partial(wait, "is late"), 2, timeout_s=0.6)[1]
    result = re.match(
        rf"PeerError: rank 1 waited (\d\.\d) s for {WAITS[wait]}: the timeout of 0\.6 s has passed; ", text
    )
    assert result is not None, text
    assert 0.6 <= float(result[1]) < 5  # as long as it was: later than asked for where a core is late
    assert time.monotonic() - began < 10


@pytest.mark.long(quick=["gloo-in_sum"])
@pytest.mark.parametrize("wait", [in_recv, in_sum])
def test_a_dead_peer_is_noticed_and_named_at_once(local_processes, wait):
    dead, text = local_processes(partial(wait, "dies"), 2, timeout_s=10.0)
    assert dead is None
    assert re.match(rf"PeerError: rank 1 waited 0\.\d s for {WAITS[wait]}: rank 0 has ended; look at ", text)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [in_recv, in_sum])
def test_a_dead_only_peer_is_detected_at_once(wait):
    dead, text = on_hosts((0, 1), partial(wait, "dies"), 2, timeout_s=10.0)
    assert dead is None
    assert re.match(rf"PeerError: rank 1 waited 0\.\d s for {WAITS[wait]}: the connection was lost \(", text)


def add_up_for_ever(rank, address, transport):
    inner = connect(rank, 3, address, job="inner", timeout_s=3.0, transport=transport)
    while True:
        inner.all_reduce("a", torch.ones(1000), TRIO).wait()


def killed_in_a_handshake(transport, after_s, fabric):
    """Rank 0 is killed so long after all have begun to connect; the errors of the others, and how long they waited."""
    port = fabric.gather_values("port", free_port(), TRIO)[0]
    if fabric.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, after_s)
    began = time.monotonic()
    with pytest.raises(PeerError) as failure:
        add_up_for_ever(fabric.rank, Address("127.0.0.1", port), transport)
    return str(failure.value), time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.004, 0.008, 0.012, 0.016, 0.02, 0.03, 0.05])
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_rank_that_is_killed_while_all_connect_is_an_error_that_names_it(transport, after_s):
    """An error of torch's store came out where the one that kept it was killed."""
    dead, *errors = on_gloo(partial(killed_in_a_handshake, transport, after_s), 3)
    assert dead is None
    assert all("rank 0" in text and seconds < 8 for text, seconds in errors), errors


def cascade(fabric):
    """Rank 2 gives a reason and stops; rank 1 waits for it, and rank 0 for rank 1."""
    if fabric.rank == 2:
        fabric.abort("the loss is nan in step 7")
        return None
    return fabric.recv(fabric.rank + 1, "x")


@pytest.mark.long(quick=["shm"])
def test_the_first_error_reaches_ranks_that_wait_indirectly(processes):
    texts = processes(cascade, 3, timeout_s=10.0)
    assert texts[0].startswith("PeerError: rank 0 waited ")
    assert all("stopped because of rank 2: the loss is nan in step 7" in text for text in texts[:2])


@pytest.mark.long(quick=["process_group"])
def test_a_rank_that_never_arrives_is_named(processes):
    texts = processes(resources_of, 4, timeout_s=1.0, present=[0, 2])
    assert texts[1] is texts[3] is None
    for rank in (0, 2):
        assert re.match(rf"PeerError: rank {rank} waited [01]\.\d s at 127.0.0.1:", texts[rank])
        assert " for ranks 1, 3 of 4; all ranks must arrive within the timeout" in texts[rank]


def resources_of(_):
    return resources()


def resources_soon(expected):
    """The same after up to 50 looks: the system may list a thread a moment longer than it can be joined."""
    pause = threading.Event()
    for _ in range(50):
        if not any(map(gt, resources(), expected)):
            break
        pause.wait(0.02)
    return resources()


def resource_names():
    """Names of the threads, and what is open, of this process: for the error of a test that counts them."""
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sorted(threads), sorted(files)


def come_and_go(transport, fabric):
    """A second fabric in this process, opened and closed with messages and collectives under way."""
    fabric.barrier(TRIO)
    before = resources()
    for generation in (1, 2):
        port = fabric.gather_values("port", free_port(), TRIO)[0]
        inner = connect(
            fabric.rank, 3, Address("127.0.0.1", port), job="inner", generation=generation, transport=transport
        )
        inner.all_reduce("a", torch.ones(10), TRIO).wait()
        fabric.barrier(TRIO)
        if fabric.rank and generation == 2:
            inner.all_reduce("never", torch.ones(10), (1, 2))
            inner.all_reduce("never", torch.ones(10), TRIO)
        fabric.barrier(TRIO)  # rank 0, which stores where members listen, closes when all collectives are under way
        inner.close()
        inner.close()
        after = resources_soon(before)
    more = [late - early for late, early in zip(after, before, strict=True)]
    return more, resource_names() if max(more) > 0 else None


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


@pytest.mark.long(quick=["shm-auto"])
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_closed_fabric_leaves_no_thread_and_no_file(processes, transport):
    more = processes(partial(come_and_go, transport), 3)
    assert not [answer for answer in more if isinstance(answer, str)]
    assert all(max(counts) <= 0 for counts, _ in more), more


def forgotten(fabric):
    """The process ends with a collective under way and the fabric not closed: closing does nothing any more."""
    fabric.all_reduce("never", torch.ones(10), (0, 1))
    if fabric.rank == 0:
        fabric.close = lambda: None
        return "ended"
    return fabric.recv(0, "x")


@pytest.mark.long(quick=["shm"])
def test_a_process_can_end_with_a_collective_under_way(processes):
    began = time.monotonic()
    ended, text = processes(forgotten, 2, timeout_s=10.0)
    assert ended == "ended"
    assert "rank 1 waited " in text
    assert time.monotonic() - began < 8


def test_a_port_in_use_is_an_error_of_the_launch():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 0 cannot listen on 127.0.0.1:{port}: address already in use; "):
            connect(0, 2, Address("127.0.0.1", port), timeout_s=1.0)


def guests(store_port, fabric):
    """All ranks are guests of a store that somebody else keeps."""
    address = Address("127.0.0.1", store_port, store_owner="launcher")
    inner = connect(fabric.rank, 2, address, job="guests", timeout_s=10.0)
    try:
        return inner.gather_values("rank", inner.rank, (0, 1))
    finally:
        inner.close()


@pytest.mark.long(quick=["gloo"])
def test_ranks_can_meet_at_their_launchers_store(processes):
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    assert processes(partial(guests, store.port), 2) == [[0, 1]] * 2


def twice(fabric):
    """Both ranks of the outer fabric say they are rank 1 of an inner one."""
    port = fabric.gather_values("port", free_port(), (0, 1))[0]
    if fabric.rank == 0:
        return None
    store = TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    address = Address("127.0.0.1", store.port, store_owner="launcher")
    texts = []
    for _ in range(2):
        try:
            connect(1, 2, address, job="inner", timeout_s=0.1)
        except PeerError as error:
            texts.append(str(error))
    return texts


@pytest.mark.long(quick=["process_group"])
def test_a_rank_that_connects_twice_is_rejected(processes):
    late, second = processes(twice, 2)[1]
    assert "for rank 0 of 2" in late
    assert second.startswith("rank 1 has connected twice at 127.0.0.1:")


def nobody(fabric):
    began = time.monotonic()
    with pytest.raises(PeerError) as failure:
        connect(1, 2, Address("127.0.0.1", free_port()), timeout_s=0.5)
    return str(failure.value), time.monotonic() - began


@pytest.mark.long(quick=["process_group"])
def test_an_address_without_a_listener_is_named(processes):
    """It took torch's store up to three times as long to see it."""
    text, seconds = processes(nobody, 2)[1]
    assert seconds < 1.5
    assert text.startswith("rank 1 could not connect to 127.0.0.1:")
    assert " within 0.5 s; rank 0 serves the rendezvous store there" in text
    assert text.endswith("all ranks have its address and port (MASTER_ADDR, MASTER_PORT)")


def test_an_address_of_another_machine_is_no_taken_port():
    with pytest.raises(
        LaunchError, match=r"^rank 0 cannot listen on 192\.0\.2\.1:29500: .* give one of this machine, or"
    ):
        bind_port(Address("192.0.2.1", 29500))
