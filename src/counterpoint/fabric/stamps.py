"""Messages are numbered, so that one that is lost, doubled or of another job is an error and not a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fingerprint import message_fingerprint
from counterpoint.fabric.frames import Frame, Kind, Stamp


class Stamps:
    """What one rank writes on its messages, and what it must find on those that come.

    Args:
        rank: the own rank.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, rank: int, job: int, generation: int) -> None:
        self._rank = rank
        self._job = job
        self._generation = generation
        self._num_sent: defaultdict[int, int] = defaultdict(int)
        self._num_received: defaultdict[int, int] = defaultdict(int)

    def following(self, peer: int, label: str, tensors: Sequence[Tensor]) -> Stamp:
        """Return the stamp of the next message to the peer."""
        number = self._num_sent[peer]
        self._num_sent[peer] += 1
        print_ = message_fingerprint(label, tensors)
        return Stamp(Kind.MESSAGE, self._job, self._generation, self._rank, number, print_)

    def verify(self, peer: int, frame: Frame) -> None:
        """The frame is the peer's next message.

        Raises:
            PeerError: it is of another job, or one before it is lost.
        """
        print_, number = message_fingerprint(frame.label, frame.tensors), self._num_received[peer]
        expected = Stamp(Kind.MESSAGE, self._job, self._generation, peer, number, print_)
        if frame.stamp != expected:
            raise PeerError(
                f"rank {self._rank} received {frame.stamp} for {frame.label} where {expected} should have come from "
                f"rank {peer}; messages come complete and in order, from ranks of one job: look for ranks of an "
                "earlier run"
            )
        self._num_received[peer] += 1
