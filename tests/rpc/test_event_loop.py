"""A loop is run by one thread at a time: a waiting thread, or the loop's own thread if none waits."""

import threading

import pytest

from counterpoint.rpc.connection import connect
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.listener import listen, request_handler
from tests.rpc.conftest import echo

NUM_ASKED = 10


class ResponseRecorder:
    """The threads in which replies were received."""

    def __init__(self):
        self.threads = []
        self.is_enough = threading.Event()

    def message(self, connection, message):
        self.threads.append(threading.current_thread())
        if len(self.threads) == NUM_ASKED:
            self.is_enough.set()


@pytest.fixture
def linked(place, secret):
    """A loop with its own thread, a connection to an echo server, and a recorder of replies."""
    recorder = ResponseRecorder()
    with EventLoop() as serving, EventLoop() as calling:
        server = listen(serving, place, secret, request_handler(echo))
        serving.start()
        calling.start()
        yield calling, connect(calling, server.address, secret, recorder.message), recorder


def ask(loop, connection, recorder):
    """Ask once, and wait for the answer."""
    count = len(recorder.threads) + 1
    connection.send(RpcMessage("ask"))
    loop.wait_for(lambda: len(recorder.threads) == count, 10.0, "an answer")


def test_a_reply_is_received_by_the_thread_that_waits_for_it(linked):
    loop, connection, recorder = linked
    for _ in range(NUM_ASKED):
        ask(loop, connection, recorder)
    assert threading.current_thread() in recorder.threads


def test_a_reply_without_a_waiting_thread_is_received_too(linked):
    loop, connection, recorder = linked
    for _ in range(NUM_ASKED - 1):
        ask(loop, connection, recorder)
    connection.send(RpcMessage("ask"))
    assert recorder.is_enough.wait(10.0)
    assert recorder.threads[-1] is not threading.current_thread()


def test_several_waiting_threads_are_all_woken(linked):
    loop, connection, recorder = linked
    waiting = [threading.Thread(target=ask_until, args=(loop, recorder)) for _ in range(3)]
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


def ask_until(loop, recorder):
    loop.wait_for(recorder.is_enough.is_set, 10.0, "all answers")


def test_what_is_gathered_leaves_though_the_block_ends_with_an_error(linked):
    loop, connection, recorder = linked
    with pytest.raises(KeyError):
        ask_and_fail(loop, connection)
    loop.wait_for(lambda: recorder.threads, 10.0, "an answer")
    ask(loop, connection, recorder)
