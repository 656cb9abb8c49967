"""What the workers of an ordeal are about: counting portions one by one, or training a real job."""

from typing import Protocol

from counterpoint.server.job import Asp, Bsp, Budget, Job, Patience, Ssp, Work
from tests.server.hosting import lines, program

PATIENCE = Patience(beat_s=0.2, silence_s=2.0, lease_s=20.0, retry_s=0.4)
STEP = 4
MODES = (Asp(), Ssp(2), Bsp(STEP))


class Errand(Protocol):
    """What is to be done."""

    def main(self, contact: str, name: str, most: str) -> None:
        """What a worker does, given the file of the contact, its name, and when it leaves; 0 for never."""

    def draw_job(self, random) -> Job:
        """A small job: a way of counting, one or two servers, some data."""

    def read(self, session) -> list[float]:
        """What the job was worth; whatever is left to be done has been done before."""


class Counting:
    """Every portion is a 1 in its own place."""

    def main(self, contact, name, most):
        """Count."""
        program.main(contact, name, most)

    def draw_job(self, random):
        """A small job: a way of counting, one or two servers, some data."""
        mode = random.choice(MODES)
        is_bsp = isinstance(mode, Bsp)
        work = Work(400, 2, 1 if is_bsp else 2, STEP if is_bsp else 0)
        return Job("counting", mode, random.choice((1, 2)), work, Budget(1000, 10_000), PATIENCE)

    def read(self, session):
        """How often each portion was counted, below zero."""
        program.work(session)
        return session.pull(program.KEY).wait().values.tolist()


class Training:
    """The job `lines`, with its table on servers.

    Args:
        mode: how pushes are counted; drawn, if not given.
    """

    def __init__(self, mode=None):
        self.mode = mode

    def main(self, contact, name, most):
        """Train."""
        lines.main(contact, name, most)

    def draw_job(self, random):
        """The job with one or two servers."""
        mode = self.mode or random.choice(MODES)
        return lines.elastic(lines.written(mode), random.choice((1, 2)), PATIENCE).job

    def read(self, session):
        """The loss on held-out lines, by what the servers have."""
        return [lines.held_out_loss(session)]
