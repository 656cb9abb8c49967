"""Streams give up "equals solo"; step by step they equal a sequential loop of their rule, over 30 updates and more."""

from dataclasses import replace

import pytest

from counterpoint.testing.parity import TOLERANCE
from tests.equivalence.async_pipeline_cases import ADAMW, MOMENTUM, SLOW, Case, max_error, train

RULES = ["stashing", "vertical_sync", "double_buffer"]


@pytest.mark.long(quick=["stashing-2 momentum"])
@pytest.mark.parametrize(("num_stages", "optimizer"), [(2, MOMENTUM), (4, ADAMW)], ids=["2 momentum", "4 adamw"])
@pytest.mark.parametrize("rule", RULES)
def test_every_stage_reads_the_versions_of_its_rule(rule, num_stages, optimizer):
    assert max_error(Case(rule, (1,) * num_stages, (5,) * 30, optimizer=optimizer)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_it_does_so_with_any_number_of_stages_and_either_optimizer(rule, num_stages, optimizer):
    assert max_error(Case(rule, (1,) * num_stages, (5,) * 30, optimizer=optimizer)) <= TOLERANCE


@pytest.mark.long(quick=["stashing-replicas0-0-sgd"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, pytest.param(ADAMW, marks=pytest.mark.slow)], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    ("rule", "replicas", "per_body"),
    [("stashing", (2, 1), 0), ("vertical_sync", (1, 2), 0), ("double_buffer", (2, 1), 4), ("stashing", (1, 2, 1), 0)],
)
def test_replicas_of_a_stage_take_turns_and_update_with_the_mean_over_their_samples(
    rule, replicas, per_body, optimizer
):
    """Every third batch has a sample less, so that its microbatches differ in size."""
    assert max_error(Case(rule, replicas, (8, 8, 7) * 10, per_body, optimizer)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SLOW, ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replicas", [(2, 2), (3, 1), (2, 3), (2, 1, 2), (3, 2, 1), (3, 2, 1, 1)])
def test_stages_with_any_replicas_read_the_versions_of_their_rule(rule, replicas, optimizer):
    """A stage that updates after every microbatch meets gradients five updates late: a large rate enlarges rounding."""
    assert max_error(Case(rule, replicas, (25,) * 30, per_body=12, optimizer=optimizer)) <= TOLERANCE


@pytest.mark.long(quick=["double_buffer"])
@pytest.mark.parametrize("rule", RULES)
def test_after_a_flush_the_first_batches_meet_the_newest_weights(rule):
    assert max_error(Case(rule, (1, 1, 1), (5,) * 12, optimizer=ADAMW, flushes=(1, 3, 8))) <= TOLERANCE


@pytest.mark.long(quick=["vertical_sync"])
@pytest.mark.parametrize("rule", RULES)
def test_batches_may_be_fewer_than_stages_and_leave_some_microbatches_empty(rule):
    """With two replicas in front, a batch of one sample is one microbatch of it and one of nothing."""
    assert max_error(Case(rule, (2, 1, 1), (3, 1), per_body=4 if rule == "double_buffer" else 2)) <= TOLERANCE


@pytest.mark.long(quick=["stashing-replicas0-0"])
@pytest.mark.parametrize(
    ("rule", "replicas", "per_body"),
    [("stashing", (1, 1, 1), 0), ("vertical_sync", (2, 1), 0), ("double_buffer", (1, 2), 4)],
)
def test_each_stage_may_be_clipped_by_the_norm_of_its_own_gradient(rule, replicas, per_body):
    case = Case(rule, replicas, (8, 8, 7) * 4, per_body, clip=0.05)
    assert max_error(case) <= TOLERANCE
    assert max_error(replace(case, clip=None), train(case)) > 1e-3
