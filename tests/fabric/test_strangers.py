"""Strangers at the ports of a job: another user, another key, torch's own client, a slow one, and many at once."""

import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from unittest.mock import ANY

import pytest
import torch
from torch.distributed import DistError

from counterpoint.errors import LaunchError, PeerError
from counterpoint.fabric.c10d import TCPStore
from counterpoint.fabric.gloo.pair_proof import make_proof, prove_pairs
from counterpoint.fabric.key_value_store import STORE_JOB, KeyValueTable, RemoteTable
from counterpoint.fabric.rendezvous import Address, RendezvousStore, connect, connect_store, store_address
from counterpoint.rpc.handshake import HELLO, JobCredentials
from counterpoint.rpc.job_key import JobKey, read_key
from counterpoint.rpc.records import DIGEST_BYTES
from tests.fabric.run_ranks import on_gloo
from tests.other_user import as_root
from tests.ps.process.conftest import wait_until

KEY, OTHER_KEY = JobKey(bytes(32)), JobKey(bytes([1] * 32))
PYTHON = next((path for path in ("/usr/bin/python3",) if Path(path).exists()), sys.executable)  # for other users


@pytest.fixture
def store():
    served = RendezvousStore("127.0.0.1", KEY)
    yield served
    served.close()


def client(store, key=KEY, timeout_s=5.0):
    return connect_store(1, store.address, key, timeout_s)


def test_a_rank_with_the_key_reads_and_writes(store):
    first, second = client(store), client(store).with_prefix("job")
    second.set("n", "ü")
    assert (first.get("job/n"), first.check(["job/n", "m"]), first.add("i", 2), first.add("i", -3)) == (
        "ü".encode(),
        False,
        2,
        -1,
    )
    assert (first.compare_set("s", "", "1"), first.compare_set("s", "", "2"), first.delete_key("s")) == (
        b"1",
        b"1",
        True,
    )


@pytest.mark.long
def test_torchs_client_reads_and_writes_nothing(store):
    rank = client(store)
    rank.set("here", "1")
    with pytest.raises(DistError):
        TCPStore("127.0.0.1", store.address.port, None, False, timedelta(seconds=1), wait_for_workers=False)
    assert rank.compare_set("stopped", "", "mine") == b"mine"


def test_a_rank_with_another_key_is_told_at_once(store):
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 was answered at 127\.0\.0\.1:\d+, but .* different job keys"):
        client(store, OTHER_KEY, 30.0)
    assert time.monotonic() - began < 5


@pytest.mark.long(quick=["key0"])
@pytest.mark.parametrize("key", [OTHER_KEY, None])
def test_a_rank_with_another_key_is_named_to_those_that_wait_for_it(store, key):
    with pytest.raises(PeerError):
        client(store, key, 30.0)
    with pytest.raises(PeerError) as caught:
        connect(0, 2, store.address, key=KEY, timeout_s=0.2)
    assert re.search(
        r"rank 0 waited 0\.\d s at .* for rank 1 of 2; .*; refused meanwhile: client 127\.0\.0\.1:\d+: "
        r"(the handshake failed: .*give both the key of one job|this side has a job key and the peer has none; give all )",
        str(caught.value),
    )


@pytest.mark.long(quick=["None-other0-but rank 0 has a job key and this rank has none"])
@pytest.mark.parametrize(
    ("own", "other", "text"),
    [
        (None, KEY, "but rank 0 has a job key and this rank has none"),
        (KEY, None, "but this rank has a job key and rank 0"),
    ],
)
def test_a_rank_learns_soon_that_only_one_side_has_a_key(own, other, text):
    served = RendezvousStore("127.0.0.1", other)
    address = replace(served.address, store_owner="rank 0")
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"^rank 1 was answered at .*, {text}.*; give all ranks the key of one job by"):
        connect_store(1, address, own, 30.0)
    assert time.monotonic() - began < 9
    wait_until(lambda: len(served._server.table.refusals) == 1, 5.0)
    served.close()


def test_a_host_that_does_not_exist_is_told_at_once():
    with pytest.raises(LaunchError, match=r"store is unknown here: tcp:no-such-host\.invalid:1234 cannot be resolved"):
        connect_store(1, Address("no-such-host.invalid", 1234), KEY, 30.0)


def test_a_program_that_never_answers_is_not_called_absent():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(
            PeerError, match=r"rank 1 was answered at .*'s rendezvous store within 0.* has not completed the"
        ),
    ):
        connect_store(1, Address("127.0.0.1", silent.getsockname()[1]), KEY, 0.3)


def test_a_store_beyond_loopback_needs_a_key():
    with pytest.raises(
        LaunchError, match=r"this rank, on .*, has no job key, and 192\.0\.2\.1:1234 is beyond loopback.*--key-file"
    ):
        connect_store(0, Address("192.0.2.1", 1234), None, 1.0)


def record_handshake(store):
    """Return what a rank sends to the store, seen by a program in between."""
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def forward():
            rank, _ = middle.accept()
            with rank, socket.create_connection(("127.0.0.1", store.address.port)) as server:
                for size in (HELLO.size, DIGEST_BYTES):
                    sent.append(rank.recv(size, socket.MSG_WAITALL))
                    server.sendall(sent[-1])
                    rank.sendall(server.recv(size))
                rank.recv(1)  # until the rank has disconnected

        thread = Thread(target=forward)
        thread.start()
        connect_store(1, Address("127.0.0.1", middle.getsockname()[1]), KEY, 5.0)
        thread.join()
    return sent


def test_a_recorded_handshake_is_of_no_use(store):
    hello, proof = record_handshake(store)
    with socket.create_connection(("127.0.0.1", store.address.port), 5.0) as replay:
        replay.sendall(hello)
        replay.recv(HELLO.size, socket.MSG_WAITALL)
        replay.sendall(proof)
        assert replay.recv(1000) == bytes(32)
        assert replay.recv(1000) == b""


def test_a_rank_joins_during_a_flood_of_connections_that_say_nothing(store):
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", store.address.port)))
        assert client(store).add("n", 1) == 1


CALLER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect("\\0counterpoint/rendezvous-0-" + sys.argv[1])
    stranger.settimeout(5)
    try:
        stranger.sendall(b"CPWS" + bytes(36))
        print(stranger.recv(100))
    except ConnectionError:
        print(b"")
"""


def run_as_nobody(script, *arguments):
    return subprocess.run(
        [PYTHON, "-c", script, *arguments], user=65534, group=65534, extra_groups=[], capture_output=True, text=True,
        check=False, cwd="/",
    )  # fmt: skip


@as_root
def test_another_user_cannot_use_a_store_without_a_key():
    store = RendezvousStore("127.0.0.1")
    answer = run_as_nobody(CALLER, str(store.address.port))
    assert answer.stdout == "b''\n", answer.stderr
    assert connect_store(1, store.address, None, 5.0).add("n", 1) == 1
    store.close()


def test_values_beyond_the_limits_are_refused():
    table = KeyValueTable()
    with pytest.raises(PeerError, match="a value of 600000 bytes; the store takes"):
        table.set("k", bytes(600_000))
    for value in (b"x", b"9" * 5000):
        table.set("k", value)
        with pytest.raises(PeerError, match="not a number"):
            table.add("k", 1)


def test_a_malformed_request_changes_nothing(store):
    table = RemoteTable(store_address(store.address, KEY), JobCredentials(KEY, STORE_JOB), 5.0)
    with pytest.raises(DistError):
        table._request("set", key="k")
    assert not client(store).check(["k"])


def test_a_key_file_of_others_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text("00" * 32)
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="may be read by others"):
        read_key(path)


def proves(fabric):
    """Rank 1 takes part in the connection, but does not know the secret."""
    gloo = fabric._connections.open("probe", (0, 1))
    secret = b"a" * 32 if fabric.rank == 0 else b"b" * 32
    prove_pairs(gloo, secret, "again", (0, 1), fabric.rank, 5.0)


@pytest.mark.process
def test_a_gloo_connection_whose_end_does_not_know_the_secret_is_not_used():
    first, second = on_gloo(proves, 2)
    assert first.startswith("PeerError: the connection to rank 1 cannot be trusted: ")
    assert second.startswith("PeerError: the connection to rank 0 cannot be trusted: ")


def test_a_proof_is_for_one_direction_of_one_connection():
    proofs = {
        make_proof(KEY.secret, name, (0, 1), sender, 1 - sender, nonces)
        for name in ("mail", "data")
        for sender in (0, 1)
        for nonces in (bytes(64), bytes([1] * 64))
    }
    assert len(proofs) == 8


STRANGER = """
import os, re, select, socket, time
ports = {int(row.split()[1].rpartition(":")[2], 16) for row in open("/proc/net/tcp").readlines()[1:] if row.split()[3] == "0A"}
names = re.findall(r"@(counterpoint/\\S+)", open("/proc/net/unix").read())
received, open_sockets = b"", []
places = [(socket.AF_INET, ("127.0.0.1", port)) for port in ports]
for family, place in places + [(socket.AF_UNIX, "\\0" + name) for name in names]:
    stranger = socket.socket(family)
    stranger.settimeout(0.2)
    try:
        stranger.connect(place)
        stranger.sendall(b"CPWS" + bytes(60))
        open_sockets.append(stranger)
    except OSError:
        stranger.close()
connected, stop_s = len(open_sockets), time.monotonic() + 1
while open_sockets and time.monotonic() < stop_s:
    for stranger in select.select(open_sockets, [], [], 0.1)[0]:
        try:
            answer = stranger.recv(1000)
        except OSError:
            answer = b""
        received += answer
        if not answer:
            open_sockets.remove(stranger)
print(os.getuid(), connected > 0, b"here" in received or b"pid" in received)
"""


def is_visited(fabric):
    """Another user connects to every port of the host while the ranks are connected."""
    answer = ""
    if fabric.rank == 0:
        answer = run_as_nobody(STRANGER).stdout
    fabric.barrier((0, 1))
    values = torch.arange(1000, dtype=torch.float64).sqrt() / (fabric.rank + 3)
    fabric.all_reduce("values", values, (0, 1)).wait()
    expected = torch.arange(1000, dtype=torch.float64).sqrt()
    return [answer, torch.equal(values, expected / 3 + expected / 4), fabric.abort_reason()]


@pytest.mark.long(quick=["shm"])
@pytest.mark.process
@as_root
def test_another_user_at_all_ports_of_a_job_changes_no_bit_of_it(local_processes):
    first, second = local_processes(is_visited, 2)
    assert first == [ANY, True, None]
    assert first[0] in {"65534 True False\n", "65534 False False\n"}
    assert second == ["", True, None]
