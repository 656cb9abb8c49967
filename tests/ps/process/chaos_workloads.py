"""Workloads of a chaos run: counting slices one by one, or training a real job."""

from typing import Protocol

from counterpoint.ps.consistency import Asp, Bsp, Ssp
from counterpoint.ps.job_config import DataConfig, JobConfig, RetryPolicy, Timeouts
from tests.ps.process import counting_worker as program, lines_worker as lines

TIMEOUTS = Timeouts(heartbeat_s=0.2, failure_timeout_s=2.0, lease_s=20.0, resend_s=0.4)
SLICES_PER_STEP = 4
CONSISTENCIES = (Asp(), Ssp(2), Bsp(SLICES_PER_STEP))


class ChaosWorkload(Protocol):
    """What is to be done."""

    def main(self, contact: str, name: str, most: str) -> None:
        """What a worker does, given the file of the contact, its name, and when it leaves; 0 for never."""

    def draw_job(self, random) -> JobConfig:
        """A small job: a way of counting, one or two servers, some data."""

    def read(self, session) -> list[float]:
        """What the job was worth; whatever is left to be done has been done before."""


class CountingWorkload:
    """Every slice is a 1 in its own place."""

    def main(self, contact, name, most):
        """Count."""
        program.main(contact, name, most)

    def draw_job(self, random):
        """A small job: a way of counting, one or two servers, some data."""
        mode = random.choice(CONSISTENCIES)
        is_bsp = isinstance(mode, Bsp)
        work = DataConfig(400, 2, 1 if is_bsp else 2, SLICES_PER_STEP if is_bsp else 0)
        return JobConfig("counting", mode, random.choice((1, 2)), work, RetryPolicy(1000, 10_000), TIMEOUTS)

    def read(self, session):
        """How often each slice was counted, below zero."""
        program.work(session)
        return session.pull(program.KEY).wait().values.tolist()


class TrainingWorkload:
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
        mode = self.mode or random.choice(CONSISTENCIES)
        return lines.elastic(mode, random.choice((1, 2)), TIMEOUTS).job

    def read(self, session):
        """The loss on held-out lines, by what the servers have."""
        return [lines.held_out_loss(session)]
