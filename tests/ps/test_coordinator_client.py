"""A worker's requests to its coordinator; replies and refusals arrive in any order."""

from threading import RLock
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.errors import PeerError
from counterpoint.ps.messages import Ack, Rejected
from counterpoint.ps.worker_session import CoordinatorClient

ANSWER = Ack(-1, 3)
GONE = Rejected(-1, 4, False, "generation", "worker-0 does not belong to the job", 2)


class Carried:
    """A carrier by which the coordinator says some things as soon as somebody waits."""

    calling: Any

    def __init__(self, says):
        self.lock, self.says = RLock(), says

    def execute(self, actions):
        self.sent = actions

    def wait(self, holds, _):
        for response in self.says:
            self.calling.on_response(response)
        return holds()


def calling(*says):
    """A worker that is no longer a member and is notified."""
    timeouts = SimpleNamespace(lease_s=0.01)
    client: Any = SimpleNamespace(
        name="worker-0",
        job=SimpleNamespace(name="short", timeouts=timeouts),
        membership=SimpleNamespace(is_member=False),
        call_coordinator=lambda make: [make],
    )
    carrier: Any = Carried(says)
    carrier.calling = CoordinatorClient(client, carrier)
    return carrier.calling


@pytest.mark.parametrize("says", [(ANSWER, GONE), (GONE, ANSWER)])
def test_an_answer_counts_though_its_asker_does_not_belong_to_the_job_any_more(says):
    assert calling(*says).call(Ack) is ANSWER


def test_who_does_not_belong_to_the_job_and_has_no_answer_is_reported_so():
    with pytest.raises(PeerError, match="worker-0 does not belong to the job"):
        calling(GONE).call(Ack)


def test_a_coordinator_that_says_nothing_is_named():
    with pytest.raises(PeerError, match=r"waited 0\.01 s for the coordinator of short to answer worker-0"):
        calling().call(Ack)
