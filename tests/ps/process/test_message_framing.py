"""Messages as rpc_messages: small ones that leave together are one, and nothing else may come as one."""

import json

import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.errors import ProtocolError
from counterpoint.fabric.frames import encode_parts
from counterpoint.ps.message_codec import encode_message
from counterpoint.ps.messages import Ack, PullReply
from counterpoint.ps.process.message_framing import (
    BATCH_BYTES,
    BATCH_KIND,
    BATCHED_TYPES,
    CHUNK_KIND,
    MAX_BATCH_MESSAGES,
    MessageAssembler,
    MessageBatch,
)
from counterpoint.ps.write_ahead_log import RECORD_HEADER
from counterpoint.rpc.frame import RpcMessage
from tests.ps.message_examples import MESSAGES
from tests.ps.test_message_codec import ODD, changed, places, seen

SMALL = [message for message in MESSAGES if isinstance(message, BATCHED_TYPES)]
LARGE = PullReply(0, 8, "weight", 4, torch.zeros(BATCH_BYTES // 4))


def rpc_messages_of(messages):
    batch = MessageBatch()
    result: list[RpcMessage] = []
    for message in messages:
        if not batch.add(message):
            result += batch.drain()
    return [*result, *batch.drain()]


def travelled(rpc_message, fields=None):
    decoded_fields = json.loads(json.dumps(dict(rpc_message.fields) if fields is None else fields))
    return MessageAssembler().feed(RpcMessage(rpc_message.kind, decoded_fields, tuple(rpc_message.tensors)))


def test_small_messages_are_one_rpc_message_and_come_back_in_their_order():
    (rpc_message,) = rpc_messages_of(SMALL)
    assert rpc_message.kind == BATCH_KIND
    assert [seen(message) for message in travelled(rpc_message)] == [seen(message) for message in SMALL]


def test_one_message_alone_is_an_rpc_message_of_its_own_kind():
    (rpc_message,) = rpc_messages_of([Ack(0, 1)])
    assert rpc_message.kind == "ack"
    assert travelled(rpc_message) == [Ack(0, 1)]


def test_a_large_message_travels_alone_and_in_its_place():
    result = [travelled(rpc_message) for rpc_message in rpc_messages_of([Ack(0, 1), Ack(0, 2), LARGE, Ack(0, 3)])]
    assert [[encode_message(message)[0] for message in one] for one in result] == [
        ["ack", "ack"],
        ["pullreply"],
        ["ack"],
    ]


def test_a_bundle_is_no_longer_than_an_rpc_message_can_be():
    assert [len(travelled(rpc_message)) for rpc_message in rpc_messages_of([Ack(0, 1)] * 150)] == [
        MAX_BATCH_MESSAGES,
        MAX_BATCH_MESSAGES,
        22,
    ]


WRONG = {
    "nothing": {"messages": []},
    "no list": {"messages": {}},
    "something beside it": {"messages": [["ack", {"shard": 0, "sequence": 1}, 0]], "more": 1},
    "a number": {"messages": [3]},
    "too many tensors": {"messages": [["ack", {"shard": 0, "sequence": 1}, 1]]},
    "a truth for a number": {"messages": [["ack", {"shard": 0, "sequence": 1}, False]]},
    "a batch": {"messages": [[BATCH_KIND, {"messages": []}, 0]]},
    "a piece": {"messages": [["chunk", {"whole": 1, "at": 0}, 0]]},
    "a whole and a broken message": {"messages": [["ack", {"shard": 0, "sequence": 1}, 0], ["ack", {}, 0]]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bundle_of_what_is_no_message_is_refused_as_a_whole(name):
    with pytest.raises(ProtocolError, match="malformed message"):
        travelled(RpcMessage(BATCH_KIND), WRONG[name])


def test_tensors_that_no_message_has_are_refused():
    (rpc_message,) = rpc_messages_of([Ack(0, 1), Ack(0, 2)])
    with pytest.raises(ProtocolError, match="1 tensors, of which its messages use 0"):
        travelled(RpcMessage(rpc_message.kind, rpc_message.fields, (torch.zeros(1),)))


@given(data=st.data(), odd=ODD.filter(lambda value: value == value))
def test_a_bundle_with_another_value_somewhere_is_read_or_a_protocol_error(data, odd):
    (rpc_message,) = rpc_messages_of(SMALL[:4])
    path = data.draw(st.sampled_from(list(places(dict(rpc_message.fields)))[1:]))
    fields = changed(dict(rpc_message.fields), path, odd)
    try:
        result = MessageAssembler().feed(RpcMessage(BATCH_KIND, fields, tuple(rpc_message.tensors)))
    except ProtocolError:
        result = []
    assert len(result) in {0, 4}


def chunk_of(label, parts):
    """Return a complete state in one chunk, encoded from these tensors."""
    encoded = torch.cat(encode_parts(RECORD_HEADER, label, parts))
    return RpcMessage(CHUNK_KIND, {"whole": len(encoded), "at": 0}, (encoded,))


def as_bytes(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


BAD_CHUNKS = {
    "a number": RpcMessage(CHUNK_KIND, {"whole": 8, "at": 0}, (torch.tensor(5, dtype=torch.uint8),)),
    "no tensor": RpcMessage(CHUNK_KIND, {"whole": 8, "at": 0}),
    "two tensors": RpcMessage(CHUNK_KIND, {"whole": 2, "at": 0}, (as_bytes(b"1"), as_bytes(b"2"))),
    "floats": RpcMessage(CHUNK_KIND, {"whole": 8, "at": 0}, (torch.zeros(8),)),
    "fields that are not JSON": chunk_of("installsnapshot", [as_bytes(b"[")]),
    "fields that are not UTF-8": chunk_of("installsnapshot", [as_bytes(b"\xff")]),
    "fields with nan": chunk_of("installsnapshot", [as_bytes(b"[NaN]")]),
    "deep fields": chunk_of("installsnapshot", [as_bytes(b"[" * 5000)]),
    "a long number": chunk_of("installsnapshot", [as_bytes(b"9" * 5000)]),
    "no fields": chunk_of("installsnapshot", []),
    "fields as floats": chunk_of("installsnapshot", [torch.zeros(3)]),
    "another kind": chunk_of("ack", [as_bytes(b"{}")]),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_a_malformed_chunk_is_a_protocol_error(name):
    with pytest.raises(ProtocolError, match=r"malformed|chunk|unknown"):
        MessageAssembler().feed(BAD_CHUNKS[name])
