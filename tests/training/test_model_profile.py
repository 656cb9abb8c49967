"""Runs that are given a profile: their pipelines are split by its seconds."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.model_partition import plan_fingerprint
from counterpoint.training.plan_resolution import trace_model_spec
from counterpoint.training.profiling import build_profile_target
from counterpoint.world.cluster import Device
from tests.model.profiles import build_profile, layer_profile

SLOW_LAST = [layer_profile(1.0, 2.0), layer_profile(1.0, 2.0), layer_profile(1.0, 2.0), layer_profile(3.0, 6.0)]


def layers(width=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def timing(pieces=SLOW_LAST):
    model = layers()
    optimizer_spec = OptimizerSpec(optim.SGD, dict(model.named_parameters()))
    spec = build_profile_target(
        model, (torch.zeros(2, 4),), torch.zeros(2, 4), loss=F.mse_loss, optimizer_spec=optimizer_spec
    ).spec
    return build_profile(spec, pieces)


def step(model, **options):
    optimizer = partial(optim.SGD, lr=0.1)
    return cp.parallelize(model, optimizer, F.mse_loss, **{"strategy": "pipeline(2)", **options})


def compiled(**options):
    """What a run has made of its plan."""
    with step(layers(), **options) as run:
        run(torch.zeros(4, 4), torch.zeros(4, 4))
        return run.local_ranks.compiled


def stages(**options):
    """How many blocks each stage runs."""
    return [len(rank.blocks) for rank in compiled(**options).cost.ranks]


def test_a_pipeline_with_a_profile_is_split_where_the_seconds_are_even():
    assert stages() == [2, 2]
    assert stages(profile=timing()) == [3, 1]


def test_a_run_tells_the_plan_with_the_split_that_a_profile_gave_it_and_repeats_it_without_the_profile():
    compiled_plan = compiled(profile=timing())
    assert str(compiled_plan.plan) == "pipeline(2, balance=(3,1))"
    assert compiled_plan.plan.profile == timing()
    again = compiled(strategy=cp.Plan.from_yaml(compiled_plan.plan.to_yaml()))
    assert again.program == compiled_plan.program


def test_a_profile_of_another_model_is_refused_before_the_first_step():
    with step(layers(width=8), profile=timing()) as run, pytest.raises(PlanError, match="the profile is of Chain, but"):
        run(torch.zeros(4, 8), torch.zeros(4, 8))


def test_what_is_no_timing_is_refused():
    with pytest.raises(PlanError, match=r"profile='fast' is a str; give what counterpoint.profile"):
        step(layers(), profile="fast")


def test_ranks_with_other_timings_have_other_plans():
    plan = cp.Plan.parse("pipeline(2)", num_microbatches=2)
    fingerprints = [plan_fingerprint(plan, one) for one in (None, timing(), timing(SLOW_LAST[::-1]))]
    assert fingerprints[0] == "pipeline(2) with 2 microbatches"
    assert len(set(fingerprints)) == 3


def test_a_sequential_is_described_as_pipelines_get_it_and_as_shards_do():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    spec = trace_model_spec(model, OptimizerSpec(optim.SGD, dict(model.named_parameters())), torch.zeros(2, 4), None)
    assert [block.name for block in spec.without_tp.blocks] == ["0", "2"]
    assert spec.num_blocks == 1


class ScaledError(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, targets):
        return F.mse_loss(self.scale * output, targets)


@pytest.mark.long(quick=["counted"])
@pytest.mark.parametrize("device", [None, Device(cost_per_s=1.0, memory_bytes_per_s=1e9)], ids=["measured", "counted"])
def test_a_model_whose_loss_has_parameters_is_profiled(device):
    """The optimizer of such a recipe was refused for holding a tensor that the model does not train."""
    model, loss = layers(), ScaledError()
    optimizer = optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    batch = torch.ones(8, 4)
    profile = cp.profile(
        model, batch, batch, loss=loss, optimizer=optimizer, roofline_device=device, microbatch_sizes=(8,)
    )
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3"]
    assert (loss.scale.item(), loss.scale.grad) == (1.0, None)
