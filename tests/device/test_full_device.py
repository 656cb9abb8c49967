"""A device that is full: what a step needs by prediction, what is free, and the smallest change that fits."""

import gc
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.data.sampler import split_batch
from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.training.ranks.device_memory import possible_changes, predict_bytes

KIB = 1 << 10


@pytest.fixture
def limit(monkeypatch):
    """Let the device have so many bytes, all of them free: what other tests keep there is not counted."""

    def leave(num_bytes):
        gc.collect()
        monkeypatch.setattr(DEVICE, "allocated_bytes", 0)
        monkeypatch.setattr(DEVICE, "total_bytes", num_bytes)

    return leave


def build(num_layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))


def take_steps(strategy, num_layers=4, **options):
    model = build(num_layers)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    with cp.parallelize(
        model, optimizer, F.mse_loss, strategy=strategy, device=StandInAccelerator(), **options
    ) as step:
        return [step(torch.ones(256, 16), torch.zeros(256, 16)) for _ in range(2)]


def message_of(run):
    with pytest.raises(PlanError) as found:
        run()
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    return str(found.value)


def test_a_batch_that_is_too_large_is_told_the_smallest_change_that_fits_and_it_does_fit(limit):
    limit(230 * KIB)
    text = message_of(lambda: take_steps("solo", 12))
    assert re.match(
        r"the memory of stand_in:0 is full .*: this process has allocated [\d.]+ KiB of [\d.]+ KiB, and [\d.]+ KiB are "
        r"free; a step of 256 samples under solo needs 307 KiB by prediction; the smallest change that fits: "
        r"num_microbatches=2 \(195 KiB\)$",
        text,
    ), text
    limit(230 * KIB)
    assert len(take_steps("solo", 12, num_microbatches=2)) == 2


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 8),
    )


@pytest.mark.parametrize(
    ("build_model", "shape", "strategy"),
    [
        (lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU()))), (1024, 64), "solo"),
        (lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU()))), (1024, 64), "zero3(2)"),
        (lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU()))), (1024, 64), "pipeline(2)"),
        (conv_net, (16, 3, 32, 32), "solo"),
    ],
)  # fmt: skip
def test_predictions_are_within_a_tenth_of_the_peak_of_a_step(build_model, shape, strategy):
    gc.collect()
    before, model = DEVICE.allocated_bytes, build_model()
    step = cp.parallelize(
        model, optim.AdamW(model.parameters()), lambda output, _: output.square().mean(), strategy=strategy,
        device=StandInAccelerator(), cross_sample="accept",
    )  # fmt: skip
    with step:
        for _ in range(4):
            DEVICE.peak_bytes = DEVICE.allocated_bytes
            step(torch.ones(shape), torch.ones(shape))
        peak_bytes = DEVICE.peak_bytes - before
        source = SlicedBatch(
            (torch.ones(shape),) * 2, tuple(split_batch(shape[0], step.local_ranks.global_num_microbatches))
        )
        memory = step.local_ranks.memory_of(source)
        predicted_bytes = predict_bytes(memory.plan, memory.estimate_layers(), shape[0])
    assert peak_bytes == pytest.approx(predicted_bytes, rel=0.1)


def test_ranks_that_share_the_device_are_counted_together(limit):
    limit(90 * KIB)
    text = message_of(lambda: take_steps("data(2)"))
    assert "is full in step " in text
    assert "under data(2) needs 162 KiB by prediction, for all 2 ranks, which share the device; the smallest" in text


def test_a_model_that_is_larger_than_the_device_is_told_so(limit):
    limit(4 * KIB)
    text = message_of(lambda: take_steps("solo"))
    assert "is full while the model is moved to it: " in text
    assert "its parameters and buffers need 4.25 KiB, and training more than that: take a smaller model" in text


def test_where_no_change_fits_that_is_said(limit):
    limit(8 * KIB)
    assert "; neither recomputation nor more microbatches or a smaller batch fit: take a smaller model" in message_of(
        lambda: take_steps("solo")
    )


def test_a_step_that_failed_can_be_taken_again_when_there_is_memory(limit):
    model = build(4)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with cp.parallelize(model, optimizer, F.mse_loss, strategy="solo", device=StandInAccelerator()) as step:
        small, large = (torch.ones(count, 16) for count in (8, 1024))
        first = step(small, torch.zeros_like(small))
        limit(60 * KIB)
        text = message_of(lambda: step(large, torch.zeros_like(large)))
        assert "is full in step 1: " in text
        assert "a step of 1024 samples under solo needs " in text
        gc.collect()  # of the error's frames
        assert step(small, torch.zeros_like(small)) < first


def test_changes_are_tried_from_the_smallest_one():
    tried = [change for change, _, _ in possible_changes(replace(Plan.parse("data(2)"), passes=("overlap",)), 8)]
    assert tried == [
        "passes=('overlap', 'recompute')",
        "num_microbatches=2",
        "num_microbatches=2 and passes=('overlap', 'recompute')",
        "num_microbatches=4",
        "num_microbatches=4 and passes=('overlap', 'recompute')",
        "a batch of 4 samples",
        "a batch of 2 samples",
    ]
    assert not [one for one, _, _ in possible_changes(Plan.parse("solo", num_microbatches=4), 4) if "batch of" in one]
