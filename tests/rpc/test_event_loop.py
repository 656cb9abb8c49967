"""A loop is turned by one thread at a time: by whoever waits, and by its own when nobody does."""

import threading

import pytest

from counterpoint.rpc.connection import connect
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.listener import listen, request_handler
from tests.rpc.conftest import echo

NUM_ASKED = 10


class Heard:
    """In which threads answers were heard."""

    def __init__(self):
        self.threads = []
        self.is_enough = threading.Event()

    def message(self, connection, message):
        self.threads.append(threading.current_thread())
        if len(self.threads) == NUM_ASKED:
            self.is_enough.set()


@pytest.fixture
def linked(place, secret):
    """A loop with a thread of its own, a connection in it to somebody who answers, and what is heard."""
    heard = Heard()
    with EventLoop() as serving, EventLoop() as calling:
        server = listen(serving, place, secret, request_handler(echo))
        serving.start()
        calling.start()
        yield calling, connect(calling, server.address, secret, heard.message), heard


def ask(loop, connection, heard):
    """Ask once, and wait for the answer."""
    count = len(heard.threads) + 1
    connection.send(RpcMessage("ask"))
    loop.wait_for(lambda: len(heard.threads) == count, 10.0, "an answer")


def test_an_answer_is_heard_by_the_thread_that_waits_for_it(linked):
    loop, connection, heard = linked
    for _ in range(NUM_ASKED):
        ask(loop, connection, heard)
    assert threading.current_thread() in heard.threads


def test_an_answer_that_nobody_waits_for_is_heard_all_the_same(linked):
    loop, connection, heard = linked
    for _ in range(NUM_ASKED - 1):
        ask(loop, connection, heard)
    connection.send(RpcMessage("ask"))
    assert heard.is_enough.wait(10.0)
    assert heard.threads[-1] is not threading.current_thread()


def test_several_threads_that_wait_are_all_told(linked):
    loop, connection, heard = linked
    waiting = [threading.Thread(target=ask_until, args=(loop, heard)) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for _ in range(NUM_ASKED):
        connection.send(RpcMessage("ask"))
    for thread in waiting:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in waiting)


def ask_and_fail(loop, connection):
    with loop.cork():
        connection.send(RpcMessage("ask"))
        raise KeyError


def ask_until(loop, heard):
    loop.wait_for(heard.is_enough.is_set, 10.0, "all answers")


def test_what_is_gathered_leaves_though_the_block_ends_with_an_error(linked):
    loop, connection, heard = linked
    with pytest.raises(KeyError):
        ask_and_fail(loop, connection)
    loop.wait_for(lambda: heard.threads, 10.0, "an answer")
    ask(loop, connection, heard)
