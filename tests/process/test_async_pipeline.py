"""Streams on real processes: stages equal the sequential loop of every rule, over 30 updates and more, and restarts."""

from dataclasses import asdict, replace

import pytest

from counterpoint.checkpoint import Checkpoint
from counterpoint.testing.parity import TOLERANCE, relative_difference
from tests.equivalence import async_pipeline_cases as streamed
from tests.equivalence.async_pipeline_cases import ADAMW, MOMENTUM, Case, max_error
from tests.equivalence.fit_cases import Fitted
from tests.process import rank_functions as ranks
from tests.process.forked_ranks import run_forked

pytestmark = pytest.mark.process
RULES = ["stashing", "vertical_sync", "double_buffer"]


def every(replicas, **more):
    """Every rule under either optimizer; a body of 2BW is as long as any of these pipelines needs."""
    return [
        Case(rule, replicas, (8, 8, 7) * 10, 4 if rule == "double_buffer" else 0, optimizer, **more)
        for rule in RULES
        for optimizer in (MOMENTUM, ADAMW)
    ]


def worst(cases):
    """Return the largest difference on the first rank of processes that train all of these."""
    result = run_forked(ranks.stream, ranks=sum(cases[0].replicas), args=[[asdict(case) for case in cases]])
    return max(max_error(case, come) for case, come in zip(cases, result[0], strict=True))


@pytest.mark.long
def test_two_processes_that_do_not_wait_for_each_other_equal_the_sequential_loop():
    assert worst(every((1, 1), flushes=(11,))) <= TOLERANCE


@pytest.mark.long
def test_three_processes_with_replicas_equal_the_sequential_loop():
    assert worst([every((2, 1))[0], every((1, 2))[3], every((2, 1))[5]]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2), (1, 1, 1, 1), (1, 2, 1), (2, 2)])
def test_three_and_four_processes_equal_the_sequential_loop_under_every_rule_and_optimizer(replicas, rule):
    assert worst([case for case in every(replicas) if case.rule == rule]) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("replicas", [(1, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_a_run_with_a_killed_stage_continues_from_the_last_step_that_all_stages_had_saved(replicas, tmp_path):
    """Behind its ninth step stage 1 has saved after six, and stage 0, which is ahead of it, too."""
    case, count = Fitted("stashing", replicas, (6,) * 12, optimizer=ADAMW), sum(replicas)
    results = run_forked(ranks.save_apart, ranks=count, args=[asdict(case), str(tmp_path), 8, False])
    assert results[1] is None  # killed before it could say anything
    assert str(results[0]).startswith("PeerError")
    stopped = Checkpoint.open(tmp_path).step
    assert stopped == 6
    result = run_forked(ranks.save_apart, ranks=count, args=[asdict(case), str(tmp_path), 99, True])
    expected, _ = streamed.train_reference(replace(case, flushes=(stopped,)))
    assert max(relative_difference(result[0][name], value) for name, value in expected.items()) <= TOLERANCE
    assert not list(tmp_path.glob("*.tmp-*"))
