"""A loop whose clock stands still until a test moves it, and servers and connections in it."""

import os
import socket
from contextlib import suppress

import pytest

from counterpoint.rpc.address import parse_address
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.connection import connect
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import new_key
from counterpoint.rpc.listener import listen, request_handler

PLACES = {"unix": f"unix:test-{os.getpid()}", "tcp": "tcp:127.0.0.1:0"}


class Clock:
    """Echo each message."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Records:
    """The messages received over a connection, and how it ended."""

    def __init__(self):
        self.messages = []
        self.ends = []

    def message(self, connection, message):
        self.messages.append(message)

    def end(self, connection, error):
        self.ends.append(error)


class Relay:
    """A relay between a client and a server that forwards a given number of bytes."""

    def __init__(self, place):
        self.target = place.host, place.port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = parse_address(f"tcp:127.0.0.1:{self.listener.getsockname()[1]}")
        self.ends = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in (self.listener, *self.ends):
            end.close()

    def join(self):
        """The client has called; so is the server."""
        self.ends = [self.listener.accept()[0], socket.create_connection(self.target)]
        for end in self.ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def forward_bytes(self, calling, serving, most):
        """Both loops turn once, and so much of what was said has come, of either side."""
        calling.run_once()
        for source, target in (self.ends, self.ends[::-1]):
            with suppress(BlockingIOError):
                target.sendall(source.recv(most, socket.MSG_DONTWAIT))
        serving.run_once()


@pytest.fixture
def loop():
    with EventLoop() as opened:
        yield opened


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def still_loop(clock):
    with EventLoop(clock) as opened:
        yield opened


@pytest.fixture(params=[("unix", True), ("unix", False), ("tcp", True)], ids=str)
def place_and_secret(request):
    kind, is_keyed = request.param
    return parse_address(PLACES[kind]), JobCredentials(new_key() if is_keyed else None)


@pytest.fixture
def secret():
    return JobCredentials(new_key())


@pytest.fixture
def place():
    return parse_address(PLACES["unix"])


def echo(message):
    return RpcMessage("echo", message.fields, message.tensors)


@pytest.fixture
def asking(loop, place_and_secret):
    """A client of a server that answers with what it was asked."""
    place, secret = place_and_secret
    server = listen(loop, place, secret, request_handler(echo))
    with RpcClient(loop, server.address, secret) as client:
        yield client


def run_loop(loop, count=20):
    for _ in range(count):
        loop.run_once()


def connect_and_record(loop, place, secret, **options):
    """A connection to the address, and the messages it receives."""
    records = Records()
    return connect(loop, place, secret, records.message, on_end=records.end, **options), records
