"""Clipping, skipping, recomputation, dropout, a run folder and callbacks together: no wait, the masks of one rank."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.testing.device_survey import batches, build, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.device.test_host_waits import WaitsOfSteps

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STEPS = 12
PLANS = (
    "solo",
    "data(2) + overlap",
    "zero(2, level=1)",
    "zero(2, level=2)",
    "zero(2, level=3) + overlap + prefetch",
    "zero(2, level=3) + overlap + prefetch:2",
    "pipeline(2)",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2)",
    "pipeline(2, schedule=zero_bubble)",
    "pipeline(2) * data(2)",
    "tensor(2)",
)


def fit(name, plan, folder, device, **options):
    """Train with everything; return losses, weights and the waits between the reports of steps."""
    text, *passes = plan.split(" + ")
    parts = [torch.cat(part) for part in zip(*itertools.islice(itertools.cycle(batches(name)), 5), strict=True)]
    waits, model = WaitsOfSteps(), build(name)
    trainer = cp.Trainer(
        model, loss=sequence_loss if name == "gpt" else F.cross_entropy, optimizer=partial(optim.AdamW, lr=1e-2),
        strategy=text, passes=tuple(passes), clip_norm=0.5, nonfinite="skip", device=device, progress="off",
        num_microbatches=2 if "pipeline" in plan else 1, callbacks=[waits], **options,
    )  # fmt: skip
    with trainer, DEVICE.count_host_waits(max_operations_behind=150):
        history = trainer.fit(TensorDataset(*parts), batch_size=4, epochs=4, run_dir=folder)
    DEVICE.require_no_races()
    weights = {key: value.cpu() for key, value in model.state_dict().items()}
    return list(history.losses), weights, [after - before for before, after in itertools.pairwise(waits.totals)]


@pytest.mark.long(quick=["gpt-data(2) + overlap"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_fit_with_everything_does_not_wait(name, plan, tmp_path):
    _, _, by_step = fit(name, plan + " + recompute", tmp_path, StandInAccelerator())
    assert sum(by_step[:4]) > 0  # the traced step is read, so that waits are counted
    within_epochs = [waits for number, waits in enumerate(by_step[4:-1], 4) if (number + 1) % 5]
    assert within_epochs == [0] * len(within_epochs)


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("plan", PLANS[1:])
def test_dropout_has_the_masks_of_one_rank_under_every_plan(plan, tmp_path):
    losses, weights, _ = fit("gpt", plan, tmp_path / "plan", StandInAccelerator())
    expected_losses, expected, _ = fit("gpt", "solo", tmp_path / "solo", StandInAccelerator())
    assert losses == pytest.approx(expected_losses, rel=1e-11)
    assert all(torch.allclose(weights[key], value, rtol=1e-9, atol=1e-12) for key, value in expected.items())


def take_steps(plan, passes):
    """Return losses and weights of a model with dropout, without clipping, whose norm is summed in another order."""
    step, model = make_step("gpt", plan, StandInAccelerator(), passes=passes)
    with step:
        losses = [float(step(*batch)) for batch in itertools.islice(batches("gpt"), 3)]
    return losses, {key: value.cpu() for key, value in model.state_dict().items()}


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_with_dropout_changes_no_bit(plan):
    text, *passes = plan.split(" + ")
    losses, weights = take_steps(text, tuple(passes))
    again, other = take_steps(text, (*passes, "recompute"))
    assert losses == again
    assert all(torch.equal(weights[key], value) for key, value in other.items())
