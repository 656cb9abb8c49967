"""Every strategy, system and kind of model has the CPU's numbers on a device that is not the host."""

import math

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.registry import STRATEGIES
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.covering import each_value_once
from tests.device.survey_cases import BUILDERS, MODEL_PLANS, PLANS, SYSTEMS, train

TOLERANCE = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore")  # the CPU's run warns as well

CASES = [("mlp", plan) for plan in dict.fromkeys(PLANS + SYSTEMS)]
CASES += each_value_once([name for name in BUILDERS if name != "mlp"], MODEL_PLANS)


def differences(actual, expected):
    (losses, weights), (expected_losses, expected_weights) = actual, expected
    for loss, other in zip(losses, expected_losses, strict=True):
        if not (math.isnan(loss) and math.isnan(other)):  # a pipeline without a flush has no loss at first
            yield abs(loss - other)
    for name, value in weights.items():
        yield float((value.double() - expected_weights[name].double()).abs().max())


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_device_has_the_numbers_of_the_cpu(name, plan):
    expected = train(name, plan, "cpu")
    assert max(differences(train(name, plan, StandInAccelerator()), expected)) <= TOLERANCE
    DEVICE.require_no_races()


def test_what_the_cpu_refuses_is_refused_with_the_same_words():
    errors = []
    for device in ("cpu", StandInAccelerator()):
        with pytest.raises(PlanError, match=r"share weights, but under .*; untie them") as found:
            train("gpt", "pipeline(2, schedule=pipedream)", device)
        errors.append(str(found.value))
    assert errors[0] == errors[1]


def test_every_name_is_in_the_survey():
    plans = " ".join(PLANS + SYSTEMS)
    aliases = {"zero1", "zero2", "zero3", "one_f_one_b", "interleaved", "bsp", "ssp", "asp"}
    assert not [name for name in STRATEGIES if name not in aliases and f"{name}(" not in plans]
