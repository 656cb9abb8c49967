"""Ranks of several processes compare what they compute on before the first step."""

import re
import warnings
from dataclasses import replace

import pytest

from counterpoint.device.accelerator import DeviceIdentity
from counterpoint.errors import CounterpointError
from counterpoint.launchers.environment import detect
from counterpoint.testing.device_survey import SurveyCase, train
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.training.agreement.device_facts import RankDevice, describe_differences, require_own_devices
from tests.process.forked_ranks import run_forked
from tests.process.test_devices import own_groups

CARD = DeviceIdentity("A100", 80 << 30, "uuid-0", "560.1", "NCCL 2.29.7")
SAME = (
    r"ranks 0, 1 of host .* compute on the same GPU, uuid-0 \(A100 with 80 GiB\), and NCCL takes one .*\(these use 1\)"
)
KINDS = r"different GPUs: A100 with 80 GiB \(rank 0\), V100 with 16 GiB \(rank 1\); .* wait for the slowest, .* choose"


def train_on(identities, has_own_groups):
    """Train on devices of these identities; return the warnings, and the error."""
    detected = detect()
    assert detected is not None
    DEVICE.identity = identities[detected.rank]
    environment = own_groups(detected) if has_own_groups else replace(detected, transport="gloo")
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(SurveyCase("mlp", "data(2)"), StandInAccelerator(), environment=environment)
        except CounterpointError as found:
            error = str(found)
    return [str(one.message) for one in caught], error


def outcomes(*identities, has_own_groups=True):
    return run_forked(train_on, ranks=2, args=[identities, has_own_groups])


@pytest.mark.process
@pytest.mark.long
def test_two_ranks_on_one_gpu_are_refused_on_both():
    assert [bool(re.search(SAME, error)) for _, error in outcomes(CARD, CARD)] == [True, True]


@pytest.mark.process
@pytest.mark.long
def test_cards_that_differ_are_a_notice_of_rank_0():
    other = DeviceIdentity("V100", 16 << 30, "uuid-1", "560.1", "NCCL 2.29.7")
    (texts, error), (other_texts, other_error) = outcomes(CARD, other)
    assert (error, other_error) == ("", "")
    assert [bool(re.search(KINDS, text)) for text in texts if "GPU" in text] == [True]
    assert not [text for text in other_texts if "GPU" in text]


@pytest.mark.process
@pytest.mark.long
def test_a_job_without_nccl_is_told_so():
    for _, error in outcomes(CARD, CARD, has_own_groups=False):
        assert "exchange tensors in host memory only, as torch 2" in error
        assert "has no NCCL here; install a build of torch with it on all hosts" in error


def devices(*identities):
    return {rank: RankDevice(f"host{rank}", identity) for rank, identity in enumerate(identities)}


def test_drivers_and_libraries_that_differ_between_hosts_are_named_with_ranks_and_remedy():
    other = CARD._replace(unique_id="uuid-1", driver="550.2", library="NCCL 2.28.9")
    driver, library = describe_differences(devices(CARD, other, other))
    assert driver.startswith(
        "the drivers of the GPUs differ: 560.1 on host0 (rank 0), 550.2 on host1 (rank 1), 550.2 on"
    )
    assert "install the same driver on all hosts" in driver
    assert "NCCL 2.29.7 on host0 (rank 0), NCCL 2.28.9 on host1" in library


def test_equal_devices_of_several_hosts_are_fine():
    equal = devices(*(CARD._replace(unique_id=f"uuid-{rank}") for rank in range(3)))
    require_own_devices(equal)
    assert not list(describe_differences(equal))
    require_own_devices({})
