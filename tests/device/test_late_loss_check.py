"""Checks of the loss whose figures stay on the device: the host reads them a step later, and weights stay as they are."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from counterpoint.errors import DataError
from counterpoint.runtime.loss.loss_check import LossCheck
from counterpoint.testing.device_survey import batches, build, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.device.test_device_commit import assert_equal, state_of

pytestmark = pytest.mark.filterwarnings("ignore")
STEP = 4  # the first step with padding, which is one whose loss is checked


def mean_of_targets(output, targets):
    """Return a mean over targets that count, which is not declared as one."""
    losses = F.cross_entropy(output, targets.clamp(min=0), reduction="none")
    counts = (targets >= 0).to(losses.dtype)
    return (losses * counts).sum() / counts.sum()


def padded(batch):
    """Return a batch of which all but one of the first samples do not count."""
    inputs, targets = batch
    return inputs, torch.cat([torch.tensor([-100]), targets[1:]])


def make(plan, device, **options):
    """Return a step with a loss that does not add up where targets are padded, and its model."""
    model = build("mlp")
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return cp.parallelize(
        model, optimizer, mean_of_targets, strategy=plan, device=device, timeout_s=20.0, **options
    ), model


@pytest.mark.long(quick=["zero(2, level=3)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
def test_a_loss_that_does_not_add_up_is_named_with_its_own_step_and_changes_no_bit(plan):
    samples = list(itertools.islice(itertools.cycle(list(batches("mlp"))), STEP + 2))
    step, model = make(plan, StandInAccelerator(), num_microbatches=1 if plan in {"data(2)", "zero(2, level=3)"} else 2)
    with step:
        for batch in samples[:STEP]:
            step(*batch)
        before = state_of(step, model)
        step(*padded(samples[STEP]))
        with pytest.raises(
            DataError, match=rf"step {STEP} cannot be applied: the loss at microbatch 0 is .* return cp\.Wei"
        ):
            step(*samples[STEP + 1])
        assert_equal(state_of(step, model), before)


def test_where_the_host_decides_the_error_is_that_of_the_step_itself():
    step, _ = make("data(2, compress=topk)", StandInAccelerator())
    samples = list(itertools.islice(itertools.cycle(list(batches("mlp"))), STEP + 1))
    with step:
        for batch in samples[:STEP]:
            step(*batch)
        with pytest.raises(DataError, match=f"step {STEP} cannot be applied: the loss at microbatch 0 is"):
            step(*padded(samples[STEP]))


def count_waits(name, plan, half):
    """Return the waits of the third to the ninth step, and the operations of the fourth one, which checks no loss.

    Args:
        name: of the model.
        plan: of the step.
        half: how many operations the device is behind the host at most.
    """
    step, _ = make_step(name, plan, StandInAccelerator(), num_microbatches=2)
    samples = itertools.islice(itertools.cycle(list(batches(name))), 9)
    launches = []
    with step:
        for batch in itertools.islice(samples, 2):
            step(*batch)
        with DEVICE.count_host_waits(max_operations_behind=half) as waits:
            for batch in samples:
                launches.append(DEVICE.num_launches)
                step(*batch)
    return waits.total(), launches[2] - launches[1]


@pytest.mark.long(quick=["data(2)-mlp"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("plan", ["data(2)", "pipeline(2) + recompute"])
def test_no_step_from_the_third_on_waits_also_if_it_checks_the_loss(name, plan):
    _, num_operations = count_waits(name, plan, 0)
    assert count_waits(name, plan, num_operations // 2)[0] == 0


LOSSES = {
    "mean": F.cross_entropy,
    "sum": lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
    "weighted mean": lambda output, targets: cp.WeightedMean(
        (F.cross_entropy(output, targets, reduction="none") * targets).sum(), targets.double().sum()
    ),
    "mean over targets": lambda output, targets: mean_of_targets(output, targets - 1),
    "largest": lambda output, targets: F.cross_entropy(output, targets, reduction="none").max(),
    "median": lambda output, targets: F.cross_entropy(output, targets, reduction="none").median(),
    "nan": lambda output, targets: F.cross_entropy(output, targets) * torch.nan,
    "nan in parts": lambda output, targets: F.cross_entropy(output, targets) * (torch.nan if len(targets) < 4 else 1),
    "draws": lambda output, targets: F.cross_entropy(F.dropout(output), targets),
}


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_check_on_a_device_has_the_result_of_one_on_the_host(loss, count, is_sum):
    draw = torch.Generator().manual_seed(count)
    found = []
    for may_be_late in (False, True):
        check = LossCheck(LOSSES[loss], is_sum=is_sum, may_be_late=may_be_late)
        for step in (2, 4):
            draw.manual_seed(step)
            output = torch.randn(count, 4, dtype=torch.float64, generator=draw).to(DEVICE.device)
            targets = torch.randint(0, 4, (count,), generator=draw).to(DEVICE.device)
            found.append((may_be_late, step, message_of(check, step, output, targets)))
    half = len(found) // 2
    assert [message for _, _, message in found[:half]] == [message for _, _, message in found[half:]]


def message_of(check, step, output, targets):
    """Return the error of a check, read at once or later; empty for none."""
    value = check.loss(output, targets)
    value = value.total / value.weight if isinstance(value, cp.WeightedMean) else value
    try:
        check.check(check.loss, step, output, targets, value, len(targets), "a batch")
        for late_check in check.take_late_checks():
            check.require_good(late_check, late_check.pack().tolist())
    except DataError as error:
        return str(error)
    return ""
