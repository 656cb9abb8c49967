"""Nothing grows without bound and nothing waits for ever: full connections, peers that stop, processes that die."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from counterpoint.rpc import connection as connection_module
from counterpoint.rpc.address import parse_address
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.connection import ConnectionLostError
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcLimits, RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.listener import listen, request_handler
from tests.other_user import STRANGER, as_root, as_user
from tests.rpc.conftest import Records, Relay, connect_and_record, echo, run_loop

MIB = 1 << 20
SERVER = """
import os, sys
from counterpoint.rpc.listener import serve
from counterpoint.rpc.handshake import Secret
from counterpoint.rpc.job_key import read_key_from
from counterpoint.rpc.event_loop import Loop
from counterpoint.rpc.address import parse_place
with Loop() as loop:
    secret = Secret(read_key_from(0))
    servers = [serve(loop, parse_place(place), secret, lambda connection, message: None) for place in sys.argv[1:]]
    print(*(server.place for server in servers), flush=True)
    loop.wait_for(lambda: False, 60.0, "the end")
"""


def test_a_server_reads_nothing_more_of_a_peer_that_does_not_take_its_answers(loop, place, secret):
    answered = Records()

    def answer(connection, message):
        answered.message(connection, message)
        connection.send(RpcMessage("answer", {}, [torch.zeros(MIB // 4)]))

    server = listen(loop, place, secret, answer, limits=RpcLimits(unsent_bytes=4 * MIB))
    with EventLoop() as calling:
        connection, received = connect_and_record(calling, place, secret)
        for _ in range(5):
            loop.run_once()
            calling.run_once()
        for index in range(50):
            connection.send(RpcMessage("ask", {"index": index}))
        run_loop(loop, 50)
        assert server.connections[0].unsent_bytes < 6 * MIB
        assert 4 <= len(answered.messages) < 16  # 4 MiB here, 4 of the socket's, 4 within a turn
        while len(received.messages) < 50:
            loop.run_once()
            calling.run_once()


def test_a_connection_moves_until_the_other_side_has_read_what_was_sent(place, secret):
    with EventLoop() as serving, EventLoop() as calling:
        listen(serving, place, secret, Records().message)
        connection, _ = connect_and_record(calling, place, secret)
        for _ in range(5):
            serving.run_once()
            calling.run_once()
        assert not connection.has_data_in_flight
        connection.send(RpcMessage("push", {}, [torch.zeros(1000)]))
        run_loop(calling, 2)
        assert connection.has_data_in_flight
        run_loop(serving, 2)
        assert not connection.has_data_in_flight


def test_a_connection_moves_while_half_of_a_message_has_come(secret):
    received = Records()
    with EventLoop() as serving, EventLoop() as calling:
        server = listen(serving, parse_address("tcp:127.0.0.1:0"), secret, received.message)
        connection, _ = connect_and_record(calling, server.address, secret)
        for _ in range(5):
            serving.run_once()
            calling.run_once()
        connection.send(RpcMessage("push", {}, [torch.zeros(4 * MIB)]))
        serving.run_once()
        assert server.connections[0].has_data_in_flight
        while not received.messages:
            serving.run_once()
            calling.run_once()
        assert not server.connections[0].has_data_in_flight


def test_a_client_waits_where_the_server_takes_nothing_and_reports_it(place, secret):
    with EventLoop() as serving, EventLoop() as calling:
        listen(serving, place, secret, request_handler(echo))
        client = RpcClient(calling, place, secret, RpcLimits(unsent_bytes=MIB, idle_timeout_s=0.1))
        for _ in range(5):
            serving.run_once()
            calling.run_once()
        client.request(RpcMessage("push", {}, [torch.zeros(8 * MIB)]))
        with pytest.raises(
            ConnectionLostError, match=r"neither received one of \d+ bytes nor continued .* within 0.1 s"
        ):
            client.request(RpcMessage("push")).wait(5.0)


@contextmanager
def relayed(serving, secret, received):
    """A connection that is greeted, and what carries up to so many bytes of it and lets both sides take a turn."""
    server = listen(serving, parse_address("tcp:127.0.0.1:0"), secret, received.message, on_end=received.end)
    with EventLoop() as calling, Relay(server.address) as relay:
        connection, _ = connect_and_record(calling, relay.address, secret)
        relay.join()
        for _ in range(10):
            relay.forward_bytes(calling, serving, MIB)
        yield connection, partial(relay.forward_bytes, calling, serving)


def test_a_frame_that_comes_slowly_is_not_given_up_however_little_is_there(clock, still_loop, secret):
    received = Records()
    with relayed(still_loop, secret, received) as (connection, forward_bytes):
        connection.send(RpcMessage("push", {}, [torch.zeros(MIB // 16)]))
        while not received.messages and not received.ends:
            clock.now_s += 20.0
            forward_bytes(10_000)
    assert (len(received.messages), received.ends) == (1, [])


def test_the_rest_of_a_frame_is_read_in_the_next_loop_iteration(monkeypatch, still_loop, secret):
    monkeypatch.setattr(connection_module, "BYTES_PER_TURN", 60_000)
    received = Records()
    with relayed(still_loop, secret, received) as (connection, forward_bytes):
        connection.send(RpcMessage("push", {}, [torch.zeros(25_000)]))
        for most in (10_000, 66_000, *[MIB] * 4):  # it sleeps for 64 KiB, uses up its turn, and misses less
            forward_bytes(most)
    assert len(received.messages) == 1


def test_a_peer_that_stops_within_a_frame_is_given_up(clock, still_loop, place, secret):
    received = Records()
    listen(still_loop, place, secret, received.message, on_end=received.end)
    with EventLoop() as calling:
        connection, _ = connect_and_record(calling, place, secret)
        for _ in range(5):
            still_loop.run_once()
            calling.run_once()
        connection.send(RpcMessage("push", {}, [torch.zeros(8 * MIB)]))
        run_loop(still_loop, 5)
        clock.now_s += 30.1
        run_loop(still_loop, 5)
    assert received.messages == []
    assert "neither received one of 0 bytes nor continued its frame within 30.0 s" in str(received.ends[0])


@pytest.fixture
def server_process(secret):
    """Servers in a process of their own: the process, and the places."""
    command = [sys.executable, "-c", SERVER, f"unix:killed-{os.getpid()}", "tcp:127.0.0.1:0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin
        assert started.stdout
        started.stdin.write(secret.key.secret.hex())
        started.stdin.close()
        yield started, [parse_address(place) for place in started.stdout.readline().split()]
        started.kill()


@pytest.mark.long
@pytest.mark.process
def test_a_server_that_is_killed_leaves_an_error_and_nothing_else(loop, server_process, secret):
    process, places = server_process
    clients = [RpcClient(loop, place, secret) for place in places]
    questions = [client.request(RpcMessage("pull")) for client in clients]
    loop.wait_for(lambda: all(client.is_open for client in clients), 10.0, "the greetings")
    process.kill()
    for place, question in zip(places, questions, strict=True):
        with pytest.raises(ConnectionLostError, match="is gone"):
            question.wait(10.0)
        with pytest.raises(ConnectionLostError, match="reconnect"):
            RpcClient(loop, place, secret).wait_open()
    assert f"killed-{os.getpid()}" not in Path("/proc/net/unix").read_text(encoding="utf-8")


@as_root
def test_another_user_of_the_host_is_not_let_in(loop, place):
    received = Records()
    listen(loop, place, JobCredentials(None), received.message, on_end=received.end)
    with socket.socket(socket.AF_UNIX) as other:
        with as_user(STRANGER):
            other.connect(f"\0counterpoint/{place.name}")
        loop.wait_for(lambda: received.ends, 5.0, "the other user")
    assert "the peer of a UNIX socket runs as user 65534, not 0" in str(received.ends[0])


def test_closing_a_loop_leaves_no_socket_and_no_thread(place, secret):
    before = sorted(Path("/proc/self/fd").iterdir())
    loop = EventLoop()
    listen(loop, place, secret, request_handler(echo))
    loop.start()
    RpcClient(loop, place, secret).wait_open()
    loop.close()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "counterpoint rpc"]
