"""On one host large tensors are laid where the other side sees them, and whatever fails leaves them on the socket."""

import gc
import os

import pytest
import torch

from counterpoint.errors import ProtocolError
from counterpoint.rpc import buffers as buffers
from counterpoint.rpc.buffers import OwnedBuffers, PeerBuffers
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.listener import listen, request_handler
from tests.rpc.conftest import Records, connect_and_record, echo, run_loop

SIZE = 1 << 20


@pytest.fixture
def linked(loop, place, secret):
    """A connection with an offered shared buffer, and the messages that the server receives."""
    received = Records()
    listen(loop, place, secret, received.message)
    connection, _ = connect_and_record(loop, place, secret)
    run_loop(loop, 10)
    connection.send(RpcMessage("push", {}, [torch.zeros(SIZE)]))
    loop.wait_for(lambda: received.messages, 5.0, "the first message")
    run_loop(loop, 10)
    received.messages.clear()
    return connection, received


def test_a_message_on_a_buffer_is_as_it_was_when_it_was_sent(loop, linked):
    connection, received = linked
    tensors = [torch.arange(SIZE - 999, dtype=torch.int32), torch.ones(3, dtype=torch.bool), torch.eye(9).t()]
    expected = [tensor.clone() for tensor in tensors]
    connection.send(RpcMessage("push", {"step": 1}, tensors))
    for tensor in tensors:
        tensor.zero_()
    loop.wait_for(lambda: received.messages, 5.0, "the message")
    assert all(torch.equal(*pair) for pair in zip(received.messages[0].tensors, expected, strict=True))


def test_messages_that_are_kept_stay_as_they_are(loop, linked):
    connection, received = linked
    for index in range(8):
        connection.send(RpcMessage("push", {}, [torch.full((SIZE,), float(index))]))
        run_loop(loop, 10)
    loop.wait_for(lambda: len(received.messages) == 8, 5.0, "the messages")
    assert [message.tensors[0].unique().tolist() for message in received.messages] == [[float(i)] for i in range(8)]


@pytest.mark.long
def test_a_buffer_is_reused_when_no_tensor_of_it_is_alive(loop, linked):
    connection, received = linked
    places = set()
    for _ in range(6):
        connection.send(RpcMessage("push", {}, [torch.zeros(SIZE)]))
        loop.wait_for(lambda: received.messages, 5.0, "the message")
        places.add(received.messages.pop().tensors[0].data_ptr())
        gc.collect()
        run_loop(loop, 10)
    assert len(places) == 1


def test_a_buffer_that_cannot_be_seen_leaves_messages_on_the_socket(loop, place, secret, monkeypatch):
    monkeypatch.setattr(PeerBuffers, "open", lambda *_: False)
    listen(loop, place, secret, request_handler(echo))
    with RpcClient(loop, place, secret) as client:
        for _ in range(4):
            answer = client.request(RpcMessage("ask", {}, [torch.arange(SIZE)])).wait(10.0)
            assert torch.equal(answer.tensors[0], torch.arange(SIZE))


def test_only_the_file_that_was_offered_is_taken_for_a_buffer(tmp_path):
    borrowing, lending = PeerBuffers(os.getpid()), OwnedBuffers()
    buffer = lending.create(SIZE)
    assert buffer
    with (tmp_path / "file").open("wb") as other:
        other.truncate(SIZE)
        assert not borrowing.open(other.fileno(), os.fstat(other.fileno()).st_ino, SIZE)
    assert not borrowing.open(buffer.mapping.fd, buffer.number + 1, SIZE)
    assert not borrowing.open(buffer.mapping.fd, buffer.number, 2 * SIZE)
    assert not PeerBuffers(1 << 22).open(buffer.mapping.fd, buffer.number, SIZE)
    assert borrowing.open(buffer.mapping.fd, buffer.number, SIZE)
    lending.close()


def test_buffers_are_given_back_once_and_borrowed_as_they_were_offered():
    borrowing, lending = PeerBuffers(os.getpid()), OwnedBuffers()
    buffer = lending.create(SIZE)
    assert buffer
    lending.release(buffer.number)
    with pytest.raises(ProtocolError, match="was released but is not in use"):
        lending.release(buffer.number)
    with pytest.raises(ProtocolError, match="is not mapped or too small"):
        borrowing.view(buffer.number, 16)
    lending.close()


def test_buffers_are_few_and_of_sizes_that_fit(monkeypatch):
    lending = OwnedBuffers()
    made = [lending.create(num_bytes) for num_bytes in (SIZE, SIZE - 5, SIZE, 3 * SIZE)]
    assert [buffer and buffer.num_bytes for buffer in made] == [SIZE, SIZE, None, 4 * SIZE]
    monkeypatch.setattr(buffers, "MAX_KEPT_BYTES", 7 * SIZE)
    assert lending.create(SIZE * 2) is None
    lending.close()
