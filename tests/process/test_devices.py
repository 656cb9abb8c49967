"""The survey of a device in real processes: tensors of the stand-in device travel over process groups, staged by gloo."""

from dataclasses import replace

import pytest

import counterpoint as cp
from counterpoint.errors import CounterpointError
from counterpoint.launchers.environment import detect
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.device.survey_cases import BUILDERS, MODEL_PLANS, PLANS, SYSTEMS, train
from tests.device.test_survey import differences
from tests.process.forked_ranks import run_forked

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-12
CASES = [("mlp", plan) for plan in dict.fromkeys(PLANS + SYSTEMS)]
CASES += [(name, plan) for name in BUILDERS if name != "mlp" for plan in MODEL_PLANS]


def num_ranks(plan):
    return cp.Plan.parse(plan.split(" + ")[0]).num_ranks


def survey(cases):
    """Return for each case by how much the device differs from the CPU in one process, or what is wrong."""
    result = {}
    alone, together = replace(detect(), world_size=1, rank=0), replace(detect(), transport="process_group")
    for name, plan in cases:
        try:
            expected = train(name, plan, "cpu", environment=alone)
            actual = train(name, plan, StandInAccelerator(), environment=together)
            DEVICE.require_no_races()
            result[f"{name} {plan}"] = max(differences(actual, expected))
        except CounterpointError as error:
            result[f"{name} {plan}"] = f"{type(error).__name__}: {error}"
    return result


@pytest.mark.parametrize("count", sorted({num_ranks(plan) for _, plan in CASES} - {1}))
def test_a_device_in_processes_has_the_numbers_of_the_cpu_in_one(count):
    cases = [case for case in CASES if num_ranks(case[1]) == count]
    for by_case in run_forked(survey, ranks=count, args=[cases]):
        assert isinstance(by_case, dict), by_case
        assert {key: value for key, value in by_case.items() if not value <= TOLERANCE} == {}
