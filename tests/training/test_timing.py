"""Runs that are given a timing: their pipelines are cut by its seconds."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.runtime.optimizers import Face
from counterpoint.training.choice import trace_spec
from counterpoint.training.cutting import plan_in_words
from counterpoint.training.profiling import subject_of
from tests.model.timings import timing_of, took

SLOW_LAST = [took(1.0, 2.0), took(1.0, 2.0), took(1.0, 2.0), took(3.0, 6.0)]


def layers(width=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def timing(pieces=SLOW_LAST):
    model = layers()
    face = Face(optim.SGD, dict(model.named_parameters()))
    spec = subject_of(model, (torch.zeros(2, 4),), torch.zeros(2, 4), loss=F.mse_loss, face=face).spec
    return timing_of(spec, pieces)


def step(model, **options):
    optimizer = partial(optim.SGD, lr=0.1)
    return cp.parallelize(model, optimizer, F.mse_loss, **{"strategy": "pipeline(2)", **options})


def compiled(**options):
    """What a run has made of its plan."""
    with step(layers(), **options) as run:
        run(torch.zeros(4, 4), torch.zeros(4, 4))
        return run.team.compiled


def stages(**options):
    """How many blocks each stage runs."""
    return [len(rank.blocks) for rank in compiled(**options).forecast.ranks]


def test_a_pipeline_with_a_timing_is_cut_where_the_seconds_are_even():
    assert stages() == [2, 2]
    assert stages(timing=timing()) == [3, 1]


def test_a_run_tells_the_plan_with_the_cut_that_a_timing_gave_it_and_repeats_it_without_the_timing():
    made = compiled(timing=timing())
    assert str(made.plan) == "pipeline(2, balance=(3,1))"
    assert made.plan.timing == timing()
    again = compiled(strategy=cp.Plan.from_yaml(made.plan.to_yaml()))
    assert again.program == made.program


def test_a_timing_of_another_model_is_refused_before_the_first_step():
    with step(layers(width=8), timing=timing()) as run, pytest.raises(PlanError, match="the timing is of Chain, and"):
        run(torch.zeros(4, 8), torch.zeros(4, 8))


def test_what_is_no_timing_is_refused():
    with pytest.raises(PlanError, match=r"timing='fast' is a str; give what counterpoint.profile"):
        step(layers(), timing="fast")


def test_ranks_with_other_timings_have_other_plans():
    plan = cp.Plan.parse("pipeline(2)", num_microbatches=2)
    said = [plan_in_words(plan, one) for one in (None, timing(), timing(SLOW_LAST[::-1]))]
    assert said[0] == "pipeline(2) with 2 microbatches"
    assert len(set(said)) == 3


def test_a_sequential_is_described_as_pipelines_get_it_and_as_slices_do():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    spec = trace_spec(model, Face(optim.SGD, dict(model.named_parameters())), torch.zeros(2, 4), None)
    assert [block.name for block in spec.unsliced.blocks] == ["0", "2"]
    assert spec.num_blocks == 1
