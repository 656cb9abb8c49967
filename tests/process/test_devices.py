"""The survey of a device in real processes: its tensors travel over process groups, of its own or staged by gloo."""

from dataclasses import replace

import pytest

import counterpoint as cp
from counterpoint.errors import CounterpointError
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.launchers.environment import detect
from counterpoint.testing.device_survey import CASES, TOLERANCE, SurveyCase, largest_difference, train
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.testing.stand_in_process_group import over_stand_in_groups
from counterpoint.training.distributed_world import connected_fabrics, open_world
from tests.process.forked_ranks import run_forked

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]
ALL = [(case.model, case.plan) for case in CASES if not case.options]
SOME = [
    ("mlp", "data(2) + overlap"), ("mlp", "data(2, bucket=0, first_bucket=0) + overlap"),
    ("mlp", "zero(2, level=3) + overlap + prefetch"), ("mlp", "zero(4, level=2)"), ("mlp", "data(2, compress=topk)"), ("mlp", "zero(2, level=2)"), ("embedding", "data(2)"),
    ("gpt", "zero(2, level=3)"), ("cnn", "pipeline(2)"), ("experts", "tensor(2)"), ("sync_batch_norm", "data(2)"),
    ("mlp", "pipeline(2, schedule=zero_bubble)"), ("gpt", "pipeline(2)"), ("mlp", "server(2, consistency=asp)"),
    ("embedding", "server(2)"),
]  # fmt: skip
"""Each kind of exchange and each model once."""
OWN_LOSSES = ("asp", "downpour", "project_adam", "parameter_server_strategy", "easgd")
"""In names of plans whose workers have losses of their own: they train, and nothing more is compared."""


def num_ranks(plan):
    return cp.Plan.parse(plan.split(" + ")[0]).num_ranks


def own_groups(environment):
    """Connect this rank's processes by process groups of the device, as GPUs are by NCCL; return the environment."""
    environment = replace(environment, transport="gloo")
    (control,) = open_world(environment, environment.world_size, 60.0).fabrics
    assert isinstance(control, GlooFabric)
    connected_fabrics(environment)[:] = [over_stand_in_groups(control)]
    return environment


def survey(pairs, has_own_groups):
    """Return for each model and plan by how much the device differs from the CPU in one process, or what is wrong."""
    result: dict[str, float | str] = {}
    detected = detect()
    assert detected is not None, "a rank has been told who it is"
    alone = replace(detected, world_size=1, rank=0)
    together = own_groups(detected) if has_own_groups else replace(detected, transport="process_group")
    for model, plan in pairs:
        case = SurveyCase(model, plan)
        try:
            expected = train(case, "cpu", environment=alone)
            DEVICE.default_number = 1  # as cuda:0 is the current device of a process that computes on cuda:1
            actual = train(case, StandInAccelerator(), environment=together)
            DEVICE.require_no_races()
            is_comparable = not any(word in plan for word in OWN_LOSSES)
            result[f"{model} {plan}"] = largest_difference(actual, expected) if is_comparable else 0.0
        except CounterpointError as error:
            result[f"{model} {plan}"] = f"{type(error).__name__}: {error}"
    return result


def jobs(cases):
    """Return the cases in lists of a few that have the same number of ranks."""
    by_count: dict[int, list[tuple[str, str]]] = {}
    for case in cases:
        by_count.setdefault(num_ranks(case[1]), []).append(case)
    by_count.pop(1, None)
    lists = [of_count[at : at + 6] for of_count in by_count.values() for at in range(0, len(of_count), 6)]
    return [pytest.param(some, id=f"{num_ranks(some[0][1])} ranks, {some[0][0]} {some[0][1]}") for some in lists]


def require_equal(cases, *, has_own_groups):
    for by_case in run_forked(survey, ranks=num_ranks(cases[0][1]), args=[cases, has_own_groups]):
        assert isinstance(by_case, dict), by_case
        assert {key: value for key, value in by_case.items() if isinstance(value, str) or not value <= TOLERANCE} == {}


@pytest.mark.long
@pytest.mark.parametrize("cases", jobs(SOME))
@pytest.mark.parametrize("has_own_groups", [False, True], ids=["staged", "own groups"])
def test_a_device_in_processes_has_the_numbers_of_the_cpu_in_one(cases, has_own_groups):
    require_equal(cases, has_own_groups=has_own_groups)


@pytest.mark.slow
@pytest.mark.parametrize("cases", jobs([pair for pair in ALL if pair not in SOME]))
@pytest.mark.parametrize("has_own_groups", [False, True], ids=["staged", "own groups"])
def test_every_plan_and_model_on_a_device_in_processes_has_the_numbers_of_the_cpu_in_one(cases, has_own_groups):
    require_equal(cases, has_own_groups=has_own_groups)
