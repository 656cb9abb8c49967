"""A frame decodes to exactly what was encoded, or is rejected with what was found."""

import zlib

import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.errors import PeerError
from counterpoint.fabric import frames
from counterpoint.fabric.frames import Frame, FrameHeader, FrameKind, decode, encode
from counterpoint.rpc.tensor_codec import ALIGNMENT, DTYPE_CODES
from tests.covering import given_few_or_many

STAMP = FrameHeader(FrameKind.MESSAGE, job=7, generation=2, source=1, sequence=9, fingerprint=bytes(range(16)))
stamps = st.builds(
    FrameHeader,
    st.sampled_from(FrameKind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(list(DTYPE_CODES))))
    return tensor.transpose(0, -1) if draw(st.booleans()) and shape else tensor


@given_few_or_many(20, 100, stamps, st.text(max_size=40), st.lists(tensors(), max_size=4))
def test_what_is_written_is_read(stamp, label, written):
    frame = decode(encode(stamp, label, written))
    assert frame == Frame(stamp, label, frame.tensors)
    assert [t.dtype for t in frame.tensors] == [t.dtype for t in written]
    assert all(torch.equal(read, tensor) for read, tensor in zip(frame.tensors, written, strict=True))


def test_parts_of_a_frame_are_in_order_and_large_tensors_are_not_copied():
    large, small = torch.arange(5001.0), torch.ones(3)
    pieces = frames.encode_parts(STAMP, "x1.0", [small, large, large.double()[::2], small])
    assert torch.equal(torch.cat(pieces), encode(STAMP, "x1.0", [small, large, large.double()[::2], small]))
    assert large.data_ptr() in {piece.data_ptr() for piece in pieces}
    assert len(pieces) == 5


@given(st.data())
def test_a_frame_with_any_flipped_bit_is_rejected(data):
    frame = encode(STAMP, "x1.0", [torch.arange(5.0), torch.ones(2, 2, dtype=torch.bool)])
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PeerError, match=r"damaged frame: "):
        decode(frame)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(noise):
    with pytest.raises(PeerError, match=r"damaged frame: "):
        decode(torch.tensor(list(noise), dtype=torch.uint8))


@given(st.integers(0, 200))
def test_a_frame_of_another_length_is_refused(length):
    frame = encode(STAMP, "x1.0", [torch.arange(5.0)])
    longer = torch.cat([frame, torch.zeros(200, dtype=torch.uint8)])
    with pytest.raises(PeerError, match=r"damaged frame: "):
        decode(longer[:length] if length < len(frame) else longer[: length + 1])


def forged(label_bytes, num_tensors, head, payload=b"", version=frames.VERSION, kind=1):
    """A frame with right checksums and wrong content."""
    head += bytes(-(frames.HEADER_BYTES + len(head)) % ALIGNMENT)
    body = head + payload
    prefix = frames.FIXED_HEADER.pack(
        frames.MAGIC, version, kind, 0, 0, 0, 0, 0, bytes(16), label_bytes, num_tensors, len(head), len(payload),
        zlib.crc32(body),
    )  # fmt: skip
    return torch.tensor(list(prefix + frames.CHECKSUM.pack(zlib.crc32(prefix)) + body), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (forged(0, 0, b"", version=9), "it has version 9, and this rank reads version 1"),
        (forged(0, 0, b"", kind=77), "its kind 77.0 does not exist"),
        (forged(99, 0, b"abc"), r"it announces 99 \+ \d+ \+ 0 bytes"),
        (forged(2, 0, b"\xff\xfe"), "its label b'\\\\xff\\\\xfe' is not UTF-8"),
        (forged(0, 1, b"\x63\x00"), "tensor 0 is described by dtype 99 and 0 dims"),
        (forged(0, 1, b"\x01\x11" + bytes(200)), "tensor 0 is described by dtype 1 and 17 dims"),
        (forged(0, 5, b"\x01\x00" * 4, bytes(64)), "its head ends before tensor 4 of 5"),
        (forged(0, 0, bytes(32)), r"its head has \d+ bytes too many"),
        (forged(0, 1, b"\x01\x01" + b"\xff" * 8, bytes(16)), "extends beyond the payload"),
        (
            forged(0, 1, b"\x01\x02" + b"\xff" * 8 + bytes(8)),
            r"tensor 0 is described by shape \(18446744073709551615, 0\)",
        ),
        (forged(0, 1, b"\x01\x01" + bytes(8), bytes(16)), "its tensors take 16 bytes less than its payload"),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused(frame, message):
    with pytest.raises(PeerError, match=f"damaged frame: .*{message}"):
        decode(frame)


def test_a_tensor_that_cannot_travel_is_refused_before_it_is_sent():
    with pytest.raises(PeerError, match=r"a tensor of torch.complex64 with 1 dims cannot be sent; torch.float64, "):
        encode(STAMP, "x", [torch.ones(1, dtype=torch.complex64)])
