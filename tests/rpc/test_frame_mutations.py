"""Whatever comes over a wire: letters exactly as they were sent, or a ProtocolError, and nothing in between."""

import hashlib

import pytest

from tests.rpc.frame_mutations import LETTERS, WAYS, frames, greeted, heard, in_transit, lied, receiver, seeds

ORDINARY, SLOW = 1, 50


def state(letters):
    """The hash of a state that every letter changes."""
    found = hashlib.sha256()
    for letter in letters:
        found.update(repr((letter.kind, letter.fields)).encode())
        for tensor in letter.tensors:
            found.update(repr((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes())
    return found.digest()


EXPECTED = [state(LETTERS[:count]) for count in range(len(LETTERS) + 1)]

turns = pytest.mark.parametrize(
    "turns", [ORDINARY, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


@turns
@pytest.mark.parametrize(("way", "count"), [("keyed", 10_000), ("checked", 4_000)])
def test_frames_that_were_changed_on_their_way_change_nothing(way, count, turns):
    sent = frames(way)
    whole, num_refused = b"".join(sent), 0
    for source in seeds(count * turns):
        changed = in_transit(source, sent)
        letters, error = heard(receiver(way), changed)
        assert state(letters) == EXPECTED[len(letters)]
        assert error is not None or whole.startswith(changed) or changed.startswith(whole)
        num_refused += error is not None
    assert num_refused > 0.8 * count * turns


@turns
@pytest.mark.parametrize("way", WAYS)
def test_a_peer_with_the_key_that_sends_nonsense_is_refused_or_understood(way, turns):
    refused = 0
    for source in seeds(2_000 * turns):
        letters, error = heard(receiver(way), lied(source, way))
        assert len(letters) + (error is not None) <= 1
        refused += error is not None
    assert refused > 1_000 * turns


@turns
def test_a_greeting_that_was_changed_lets_nobody_in(turns):
    for source in seeds(2_000 * turns):
        letters, _, is_open, ought_to_be = greeted(source)
        assert not letters
        assert is_open == ought_to_be


def test_frames_of_another_connection_are_refused_whole():
    assert frames("keyed", bytes(16)) != frames("keyed")
    letters, error = heard(receiver("keyed"), b"".join(frames("keyed", bytes(16))))
    assert letters == []
    assert "a record failed verification" in str(error)


def test_frames_that_nobody_touched_are_all_believed():
    for way in WAYS:
        letters, error = heard(receiver(way), b"".join(frames(way)))
        assert error is None
        assert state(letters) == EXPECTED[-1]
