"""What level 3 of ZeRO gathers together changes no number: small weights stay whole, or blocks are merged to units."""

from itertools import product

import pytest
from torch import nn

from counterpoint.program.units import freed_weights
from counterpoint.testing import parity
from counterpoint.testing.parity_models import TrainConfig, make_parity_model, plan_for
from tests.training.trainers import build_seeded, fit, max_difference, mlp

THRESHOLDS = {"mlp": 216, "cnn": 100, "gpt": 1000, "adapter": 40}
"""Elements of the largest unit that stays whole: in each model some do and some do not."""
PLANS = tuple(
    f"zero(2, level=3, reshard_after_forward={reshard}, persistence_threshold={{threshold}}){passes}"
    for reshard, passes in product(("on", "off"), ("", " + overlap", " + overlap + prefetch"))
)


class Adapter(nn.Module):
    """A frozen linear layer, and a product of low rank that is trained."""

    def __init__(self, width, rank, num_outputs):
        super().__init__()
        self.frozen = nn.Linear(width, num_outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, num_outputs, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def adapter():
    return build_seeded(lambda: nn.Sequential(Adapter(6, 4, 8), nn.Tanh(), Adapter(8, 2, 3)))


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_of_each_model_some_weights_are_gathered_before_use_and_some_after_the_update(name):
    plan = plan_for(PLANS[0].format(threshold=THRESHOLDS[name]), 4)
    run = parity.train(make_parity_model(name), plan, TrainConfig())
    units = run.compiled.model.units
    freed = freed_weights(one for _, one in run.compiled.program.instructions())
    assert 0 < len(freed) < len(units)
    assert {unit for unit in units if run.compiled.model.unit_elements(unit) <= THRESHOLDS[name]} == {*units} - freed


@pytest.mark.long(quick=["mlp-0", "cnn-5", "gpt-2"])
@pytest.mark.parametrize("index", range(len(PLANS)))
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_five_steps_end_where_one_device_ends(name, index):
    plan = PLANS[index].format(threshold=THRESHOLDS[name])
    assert parity.check_parity(name, plan).worst <= parity.TOLERANCE


@pytest.mark.long(quick=["5"])
@pytest.mark.parametrize("index", range(len(PLANS)))
def test_adapters_beside_frozen_weights_end_where_one_device_ends(index):
    weights, history = fit("solo", adapter(), epochs=2)
    found, other = fit(PLANS[index].format(threshold=THRESHOLDS["adapter"]), adapter(), epochs=2)
    assert max_difference(found, weights) <= 1e-12
    assert other.losses == pytest.approx(history.losses, rel=1e-12)


@pytest.mark.long(quick=["pipeline"])
@pytest.mark.parametrize(
    "plan",
    ["pipeline(2) * {zero}", "{zero} * data(2)", "data(2) * {zero}", "tensor(2) * {zero}"],
    ids=["pipeline", "outer", "inner", "tensor"],
)
def test_compositions_end_where_one_device_ends(plan):
    zero = "zero(2, level=3, persistence_threshold=50)"
    weights, history = fit("solo")
    found, other = fit(plan.format(zero=zero))
    assert max_difference(found, weights) <= 1e-12
    assert other.losses == pytest.approx(history.losses, rel=1e-12)


@pytest.mark.long(quick=["gpt-True"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_merged_blocks_end_where_one_device_ends(name, keeps):
    option = f", reshard_after_forward=off, persistence_threshold={THRESHOLDS[name]}" if keeps else ""
    plan = f"zero(2, level=3, min_num_params=300{option}) + overlap + prefetch"
    assert parity.check_parity(name, plan).worst <= parity.TOLERANCE


@pytest.mark.long(quick=["adapter"])
@pytest.mark.parametrize(
    ("plan", "build"),
    [
        ("zero(2, level=3, min_num_params=100)", adapter),
        ("zero(2, level=3, min_num_params=100) * data(2)", mlp),
        ("tensor(2) * zero(2, level=3, min_num_params=100)", mlp),
        ("zero(2, level=3, min_num_params=100) + overlap + recompute", mlp),
    ],
    ids=["adapter", "data", "tensor", "recompute"],
)
def test_merged_blocks_of_other_plans_end_there_too(plan, build):
    weights, history = fit("solo", build())
    found, other = fit(plan, build())
    assert max_difference(found, weights) <= 1e-12
    assert other.losses == pytest.approx(history.losses, rel=1e-12)


SPLIT_POINTS = {"mlp": "2", "cnn": "3+8", "gpt": "blocks.1+blocks.2.mlp"}


@pytest.mark.long(quick=["gpt-0"])
@pytest.mark.parametrize("index", range(len(PLANS)))
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_units_that_begin_with_named_modules_end_where_one_device_ends(name, index):
    plan = PLANS[index].format(threshold=0).replace("threshold=0", f"threshold=0, split_points={SPLIT_POINTS[name]}")
    assert parity.check_parity(name, plan).worst <= parity.TOLERANCE


@pytest.mark.parametrize(
    ("name", "split_points", "units"),
    [
        ("mlp", "2", ["0", "2..6"]),
        ("mlp", "6+2", ["0", "2..4", "6"]),
        ("gpt", "blocks.0+blocks.2.mlp", ["tok..pos", "blocks.0.norm1..blocks.2.norm2", "blocks.2.mlp.fc..proj..head"]),
    ],
)
def test_units_begin_with_the_named_modules_and_with_no_others(name, split_points, units):
    plan = plan_for(f"zero(2, level=3, split_points={split_points})", 4)
    run = parity.train(make_parity_model(name), plan, TrainConfig())
    assert [block.name for block in run.compiled.model.blocks] == units
