"""A record can be decrypted only with the key, and in order."""

import pytest

from counterpoint.errors import ProtocolError
from counterpoint.rpc.records import (
    AesGcmRecordReader,
    AesGcmRecordWriter,
    CrcRecordReader,
    CrcRecordWriter,
    hkdf_expand,
    hkdf_extract,
)

KEY = bytes(range(16))


def opened(opener, record, num_bytes):
    """What the opener makes of a record."""
    target = memoryview(bytearray(num_bytes))
    raw = b"".join(record)
    for piece in opener.receive(target):
        piece[:], raw = raw[: len(piece)], raw[len(piece) :]
    opener.open()
    return bytes(target)


@pytest.mark.parametrize("size", [1, 4096, 4097, 1 << 18])
@pytest.mark.parametrize(
    "ends", [(AesGcmRecordWriter(KEY), AesGcmRecordReader(KEY)), (CrcRecordWriter(), CrcRecordReader())]
)
def test_what_was_sealed_is_opened(ends, size):
    sealer, opener = ends
    for byte in (b"a", b"b"):
        assert opened(opener, sealer.seal(memoryview(byte * size)), size) == byte * size


def test_keys_follow_one_another_on_both_sides():
    sealer, opener = AesGcmRecordWriter(KEY, records_per_key=3), AesGcmRecordReader(KEY, records_per_key=3)
    texts = [bytes([index]) for index in range(10)]
    assert [opened(opener, sealer.seal(memoryview(text)), 1) for text in texts] == texts


def test_a_record_under_a_key_that_has_been_followed_is_refused():
    sealer, opener = AesGcmRecordWriter(KEY, records_per_key=3), AesGcmRecordReader(KEY, records_per_key=4)
    for _ in range(3):
        opened(opener, sealer.seal(memoryview(b"a")), 1)
    with pytest.raises(ProtocolError, match="a record failed verification"):
        opened(opener, sealer.seal(memoryview(b"a")), 1)


def test_equal_texts_look_different_on_the_wire():
    sealer = AesGcmRecordWriter(KEY)
    records = {bytes(sealer.seal(memoryview(b"same"))[0]) for _ in range(20)}
    assert len(records) == 20
    assert not any(b"same" in record for record in records)


def test_keys_are_derived_as_the_standard_says():
    """RFC 5869, test case 1."""
    root = hkdf_extract(bytes(range(13)), bytes([0x0B]) * 22)
    assert root.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    derived = hkdf_expand(root, bytes(range(0xF0, 0xFA)), 42)
    assert derived.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
