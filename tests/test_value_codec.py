"""An encoded value decodes to an equal one of the same types, or is rejected with what was found."""

import json
import struct
import tracemalloc
from collections import OrderedDict
from enum import IntEnum
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.errors import DataError, ProtocolError
from counterpoint.json_reader import MAX_BYTES, parse_json
from counterpoint.value_codec import ALIGNMENT, DTYPES, decode_value, encode_parts, encode_value


class Priority(IntEnum):
    HIGH = 1


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=99)
)
keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.binary(max_size=3))
values = st.recursive(
    leaves,
    lambda parts: st.lists(parts, max_size=4) | st.lists(parts, max_size=4).map(tuple)
    | st.dictionaries(keys, parts, max_size=4) | st.dictionaries(keys, parts, max_size=4).map(OrderedDict),
)  # fmt: skip


def message(tree, payload=b""):
    """The bytes of a value that nobody encoded."""
    text = tree.encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text + payload


@given(values)
def test_a_value_comes_back_with_its_types(value):
    found = decode_value(encode_value(value, "it"))
    assert found == value
    assert repr(found) == repr(value)


@given(st.sets(keys | st.frozensets(keys, max_size=3), max_size=4))
def test_a_set_comes_back_as_a_set_of_the_same_kind(value):
    for either in (value, frozenset(value)):
        found = decode_value(encode_value(either, "it"))
        assert (type(found), found) == (type(either), either)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3, 5)])
def test_tensors_come_back_bit_by_bit(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    number, found, kind = decode_value(encode_value((1, tensor, tensor.dtype), "it"))
    assert (number, found.dtype, kind, found.shape) == (1, tensor.dtype, tensor.dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "array", [np.float64(0.1), np.int8(-3), np.bool_(1), np.complex64(1j), np.zeros((2, 0), ">i2")]
)
def test_arrays_and_numbers_of_numpy_keep_dtype_and_shape(array):
    (found,) = decode_value(encode_value([array], "it"))
    assert type(found) is type(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


def test_strided_and_conjugate_tensors_are_encoded_as_they_read():
    given = (torch.arange(6.0).view(2, 3).t(), torch.tensor([1 + 2j]).conj(), np.arange(6).reshape(2, 3).T)
    found = decode_value(encode_value(given, "it"))
    assert [one.tolist() for one in found] == [one.tolist() for one in given]


def test_what_is_not_finite_and_what_is_a_subclass_come_back_as_plain_numbers():
    found = decode_value(encode_value([nan, inf, -inf, Priority.HIGH, torch.Size([2])], "it"))
    assert repr(found) == "[nan, inf, -inf, 1, (2,)]"


def test_encoding_copies_no_tensor_and_decoding_gives_views_of_writable_memory():
    tensor = torch.arange(40.0)
    parts = encode_parts({"weight": tensor}, "it")
    assert np.asarray(parts[1]).ctypes.data == tensor.data_ptr()
    data = bytearray().join(parts)
    decode_value(data)["weight"].fill_(7)
    assert decode_value(data)["weight"].tolist() == [7.0] * 40


@pytest.mark.parametrize("part", [object(), len, torch.eye(2).to_sparse(), np.array([None])])
def test_what_cannot_be_encoded_is_named_with_its_place(part):
    with pytest.raises(DataError, match=rf"the state\['a'\]\[1\] is a {type(part).__name__}, which cannot be encoded"):
        encode_value({"a": (0, part)}, "the state")


@given(st.binary(max_size=200))
def test_bytes_that_nobody_encoded_are_rejected(noise):
    with pytest.raises(ProtocolError, match="a malformed value: "):
        decode_value(noise)


@given(st.data())
def test_a_value_that_was_cut_or_lengthened_is_rejected(data):
    encoded = encode_value([torch.ones(3), b"abc"], "it")
    size = data.draw(st.integers(0, len(encoded) - 1))
    for wrong in (encoded[:size], encoded + bytes(1 + size)):
        with pytest.raises(ProtocolError, match="a malformed value: "):
            decode_value(wrong)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (message("[" * 100_000), "its header is not JSON"),
        (message('{"a": 1, "a": 2}'), "a name occurs twice"),
        (message("NaN"), "NaN is not a JSON number"),
        (message("-1e999"), "-1e999 is beyond the range of a float"),
        (message("[1, 2]"), r"nothing is encoded as \[1, 2\]"),
        (message('["pickle", "gASV"]'), "nothing is encoded as"),
        (message('["tensor", "Tensor", [1]]'), "nothing is encoded as"),
        (message('["array", "|O8", [1]]', bytes(64)), "nothing is encoded as"),
        (message('["dtype", "nn"]'), "nothing is encoded as"),
        (message('["bytes", true]'), "nothing is encoded as"),
        (message('["dict", [1]]'), "nothing is encoded as"),
        (message('["set", {}]'), "a set has a part that cannot be hashed"),
        (message('["tensor", "float32", [-1]]'), r"a buffer has the shape \[-1\]"),
        (message('["tensor", "float32", [1.0]]'), r"a buffer has the shape \[1.0\]"),
        (message(f'["tensor", "float32", {[1] * 33}]', bytes(64)), "a buffer has the shape"),
        (message('["tensor", "float32", [0, 4611686018427387904, 4]]'), "a buffer has the shape"),
        (message('["tensor", "float32", [17]]', bytes(64)), "a buffer of 68 bytes at 0 extends beyond the 64"),
        (message("null", bytes(64)), "its buffers take 0 of 64 bytes"),
        (message('["tensor", "bool", [2]]', b"\1\2" + bytes(62)), "a boolean is neither true nor false"),
        (message('["array", "|b1", [2]]', b"\1\2" + bytes(62)), "a boolean is neither true nor false"),
        (struct.pack("<Q", 1 << 63) + bytes(56), "it announces a header of 9223372036854775808 bytes and has 64"),
    ],
)
def test_hostile_bytes_are_rejected_with_what_was_found(data, found):
    with pytest.raises(ProtocolError, match=f"a malformed value: .*{found}"):
        decode_value(data)


@pytest.mark.parametrize("text", [rb'{"\ud800": 1}', rb'["\uDFFF"]', b'"\\ud83d"'])
def test_half_of_a_surrogate_pair_is_no_text(text):
    with pytest.raises(ValueError, match="surrogates"):
        parse_json(text)


def test_a_whole_surrogate_pair_is_a_character():
    assert parse_json(rb'"\ud83d\ude00"') == "\U0001f600"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b"[" * 201 + b"]" * 201, "it is nested more than 200 levels deep"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "it is nested more than 200 levels deep"),
        (b"9" * 5000, "Exceeds the limit"),
        (b"1e999", "1e999 is beyond the range of a float"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        (b'"\xff"', "invalid start byte"),
        (b" " * 1001, "it has 1001 bytes, but at most 1000 are read"),
    ],
)
def test_json_of_a_stranger_is_refused_in_few_words_and_little_memory(text, problem):
    max_bytes = 1000 if text.isspace() else MAX_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=problem) as caught:
            parse_json(text, max_bytes)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text) + 200_000
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 200


def test_brackets_in_a_text_are_not_levels_of_json():
    assert parse_json(f'["{"[" * 1000}"]') == ["[" * 1000]
    assert parse_json(json.dumps("{" * 1000)) == "{" * 1000
