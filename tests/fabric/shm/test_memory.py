"""Shared memory has no name, belongs to one user, and disappears with its last process."""

import contextlib
import fcntl
import os
import re
import resource
import signal
import stat
import weakref
from ctypes import c_int32
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.errors import LaunchError, PeerError
from counterpoint.fabric import rendezvous as meeting
from counterpoint.fabric.shm.memory import RankContext, map_tensor
from counterpoint.fabric.shm.native import native
from counterpoint.rpc import segments
from tests.fabric.run_ranks import on_shm
from tests.other_user import STRANGER, as_user

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}"),
]
PAIR = (0, 1)
PAGE = os.sysconf("SC_PAGE_SIZE")


def test_a_segment_is_private_to_its_user_and_cannot_shrink():
    segment = segments.create_segment("test", 8192, allocate=True)
    assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    segment.close()


def announced(folder, name):
    """What a forged announcement of a segment of one page refers to: a descriptor, and the inode in the announcement."""
    if name in {"another inode", "another size"}:
        segment = segments.create_segment("test", PAGE * (2 if name == "another size" else 1), allocate=True)
        return os.dup(segment.fd), segment.inode + (name == "another inode")
    if name == "a pipe":
        os.mkfifo(folder / name)
        fd = os.open(folder / name, os.O_RDWR)
    elif name == "a file":
        (folder / name).write_bytes(bytes(PAGE))
        fd = os.open(folder / name, os.O_RDWR)
    else:
        with as_user(STRANGER) if name == "another user's memory" else contextlib.nullcontext():
            fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE)
        if name != "memory without seals":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, segments.SEALS)
    return fd, os.fstat(fd).st_ino


FORGED = {
    "another inode": r"it is file \d+ of 4096 bytes, not \d+ of 4096",
    "another size": r"it is file \d+ of 8192 bytes, not \d+ of 4096",
    "a pipe": r"it is file \d+ of 0 bytes",
    "a file": "invalid argument|not sealed",
    "memory without seals": "it is not sealed, and could shrink while it is read",
    "another user's memory": f"it belongs to user {STRANGER}, not 0",
}


@pytest.mark.parametrize("name", FORGED)
def test_only_the_sealed_memory_of_this_user_that_was_announced_is_mapped(tmp_path, name):
    """A rank opened whatever /proc/PID/fd/FD the store named."""
    if "user" in name and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    fd, inode = announced(tmp_path, name)
    handle = [os.getpid(), fd, inode, PAGE, 0]
    with pytest.raises(RuntimeError, match=f"memory of process {os.getpid()}: ({FORGED[name]})"):
        map_tensor(handle, 8, torch.float32)
    store: Any = None
    context = RankContext(store, 1, 2, PAIR, 1.0)
    with pytest.raises(PeerError, match=rf"cannot open the shared memory of process \d+: ({FORGED[name]}).*one user"):
        context._open(dict(zip(("pid", "fd", "inode"), handle, strict=False)), PAGE)
    os.close(fd)


def test_the_native_library_maps_only_the_file_that_was_registered():
    library = native().library
    assert library is not None
    memory = torch.zeros(library.cp_host_bytes(2), dtype=torch.uint8)
    library.cp_format_host(memory.data_ptr(), 2, bytes(16))
    hosts = [
        library.cp_open_host(memory.data_ptr(), rank, 2, os.getpid(), (c_int32 * 2)(-1, -1), 1, 1) for rank in PAIR
    ]
    own, other = (segments.create_segment("test", PAGE, allocate=True) for _ in range(2))
    numbers = [library.cp_register_segment(hosts[0], own.fd, PAGE, 7) for _ in range(2)]
    assert library.cp_map_segment(hosts[1], 0, numbers[0])
    os.dup2(other.fd, own.fd)  # the number of the descriptor is now another file's
    assert not library.cp_map_segment(hosts[1], 0, numbers[1])
    for host in hosts:
        library.cp_close_host(host)


def test_pages_that_are_dropped_take_no_room_and_those_at_the_edges_stay():
    segment = segments.create_segment("test", 8 * PAGE, allocate=True)
    segment.memory[:] = b"x" * (8 * PAGE)
    segments.discard_shared_pages(segment.address + 1, 4 * PAGE)
    assert os.fstat(segment.fd).st_blocks * 512 == 5 * PAGE
    assert segment.memory[: PAGE + 1] == b"x" * PAGE + b"\0"
    assert segment.memory[4 * PAGE - 1 : 4 * PAGE + 1] == b"\0x"
    segment.close()


def test_too_little_memory_is_named_with_what_is_free_and_needed(monkeypatch):
    monkeypatch.setattr(segments, "available_bytes", lambda: 1000)
    with pytest.raises(PeerError, match=r"no shared memory for big: 5000 bytes are needed and 1000 are free"):
        segments.create_segment("big", 5000, allocate=True)


@pytest.mark.parametrize(
    ("version", "files"),
    [
        ("0::/jobs/7", {"jobs/memory.max": "max", "jobs/memory.current": "1",
                        "jobs/7/memory.max": "9000", "jobs/7/memory.current": "8000",
                        "jobs/7/memory.stat": "anon 5000\nactive_file 1000\ninactive_file 2000\n"}),
        ("3:cpu:/\n4:memory:/jobs/7", {"memory/jobs/memory.limit_in_bytes": "6000",
                                       "memory/jobs/memory.usage_in_bytes": "3000",
                                       "memory/jobs/memory.stat": "active_file 9\ntotal_active_file 1000\n"}),
    ],
)  # fmt: skip
def test_what_is_free_is_what_the_control_groups_leave_without_pages_that_can_be_dropped(tmp_path, version, files):
    for name, text in {
        "proc/meminfo": "MemFree: 1 kB\nMemAvailable: 100 kB\n", "proc/self/cgroup": f"{version}\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert segments.available_bytes(tmp_path) == 4000


def short_of_files(fabric):
    """Rank 1 may open no more files; rank 0 waits for it."""
    if fabric.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        fabric.empty(5000, torch.float32)
    fabric.barrier(PAIR)


def test_a_limit_of_the_process_is_named_on_all_ranks():
    message = "rank 1 has no shared memory for counterpoint tensors: 20480 bytes exceed a limit of this process "
    texts = on_shm(short_of_files, 2)
    assert all(message in text and "(too many open files; the limit is 3): raise ulimit -n" in text for text in texts)


def borrow(fabric):
    """A freed tensor's memory is used again; a tensor outlives its fabric."""
    first = fabric.empty(100_000, torch.float32)
    address = first.data_ptr()
    del first
    again = fabric.empty(100_000, torch.float32)
    is_same = again.data_ptr() == address
    again.fill_(fabric.rank + 1.0)
    view = again[10:20]
    fabric.all_reduce("grad", again, PAIR).wait()
    fabric.barrier(PAIR)
    del again
    fabric.close()
    return is_same, view.tolist()


def test_freed_memory_is_used_again_and_tensors_outlive_the_fabric():
    assert on_shm(borrow, 2) == [(True, [3.0] * 10)] * 2


def forget(fabric):
    """Nobody keeps the work or the tensor of a collective for which the other rank has yet to come."""
    fabric.barrier(PAIR)
    if fabric.rank == 1:
        fabric.recv(0, "forgotten")
        fabric.all_reduce("a", torch.ones(9), PAIR).wait()
        return fabric.barrier(PAIR)
    tensor = torch.ones(9)
    seen = weakref.ref(tensor)
    fabric.all_reduce("a", tensor, PAIR)
    del tensor
    lives = seen() is not None
    fabric.send(1, "forgotten", [])
    fabric.barrier(PAIR)
    fabric.close()
    return lives, seen() is None


def test_a_tensor_lives_until_its_collective_ends_without_another_reference():
    """The library wrote into memory that was free."""
    assert on_shm(forget, 2)[0] == (True, True)


def die(fabric):
    """Rank 0 is killed while both work on large tensors."""
    shared = fabric.empty(1_000_000, torch.float32)
    for index in range(100):
        if fabric.rank == 0 and index == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.all_reduce("grad", shared, PAIR).wait()


def test_a_killed_rank_is_named_and_leaves_nothing():
    before = set(Path("/dev/shm").iterdir())
    dead, text = on_shm(die, 2)
    assert dead is None
    assert re.search(r"rank 1 waited 0\.\d s for all_reduce sum of grad with rank 0: rank 0 has ended", text)
    assert set(Path("/dev/shm").iterdir()) == before


def inherit(fabric):
    return [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:counterpoint" in line and "rw-s" not in line
    ]


def test_memory_is_shared_between_ranks_and_no_other_processes():
    assert on_shm(inherit, 2) == [[], []]


def mixed(fabric):
    """One member's tensor is in shared memory, the other's is not."""
    tensor = fabric.empty(300_001, torch.float64) if fabric.rank else torch.empty(300_001, dtype=torch.float64)
    tensor.copy_(torch.arange(300_001))
    fabric.all_reduce("grad", tensor, PAIR).wait()
    return bool(torch.equal(tensor, 2.0 * torch.arange(300_001)))


def test_tensors_inside_and_outside_of_shared_memory_go_together():
    assert on_shm(mixed, 2) == [True, True]


def crossed(fabric):
    """The ranks wait for two collectives of different groups in different orders."""
    both = (
        [
            fabric.all_reduce("pair", torch.ones(3_000_000), PAIR),
            fabric.all_reduce("all", torch.ones(3_000_000), (0, 1, 2)),
        ]
        if fabric.rank < 2
        else [fabric.all_reduce("all", torch.ones(3_000_000), (0, 1, 2))]
    )
    for work in both if fabric.rank else reversed(both):
        work.wait()
    return True


def test_collectives_may_be_waited_for_in_any_order():
    assert on_shm(crossed, 3) == [True] * 3


@pytest.mark.parametrize(
    ("places", "wish", "expected"),
    [
        ([("a", ""), ("a", "")], "auto", True),
        ([("a", ""), ("b", "")], "auto", False),
        ([("a", ""), ("a", "it was not built")], "auto", False),
        ([("a", ""), ("a", "")], "gloo", False),
    ],
)
def test_memory_is_shared_where_all_ranks_can(places, wish, expected):
    assert meeting.shares_memory(places, wish) is expected


def test_a_transport_that_is_unavailable_names_the_ranks():
    with pytest.raises(LaunchError, match=r"rank 1: on another host.*use transport='auto'"):
        meeting.shares_memory([("a", ""), ("b", "")], "shm")
    with pytest.raises(LaunchError, match=r"rank 1: it was not built"):
        meeting.shares_memory([("a", ""), ("a", "it was not built")], "shm")
