"""Streams on real processes: two stages equal the sequential loop of every rule, over 30 updates."""

from dataclasses import asdict, replace

import pytest

from counterpoint.checkpoint import Checkpoint
from counterpoint.errors import LaunchError
from counterpoint.launchers import launch
from counterpoint.testing.parity import BAR, difference
from tests.process import ranks
from tests.same import streamed
from tests.same.fitted import Fitted
from tests.same.streamed import ADAMW, MOMENTUM, Case, off

pytestmark = pytest.mark.process
CASES = [
    Case(rule, (1, 1), (5,) * 30, optimizer=optimizer, flushes=(11,))
    for rule in ("stashed", "synced", "double")
    for optimizer in (MOMENTUM, ADAMW)
]


def test_two_processes_that_do_not_wait_for_each_other_equal_the_sequential_loop():
    found = launch(ranks.stream, ranks=2, args=[[asdict(case) for case in CASES]])
    assert max(off(case, come) for case, come in zip(CASES, found[0], strict=True)) <= BAR


@pytest.mark.slow
def test_three_processes_with_replicas_equal_the_sequential_loop():
    cases = [Case("stashed", (2, 1), (8, 8, 7) * 10), Case("synced", (1, 2), (8,) * 30, optimizer=ADAMW)]
    found = launch(ranks.stream, ranks=3, args=[[asdict(case) for case in cases]])
    assert max(off(case, come) for case, come in zip(cases, found[0], strict=True)) <= BAR


@pytest.mark.parametrize("replicas", [(1, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_run_with_a_killed_stage_goes_on_from_the_last_step_that_all_stages_had_saved(replicas, tmp_path):
    """Behind its ninth step stage 1 has saved after six, and stage 0, which is ahead of it, too."""
    case = Fitted("stashed", replicas, (6,) * 12, optimizer=ADAMW)
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        launch(ranks.save_apart, ranks=sum(replicas), args=[asdict(case), str(tmp_path), 8, False])
    stopped = Checkpoint.open(tmp_path).step
    assert stopped == 6
    found = launch(ranks.save_apart, ranks=sum(replicas), args=[asdict(case), str(tmp_path), 99, True])
    expected, _ = streamed.expected(replace(case, flushes=(stopped,)))
    assert max(difference(found[0][name], value) for name, value in expected.items()) <= BAR
    assert not list(tmp_path.glob("*.tmp-*"))
