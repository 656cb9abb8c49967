"""What fits into a message, and the memory that it is received into."""

import pytest
import torch

from counterpoint.errors import PeerError
from counterpoint.rpc.buffers import LARGE_BYTES, ReceiveBufferPool
from counterpoint.rpc.frame import DEFAULT_LIMITS, RpcLimits, RpcMessage, encode_frame


def test_a_large_tensor_is_sent_from_where_it_is():
    tensor = torch.arange(100_000)
    pieces = encode_frame(RpcMessage("push", {}, [tensor]), DEFAULT_LIMITS)
    tensor[7] = -1
    assert int.from_bytes(pieces[2][56:64], "little", signed=True) == -1


@pytest.mark.parametrize("fields", [{"a": float("nan")}, {"a": b"raw"}, {"a": {1, 2}}, {"a": torch.ones(2)}])
def test_fields_that_cannot_travel_are_refused_before_they_are_sent(fields):
    with pytest.raises(PeerError, match=r"the fields of 'push' cannot be encoded as JSON: .*lists and mappings"):
        encode_frame(RpcMessage("push", fields), DEFAULT_LIMITS)


@pytest.mark.parametrize("kind", ["", "a" * 65])
def test_a_message_without_a_kind_is_refused_before_it_is_sent(kind):
    with pytest.raises(PeerError, match="a kind has 1 to 64 characters"):
        encode_frame(RpcMessage(kind), DEFAULT_LIMITS)


def test_a_tensor_that_cannot_travel_is_refused_before_it_is_sent():
    with pytest.raises(PeerError, match=r"torch.complex64 with 1 dims cannot be sent"):
        encode_frame(RpcMessage("push", {}, [torch.ones(1, dtype=torch.complex64)]), DEFAULT_LIMITS)


@pytest.mark.parametrize("message", [RpcMessage("push", {"a": "b" * 1000}), RpcMessage("push", {}, [torch.ones(300)])])
def test_a_message_beyond_the_limits_is_refused_with_its_size(message):
    with pytest.raises(PeerError, match=r"'push' with \d tensors has \d+ \+ \d+ bytes; the limit is 65535"):
        encode_frame(message, RpcLimits(text_bytes=1000, payload_bytes=1000))


def filled(pool, num_bytes):
    return pool.allocate(num_bytes).tensor(torch.uint8, (num_bytes,), 0)


def test_a_large_buffer_is_reused_when_no_tensor_of_it_is_alive():
    pool = ReceiveBufferPool()
    held = filled(pool, LARGE_BYTES)
    first, part = filled(pool, LARGE_BYTES), held[5:]
    place = first.data_ptr()
    assert place != held.data_ptr()
    del first, held
    assert filled(pool, LARGE_BYTES).data_ptr() == place
    assert part.data_ptr() % 16 == 5


def test_a_room_that_somebody_holds_is_not_given_to_another():
    pool = ReceiveBufferPool()
    held = [filled(pool, LARGE_BYTES).fill_(index) for index in range(5)]
    assert [int(each.max()) for each in held] == [0, 1, 2, 3, 4]
    assert len({each.data_ptr() for each in held}) == 5
