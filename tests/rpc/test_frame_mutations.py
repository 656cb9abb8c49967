"""Whatever comes over a wire: messages exactly as they were sent, or a ProtocolError, and nothing in between."""

import hashlib

import pytest

from tests.rpc.frame_mutations import (
    MESSAGES,
    WAYS,
    forge_length,
    frames,
    in_transit,
    mutate_handshake,
    received,
    receiver,
    seeds,
)

ORDINARY, SLOW = 1, 50


def state(messages):
    """The hash of a state that every message changes."""
    result = hashlib.sha256()
    for message in messages:
        result.update(repr((message.kind, message.fields)).encode())
        for tensor in message.tensors:
            result.update(repr((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes())
    return result.digest()


EXPECTED = [state(MESSAGES[:count]) for count in range(len(MESSAGES) + 1)]

turns = pytest.mark.parametrize(
    "turns", [ORDINARY, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


@pytest.mark.long(quick=["checked-4000-1"])
@turns
@pytest.mark.parametrize(("way", "count"), [("keyed", 10_000), ("checked", 4_000)])
def test_frames_that_were_changed_on_their_way_change_nothing(way, count, turns):
    sent = frames(way)
    whole, num_refused = b"".join(sent), 0
    for source in seeds(count * turns):
        changed = in_transit(source, sent)
        messages, error = received(receiver(way), changed)
        assert state(messages) == EXPECTED[len(messages)]
        assert error is not None or whole.startswith(changed) or changed.startswith(whole)
        num_refused += error is not None
    assert num_refused > 0.8 * count * turns


@pytest.mark.long(quick=["keyed-1"])
@turns
@pytest.mark.parametrize("way", WAYS)
def test_a_peer_with_the_key_that_sends_nonsense_is_refused_or_understood(way, turns):
    refused = 0
    for source in seeds(2_000 * turns):
        messages, error = received(receiver(way), forge_length(source, way))
        assert len(messages) + (error is not None) <= 1
        refused += error is not None
    assert refused > 1_000 * turns


@turns
def test_a_modified_handshake_is_rejected(turns):
    for source in seeds(2_000 * turns):
        messages, _, is_open, ought_to_be = mutate_handshake(source)
        assert not messages
        assert is_open == ought_to_be


def test_frames_of_another_connection_are_refused_whole():
    assert frames("keyed", bytes(16)) != frames("keyed")
    messages, error = received(receiver("keyed"), b"".join(frames("keyed", bytes(16))))
    assert messages == []
    assert "a record failed verification" in str(error)


def test_unmodified_frames_are_all_accepted():
    for way in WAYS:
        messages, error = received(receiver(way), b"".join(frames(way)))
        assert error is None
        assert state(messages) == EXPECTED[-1]
