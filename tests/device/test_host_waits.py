"""How often a step waits for the device: from the third step on not at all, but where the host has to decide."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.testing.device_survey import batches, build, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")


def count_waits(name, plan, **options):
    """Return the waits of the sixth step. The device is at most half a step behind the host."""
    step, _ = make_step(name, plan, StandInAccelerator(), **options)
    with step:
        *before, fourth, fifth, sixth = itertools.islice(itertools.cycle(list(batches(name))), 6)
        for batch in before:
            step(*batch)
        num_launches = DEVICE.num_launches
        step(*fourth)  # the third and the fifth one check the loss, too
        half = (DEVICE.num_launches - num_launches) // 2
        step(*fifth)
        with DEVICE.count_host_waits(max_operations_behind=half) as waits:
            step(*sixth)
    return waits


@pytest.mark.long(quick=["loss scale-mlp-data(2) + overlap"])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mlp", "solo"),
        ("mlp", "data(2) + overlap"),
        ("mlp", "zero(2, level=1)"),
        ("mlp", "zero(2, level=2)"),
        ("mlp", "zero(2, level=3)"),
        ("gpt", "zero(2, level=3) + overlap + prefetch:2"),
        ("mlp", "pipeline(2) + recompute"),
        ("mlp", "pipeline(2, schedule=interleaved, chunks_per_stage=2)"),
        ("mlp", "pipeline(2, schedule=zero_bubble)"),
        ("mlp", "pipeline(2) * data(2)"),
        ("experts", "tensor(2)"),
        ("mlp", "tensor(2) + recompute + partition_activations"),
        ("gpt", "pipeline(2)"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.5, "nonfinite": "skip"},
        {"clip_norm": 0.5, "loss_scale": "dynamic"},
        {"clip_norm": 0.5, "precision": "fp16"},
    ],
    ids=["", "clip and skip", "loss scale", "precision"],
)
def test_a_step_does_not_wait_for_the_device(name, plan, options):
    assert not count_waits(name, plan, **options)


@pytest.mark.long(quick=["mlp-data(2, compress=powersgd)-2", "embedding-data(2)-2", "mlp-server(2)-2"])
@pytest.mark.parametrize(
    ("name", "plan", "num_waits"),
    [
        ("mlp", "data(2, compress=powersgd)", 2),
        ("mlp", "data(2, reduce=adasum)", 2),
        ("mlp", "server(2)", 2),
        ("embedding", "data(2)", 2),
    ],
)
def test_a_step_that_the_host_decides_waits_at_most_once_for_each_rank(name, plan, num_waits):
    waits = count_waits(name, plan)
    assert sum(waits.values()) <= num_waits, waits


def test_reading_a_loss_waits_once():
    step, _ = make_step("mlp", "data(2)", StandInAccelerator())
    with step:
        for batch in itertools.islice(batches("mlp"), 3):
            loss = step(*batch)
        with DEVICE.count_host_waits() as waits:
            assert float(loss) == loss
            assert f"{loss:.2f}" == f"{float(loss):.2f}"
        assert sum(waits.values()) == 1


class WaitsOfSteps(cp.Callback):
    """Counts the waits between the reports of steps."""

    def __init__(self):
        self.totals, self.losses = [], []

    def on_step(self, event):
        self.totals.append(DEVICE.host_waits.total())
        self.losses.append(event.loss)


@pytest.mark.long
def test_a_fit_with_a_run_folder_does_not_wait_for_the_device(tmp_path):
    inputs, targets = (
        torch.cat(parts) for parts in zip(*itertools.islice(itertools.cycle(list(batches("mlp"))), 20), strict=True)
    )
    waits = WaitsOfSteps()
    trainer = cp.Trainer(
        build("mlp"), loss=F.cross_entropy, optimizer=partial(optim.AdamW, lr=1e-2), strategy="data(2)",
        device=StandInAccelerator(), progress="off", callbacks=[waits],
    )  # fmt: skip
    with trainer, DEVICE.count_host_waits(max_operations_behind=300):
        history = trainer.fit(TensorDataset(inputs, targets), batch_size=4, epochs=1, run_dir=tmp_path)
    assert waits.losses == list(history.losses)
    assert len(waits.losses) == 20
    by_step = [after - before for before, after in itertools.pairwise(waits.totals)]
    # a step is reported after the next one, the last one at the end; the fourth one is traced
    assert by_step[4:18] == [0] * 14


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2) + recompute", "tensor(2)"])
def test_no_call_of_a_step_on_a_gpu_synchronizes(plan):
    """torch counts copies and numbers that are read; the step waits for an event of the step before."""
    step, _ = make_step("mlp", plan, "cuda", clip_norm=0.5, nonfinite="skip")
    with step:
        *before, last = itertools.islice(batches("mlp"), 4)
        for batch in before:
            step(*batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*last)
        finally:
            torch.cuda.set_sync_debug_mode("default")
