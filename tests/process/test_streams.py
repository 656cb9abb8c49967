"""Streams on real processes: two stages equal the sequential loop of every rule, over 30 updates."""

from dataclasses import asdict

import pytest

from counterpoint.launchers import launch
from counterpoint.testing.parity import BAR
from tests.process import ranks
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
