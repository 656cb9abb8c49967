"""Every strategy, system and kind of model has the CPU's numbers on a device that is not the host."""

import math
from typing import Any

import pytest
import torch

from counterpoint.errors import PlanError
from counterpoint.plan.registry import STRATEGIES
from counterpoint.testing.device_survey import (
    BUILDERS,
    CASES,
    MODEL_PLANS,
    OPTION_PLANS,
    OPTIONS,
    TOLERANCE,
    SurveyCase,
    largest_difference,
    train,
)
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.covering import each_value_once

pytestmark = pytest.mark.filterwarnings("ignore")  # the CPU's run warns as well

CHOSEN: list[Any] = [case for case in CASES if case.model == "mlp" and not case.options]
CHOSEN += [
    pytest.param(SurveyCase(*one.values), marks=one.marks)
    for one in each_value_once([name for name in BUILDERS if name != "mlp"], MODEL_PLANS)
]
CHOSEN += [
    pytest.param(SurveyCase("mlp", *one.values), marks=one.marks)
    for one in each_value_once(OPTION_PLANS, [*OPTIONS, "trainer"])
]


@pytest.mark.long(
    quick=[
        "mlp | zero(2, level=1)",
        "mlp | zero(2, level=2)",
        "mlp | pipeline(2)",
        "mlp | pipeline(2, schedule=pipedream)",
        "mlp | parameter_server_strategy(2)",
    ]
)
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_device_has_the_numbers_of_the_cpu(case):
    expected = train(case, "cpu")
    assert largest_difference(train(case, StandInAccelerator()), expected) <= TOLERANCE
    DEVICE.require_no_races()


def test_a_difference_is_found_and_nan_is_no_number():
    outcome = [1.0, math.nan], {"w": torch.ones(2)}
    assert largest_difference(outcome, outcome) == 0.0
    assert largest_difference(([1.5, math.nan], outcome[1]), outcome) == 0.5
    assert math.isnan(largest_difference(([math.nan, math.nan], outcome[1]), outcome))
    assert math.isnan(largest_difference((outcome[0], {"w": torch.full((2,), math.nan)}), outcome))
    assert math.isnan(largest_difference((outcome[0], {}), outcome))


@pytest.mark.long
def test_what_the_cpu_refuses_is_refused_with_the_same_words():
    errors = []
    for device in ("cpu", StandInAccelerator()):
        with pytest.raises(PlanError, match=r"share weights, but under .*; untie them") as found:
            train(SurveyCase("gpt", "pipeline(2, schedule=pipedream)"), device)
        errors.append(str(found.value))
    assert errors[0] == errors[1]


def test_every_name_is_in_the_survey():
    plans = " ".join(case.plan for case in CASES)
    surveyed = {entry.doc_source for name, entry in STRATEGIES.items() if f"{name}(" in plans}
    assert not [name for name, entry in STRATEGIES.items() if entry.doc_source not in surveyed]
