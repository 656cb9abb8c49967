"""Optimizers that need norms of whole parameters: every plan that keeps these whole equals solo, others are refused."""

from functools import cache, partial
from typing import Any

import pytest

from counterpoint.errors import PlanError
from counterpoint.optim.lamb import LAMB
from counterpoint.optim.lars import LARS
from counterpoint.testing import parity
from counterpoint.testing.parity_models import TrainConfig, make_parity_model, plan_for
from counterpoint.testing.reference_loop import train_reference

MAKERS: dict[str, Any] = {
    "LARS": partial(LARS, lr=2.0, trust_coefficient=0.02, weight_decay=0.1),
    "LAMB": partial(LAMB, lr=2e-2, weight_decay=0.1),
}
WHOLE = [
    *("data(2)", "data(4)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "zero(4, level=3)"),
    *("pipeline(2)", "pipeline(4, schedule=gpipe)", "server(2)", "pipeline(2) * data(2)"),
    *("pipeline(2) * zero(2, level=2)", "zero(2, level=1) + overlap"),
]


@cache
def solo(name, model):
    recipe = TrainConfig(MAKERS[name])
    return parity.train(make_parity_model(model), plan_for("solo", 4), recipe), train_reference(
        make_parity_model(model), recipe
    )


@pytest.mark.long(quick=["zero(2, level=1) + overlap-LARS", "pipeline(2) * data(2)-LARS"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("strategy", ["solo", *WHOLE])
def test_a_rate_for_each_layer_is_the_same_under_every_plan(name, strategy):
    reference, plain = solo(name, "mlp")
    if strategy == "solo":
        assert parity.compare("mlp", strategy, reference, plain.params, plain).worst <= parity.TOLERANCE
        return
    run = parity.train(make_parity_model("mlp"), plan_for(strategy, 4), TrainConfig(MAKERS[name]))
    assert parity.compare("mlp", strategy, run, reference.params, plain).worst <= parity.TOLERANCE


@pytest.mark.long(quick=["LARS"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_convolution_is_one_parameter_wherever_its_shard_is(name):
    reference, plain = solo(name, "cnn")
    run = parity.train(make_parity_model("cnn"), plan_for("zero(2, level=3)", 4), TrainConfig(MAKERS[name]))
    assert parity.compare("cnn", "zero(2, level=3)", run, reference.params, plain).worst <= parity.TOLERANCE


@pytest.mark.parametrize("name", MAKERS)
def test_a_plan_that_slices_parameters_is_refused_for_a_norm_of_a_slice_is_another(name):
    text = rf"^{name} may need whole tensors, but under tensor\(2\) a rank has only a shard of .* or data, zero or"
    with pytest.raises(PlanError, match=text):
        parity.train(make_parity_model("mlp"), plan_for("tensor(2)", 4), TrainConfig(MAKERS[name]))
