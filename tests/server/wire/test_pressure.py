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

from counterpoint.server.wire import connection as connection_module
from counterpoint.server.wire.client import Client
from counterpoint.server.wire.connection import ConnectionLostError
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import parse_place
from counterpoint.server.wire.server import replying, serve
from tests.server.wire.conftest import Records, Relay, called, echo, turns

MIB = 1 << 20
SERVER = """
import os, sys
from counterpoint.server.wire.server import serve
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.key import read_key_from
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import parse_place
with Loop() as loop:
    secret = Secret(read_key_from(0))
    servers = [serve(loop, parse_place(place), secret, lambda connection, letter: None) for place in sys.argv[1:]]
    print(*(server.place for server in servers), flush=True)
    loop.wait_for(lambda: False, 60.0, "the end")
"""


def test_a_server_reads_nothing_more_of_a_peer_that_does_not_take_its_answers(loop, place, secret):
    answered = Records()

    def answer(connection, letter):
        answered.letter(connection, letter)
        connection.send(Letter("answer", {}, [torch.zeros(MIB // 4)]))

    server = serve(loop, place, secret, answer, limits=Limits(unsent_bytes=4 * MIB))
    with Loop() as calling:
        connection, heard = called(calling, place, secret)
        for _ in range(5):
            loop.turn()
            calling.turn()
        for index in range(50):
            connection.send(Letter("ask", {"index": index}))
        turns(loop, 50)
        assert server.connections[0].unsent_bytes < 6 * MIB
        assert 4 <= len(answered.letters) < 16  # 4 MiB here, 4 of the socket's, 4 within a turn
        while len(heard.letters) < 50:
            loop.turn()
            calling.turn()


def test_a_connection_moves_until_the_other_side_has_read_what_was_sent(place, secret):
    with Loop() as serving, Loop() as calling:
        serve(serving, place, secret, Records().letter)
        connection, _ = called(calling, place, secret)
        for _ in range(5):
            serving.turn()
            calling.turn()
        assert not connection.is_moving
        connection.send(Letter("push", {}, [torch.zeros(1000)]))
        turns(calling, 2)
        assert connection.is_moving
        turns(serving, 2)
        assert not connection.is_moving


def test_a_connection_moves_while_half_of_a_letter_has_come():
    heard, secret = Records(), Secret(None)
    with Loop() as serving, Loop() as calling:
        server = serve(serving, parse_place("tcp:127.0.0.1:0"), secret, heard.letter)
        connection, _ = called(calling, server.place, secret)
        for _ in range(5):
            serving.turn()
            calling.turn()
        connection.send(Letter("push", {}, [torch.zeros(4 * MIB)]))
        serving.turn()
        assert server.connections[0].is_moving
        while not heard.letters:
            serving.turn()
            calling.turn()
        assert not server.connections[0].is_moving


def test_a_client_waits_where_the_server_takes_nothing_and_says_so(place, secret):
    with Loop() as serving, Loop() as calling:
        serve(serving, place, secret, replying(echo))
        client = Client(calling, place, secret, Limits(unsent_bytes=MIB, patience_s=0.1))
        for _ in range(5):
            serving.turn()
            calling.turn()
        client.ask(Letter("push", {}, [torch.zeros(8 * MIB)]))
        with pytest.raises(ConnectionLostError, match=r"neither took one of \d+ bytes nor went on .* within 0.1 s"):
            client.ask(Letter("push")).answer(5.0)


@contextmanager
def relayed(serving, secret, heard):
    """A connection that is greeted, and what carries up to so many bytes of it and lets both sides take a turn."""
    server = serve(serving, parse_place("tcp:127.0.0.1:0"), secret, heard.letter, on_end=heard.end)
    with Loop() as calling, Relay(server.place) as relay:
        connection, _ = called(calling, relay.place, secret)
        relay.join()
        for _ in range(10):
            relay.go_on(calling, serving, MIB)
        yield connection, partial(relay.go_on, calling, serving)


def test_a_frame_that_comes_slowly_is_not_given_up_however_little_is_there(clock, still_loop, secret):
    heard = Records()
    with relayed(still_loop, secret, heard) as (connection, go_on):
        connection.send(Letter("push", {}, [torch.zeros(MIB // 16)]))
        while not heard.letters and not heard.ends:
            clock.now_s += 20.0
            go_on(10_000)
    assert (len(heard.letters), heard.ends) == (1, [])


def test_the_rest_of_a_frame_is_heard_of_after_a_turn_that_was_used_up(monkeypatch, still_loop, secret):
    monkeypatch.setattr(connection_module, "TURN_BYTES", 60_000)
    heard = Records()
    with relayed(still_loop, secret, heard) as (connection, go_on):
        connection.send(Letter("push", {}, [torch.zeros(25_000)]))
        for most in (10_000, 66_000, *[MIB] * 4):  # it sleeps for 64 KiB, uses up its turn, and misses less
            go_on(most)
    assert len(heard.letters) == 1


def test_a_peer_that_stops_within_a_frame_is_given_up(clock, still_loop, place, secret):
    heard = Records()
    serve(still_loop, place, secret, heard.letter, on_end=heard.end)
    with Loop() as calling:
        connection, _ = called(calling, place, secret)
        for _ in range(5):
            still_loop.turn()
            calling.turn()
        connection.send(Letter("push", {}, [torch.zeros(8 * MIB)]))
        turns(still_loop, 5)
        clock.now_s += 30.1
        turns(still_loop, 5)
    assert heard.letters == []
    assert "neither took one of 0 bytes nor went on with its frame within 30.0 s" in str(heard.ends[0])


@pytest.fixture
def server_process(secret):
    """Servers in a process of their own: the process, and the places."""
    command = [sys.executable, "-c", SERVER, f"unix:killed-{os.getpid()}", "tcp:127.0.0.1:0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin
        assert started.stdout
        started.stdin.write(secret.key.secret.hex())
        started.stdin.close()
        yield started, [parse_place(place) for place in started.stdout.readline().split()]
        started.kill()


@pytest.mark.process
def test_a_server_that_is_killed_leaves_an_error_and_nothing_else(loop, server_process, secret):
    process, places = server_process
    clients = [Client(loop, place, secret) for place in places]
    questions = [client.ask(Letter("pull")) for client in clients]
    loop.wait_for(lambda: all(client.is_open for client in clients), 10.0, "the greetings")
    process.kill()
    for place, question in zip(places, questions, strict=True):
        with pytest.raises(ConnectionLostError, match="is gone"):
            question.answer(10.0)
        with pytest.raises(ConnectionLostError, match="call again"):
            Client(loop, place, secret).await_open()
    assert f"killed-{os.getpid()}" not in Path("/proc/net/unix").read_text(encoding="utf-8")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_is_not_let_in(loop, place):
    heard = Records()
    serve(loop, place, Secret(None), heard.letter, on_end=heard.end)
    with socket.socket(socket.AF_UNIX) as other:
        os.seteuid(65534)
        try:
            other.connect(f"\0counterpoint/{place.name}")
        finally:
            os.seteuid(0)
        loop.wait_for(lambda: heard.ends, 5.0, "the other user")
    assert "user 65534 is at the other end of a UNIX socket of user 0" in str(heard.ends[0])


def test_closing_a_loop_leaves_no_socket_and_no_thread(place, secret):
    before = sorted(Path("/proc/self/fd").iterdir())
    loop = Loop()
    serve(loop, place, secret, replying(echo))
    loop.start()
    Client(loop, place, secret).await_open()
    loop.close()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "counterpoint wire"]
