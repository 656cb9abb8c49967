import json
from functools import reduce
from operator import getitem

import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.errors import ProtocolError
from counterpoint.ps.message_codec import MESSAGE_TYPES, decode_message, encode_message, message_type
from counterpoint.ps.messages import Ack, KeySpec, PushRequest
from counterpoint.ps.update_rules import Assign, UniformInit
from tests.ps.message_examples import MESSAGES, ORIGIN

IDS = [f"{index}-{message_type(message)}" for index, message in enumerate(MESSAGES)]
ODD: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
)


def seen(message):
    """What a message says, its tensors as lists."""
    kind, plain, tensors = encode_message(message)
    return kind, plain, [(tensor.dtype, tensor.tolist()) for tensor in tensors]


def places(plain, path=()):
    """The way to every value in nested fields."""
    yield path
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list | tuple) else ()
    for name, value in items:
        yield from places(value, (*path, name))


def changed(plain, path, value):
    """The fields with another value in one place."""
    if not path:
        return value
    copy = dict(plain) if isinstance(plain, dict) else list(plain)
    copy[path[0]] = changed(plain[path[0]], path[1:], value)
    return copy


def test_there_is_an_example_of_every_kind():
    assert {message_type(message) for message in MESSAGES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_a_message_comes_back_from_json_as_it_was(message):
    kind, plain, tensors = encode_message(message)
    back = decode_message(kind, json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert type(back) is type(message)
    assert seen(back) == seen(message)


@given(data=st.data(), message=st.sampled_from(MESSAGES), odd=ODD)
def test_a_field_of_another_value_is_read_or_a_protocol_error(data, message, odd):
    kind, plain, tensors = encode_message(message)
    path = data.draw(st.sampled_from(list(places(plain))))
    try:
        assert message_type(decode_message(kind, changed(plain, path, odd), tensors)) == kind
    except ProtocolError:
        assert seen(message)[1] == plain


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_a_field_too_many_is_refused_by_its_name_at_any_depth(message):
    kind, plain, tensors = encode_message(message)
    for path in places(plain):
        if isinstance(part := reduce(getitem, path, plain), dict):
            with pytest.raises(ProtocolError, match="surprise"):
                decode_message(kind, changed(plain, path, {**part, "surprise": 1}), tensors)


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_a_tensor_too_many_is_refused(message):
    kind, plain, tensors = encode_message(message)
    with pytest.raises(ProtocolError, match="tensors, of which its fields use"):
        decode_message(kind, plain, [*tensors, torch.zeros(1)])


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ProtocolError, match="unknown message type 'drop'"):
        decode_message("drop", {}, [])


def test_a_number_is_not_a_truth():
    with pytest.raises(ProtocolError, match=r"ack: Expected `int`, got `bool` - at `\$\.sequence`"):
        decode_message("ack", {"shard": 0, "sequence": True}, [])


def test_a_number_of_more_than_63_bits_is_refused():
    with pytest.raises(ProtocolError, match=r"9223372036854775808.* exceed 63 bits"):
        decode_message("ack", {"shard": 0, "sequence": 1 << 63}, [])


@pytest.mark.parametrize("rows", [[3, 2], [2, 2], [-1, 4]])
def test_rows_that_do_not_ascend_are_refused(rows):
    with pytest.raises(ProtocolError, match="do not ascend"):
        PushRequest(ORIGIN, 0, "table", 0, 0, torch.ones(2, 2), torch.tensor(rows))


def test_rows_and_values_must_be_as_many():
    with pytest.raises(ProtocolError, match="2 rows and 3 values"):
        PushRequest(ORIGIN, 0, "table", 0, 0, torch.ones(3, 2), torch.tensor([1, 2]))


def test_rows_need_an_optimizer_on_the_server():
    with pytest.raises(ProtocolError, match="without an optimizer"):
        KeySpec("table", "float32", 0, 9, 2, Assign(), UniformInit(-1, 1))


def test_an_unprintable_name_is_refused():
    with pytest.raises(ProtocolError, match="a name of 3 characters"):
        KeySpec("a\nb", "float32", 0, 9, 0, Assign())


def test_an_error_escapes_what_the_peer_sent():
    with pytest.raises(ProtocolError, match=r"unknown field `\\n`"):
        decode_message("snapshotrequest", {"generation": 7, "snapshot": 1, "\n": 1}, [])


def test_a_message_says_its_kind():
    assert message_type(Ack(0, 1)) == "ack"
