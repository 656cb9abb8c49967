"""A request is said again only when nothing of it, or of its answer, can be on its way."""

from functools import partial

import pytest
import torch

from counterpoint.ps.messages import PullReply, PullRequest, PushRequest, Rejected, RequestHeader
from counterpoint.ps.process.connection_pool import RetransmitFilter

ORIGIN = RequestHeader("worker-0", 1, 2, 3)
PUSH = PushRequest(ORIGIN, 0, "weight", 0, 0, torch.ones(2))
PULL = PullRequest(ORIGIN, 0, "weight", 7, 0)
NEWER = PullRequest(RequestHeader("worker-0", 1, 3, 3), 0, "weight", 7, 0)


def resting():
    return False


def moving():
    return True


@pytest.mark.parametrize("message", [PUSH, PULL])
def test_a_repeat_waits_twice_as_long_each_time(message):
    repeats = RetransmitFilter(1.0)
    sent_at = [at for at in range(16) if repeats.should_send(message, float(at), resting)]
    assert sent_at == [0, 1, 3, 7, 15]


def test_a_repeat_waits_as_long_again_after_the_connection_was_last_seen_to_move():
    repeats = RetransmitFilter(1.0)
    assert repeats.should_send(PULL, 0.0, resting)
    assert not any(repeats.should_send(PULL, at / 4, moving) for at in range(1, 41))
    assert not repeats.should_send(PULL, 10.9, resting)
    assert repeats.should_send(PULL, 11.1, resting)


def test_whether_a_connection_moves_is_asked_before_a_repeat_alone():
    asked: list[float] = []

    def looked_at(at):
        asked.append(at)
        return False

    repeats = RetransmitFilter(1.0)
    for at in (0.0, 0.5, 1.5):
        repeats.should_send(PULL, at, partial(looked_at, at))
    assert asked == [1.5]


@pytest.mark.parametrize(
    "answer", [PullReply(0, 7, "weight", 1, torch.ones(2)), Rejected(0, 7, True, "later", "soon", 2)]
)
def test_what_was_answered_or_refused_for_now_may_be_said_at_once(answer):
    repeats = RetransmitFilter(1.0)
    repeats.should_send(PULL, 0.0, resting)
    repeats.on_reply(answer)
    assert repeats.should_send(PULL, 0.1, moving)


def test_a_request_of_another_generation_is_another_one():
    repeats = RetransmitFilter(1.0)
    repeats.should_send(PULL, 0.0, resting)
    assert repeats.should_send(NEWER, 0.1, moving)
