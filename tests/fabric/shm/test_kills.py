"""Whichever rank is killed at whatever moment, nothing is left behind, and the others name it."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from counterpoint.fabric.shm.native import native
from tests.fabric.run_ranks import on_shm

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}"),
]


class Doomed:
    """A scenario in which one rank is killed by itself, from a timer, some time after all have come, or in the handshake.

    Args:
        seed: of who and when.
        num_ranks: of the job.
    """

    def __init__(self, seed, num_ranks):
        rng = random.Random(seed)
        self.victim = rng.randrange(num_ranks)
        self.after_s = rng.choice([0.0, 0.0001, 0.001, 0.01, 0.03]) * rng.random()
        self.num_ranks = num_ranks

    def __call__(self, fabric):
        if fabric.rank == self.victim:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, self.after_s + 1e-6)
        group = tuple(range(self.num_ranks))
        shared, private = fabric.empty(300_000, torch.float32).zero_(), torch.zeros(300_000)
        while True:
            fabric.all_reduce("shared", shared, group).wait()
            fabric.all_reduce("private", private, group).wait()
            fabric.gather_values("value", fabric.rank, group)
            following, before = (fabric.rank + 1) % self.num_ranks, (fabric.rank - 1) % self.num_ranks
            fabric.send(following, "x", [private[:1000]])
            fabric.recv(before, "x")


def left_behind():
    """Names of shared memory, and the processes of this test that still have any of ours."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return names, [pid for pid in descendants(os.getpid()) if "memfd:counterpoint" in read(pid, "maps")]


def descendants(pid):
    own = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return own + [pid for child in own for pid in descendants(child)]


def read(pid, what):
    try:
        return Path(f"/proc/{pid}/{what}").read_text()
    except OSError:
        return ""


def play_and_look(seeds):
    names, _ = left_behind()
    for seed in seeds:
        num_ranks = 2 + seed % 2
        scenario = Doomed(seed, num_ranks)
        texts = on_shm(scenario, num_ranks, timeout_s=10.0)
        assert texts[scenario.victim] is None
        others = [text for rank, text in enumerate(texts) if rank != scenario.victim]
        assert all(f"rank {scenario.victim} has ended" in text for text in others), (seed, texts)
    assert left_behind() == (names, [])


@pytest.mark.long
def test_ten_jobs_with_a_killed_rank_leave_nothing():
    play_and_look(range(10))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_jobs_with_a_killed_rank_leave_nothing():
    play_and_look(range(1000))
