"""Batches are copied to a device on a stream of their own, ahead of the step that reads them, and nothing else changes."""

import itertools
import re
import signal
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset

import counterpoint as cp
from counterpoint.device.copy_stream import CopyStream
from counterpoint.errors import StoppedBySignal
from counterpoint.partitioning.partitioned_model import FlatInputs
from counterpoint.runtime.batch_copies import BatchCopies, MicrobatchRead
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.testing.device_survey import batches, build, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.testing.stand_in_streams import RaceError

pytestmark = pytest.mark.filterwarnings("ignore")
ON = DEVICE.device
INPUTS = MicrobatchRead("inputs", 0)


@pytest.fixture
def stream():
    yield CopyStream(StandInAccelerator())
    DEVICE.order.errors.clear()


def pin(tensor):
    return DEVICE.empty_pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def test_a_copy_does_not_wait_for_what_is_computed(stream):
    computed = torch.ones(2, device=ON).mul_(2.0)
    copies = stream.start([torch.ones(2)])
    assert 0 not in copies.end.clock or copies.end.clock[0] < DEVICE.order.clocks[0][0]
    assert stream.take(copies, 0).add_(computed).tolist() == [3.0, 3.0]
    DEVICE.require_no_races()


def test_a_copy_is_taken_once_and_only_what_is_dense_and_on_the_host_is_copied(stream):
    ready, learned = torch.ones(2, device=ON), torch.ones(2, requires_grad=True)
    copies = stream.start(
        [torch.ones(2), "text", ready, learned, torch.eye(2).to_sparse(), torch.ones(3)], {0, 1, 2, 3, 4}
    )
    assert [*copies.tensors] == [0]
    assert stream.take(copies, 0).tolist() == [1.0, 1.0]
    assert [stream.take(copies, position) for position in range(6)] == [None] * 6


def test_a_tensor_that_is_not_pinned_may_change_at_once(stream):
    source = torch.ones(2)
    copies = stream.start([source])
    source.fill_(5.0)
    DEVICE.synchronize()
    assert stream.take(copies, 0).tolist() == [1.0, 1.0]


def test_a_pinned_tensor_is_used_as_it_is_and_may_change_after_the_host_has_waited(stream):
    source = pin(torch.ones(2))
    stream.start([source])
    source.fill_(5.0)
    with pytest.raises(RaceError, match="the host changed memory that a copy at"):
        DEVICE.synchronize()
    copies = stream.start([source])
    stream.wait_for_sources()
    source.fill_(7.0)
    DEVICE.synchronize()
    assert stream.take(copies, 0).tolist() == [5.0, 5.0]


def test_a_batch_of_the_same_step_that_is_another_one_is_copied_again(stream):
    copies = BatchCopies(stream, [INPUTS], lambda args: FlatInputs(tuple(args)))
    first, second = (SlicedBatch((torch.full((2,), value), None), ((0, 2),)) for value in (1.0, 2.0))
    copies.start(3, first)
    before = copies.find(3, INPUTS)
    copies.start_step(3, first)
    assert copies.find(3, INPUTS) is before
    copies.start_step(3, second)
    assert stream.take(copies.find(3, INPUTS), 0).tolist() == [2.0, 2.0]
    copies.end_step(3)
    assert not copies.find(3, INPUTS).tensors


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)", "tensor(2)"])
def test_a_loop_may_refill_its_pinned_tensors(plan):
    def losses(device, make):
        step, _ = make_step("mlp", plan, device)
        inputs, targets = map(make, next(batches("mlp")))
        with step:
            found = []
            for values in batches("mlp"):
                inputs.copy_(values[0])
                targets.copy_(values[1])
                found.append(float(step(inputs, targets)))
        return found

    torch.testing.assert_close(losses(StandInAccelerator(), pin), losses("cpu", torch.clone), rtol=0, atol=1e-12)
    DEVICE.require_no_races()


@pytest.mark.parametrize("plan", ["solo", "data(2) + overlap"])
def test_a_step_does_not_wait_for_the_copies_of_pinned_tensors(plan):
    step, _ = make_step("mlp", plan, StandInAccelerator())
    given = [tuple(map(pin, batch)) for batch in itertools.islice(itertools.cycle(batches("mlp")), 6)]
    with step:
        for batch in given[:3]:
            step(*batch)
        num_launches = DEVICE.num_launches
        step(*given[3])  # steps 2 and 4 check the loss, too
        max_operations_behind = (DEVICE.num_launches - num_launches) // 2
        step(*given[4])
        with DEVICE.count_host_waits(max_operations_behind=max_operations_behind) as waits:
            step(*given[5])
    assert not waits


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset that notes which samples are read, after how many waits for the device, and may lack one."""

    def __init__(self, missing=-1):
        self.missing, self.reads = missing, []
        self.samples = [pair for batch in batches("mlp") for pair in zip(*batch, strict=True)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads.append((index, DEVICE.host_waits.total()))
        if index == self.missing:
            raise ValueError(f"sample {index} is gone")
        return self.samples[index]

    def as_batches(self):
        """Yield the samples in batches of four, as a stream."""
        for start in range(0, len(self), 4):
            inputs, targets = zip(*(self[start + offset] for offset in range(4)), strict=True)
            yield torch.stack(inputs), torch.stack(targets)


class Waits(cp.Callback):
    """Notes how often the host has waited when a step is reported; may ask the run to stop, as a scheduler does."""

    def __init__(self, stop_after=-1):
        self.steps, self.totals, self.stop_after = [], [], stop_after

    def on_step(self, event):
        self.steps.append((event.step, event.loss))
        self.totals.append(DEVICE.host_waits.total())
        if event.step == self.stop_after:
            signal.raise_signal(signal.SIGTERM)


def fit(device, data, plan="solo", waits=None, **options):
    """Train with an optimizer whose steps the host decides; return what was reported, the weights, and the error."""
    waits, model, error = Waits() if waits is None else waits, build("mlp"), None
    trainer = cp.Trainer(
        model, loss=F.cross_entropy, optimizer=partial(optim.Adagrad, lr=1e-2), strategy=plan, device=device,
        progress="off", callbacks=[waits], timeout_s=20.0,
    )  # fmt: skip
    with trainer:
        try:
            trainer.fit(data, **options)
        except Exception as raised:  # noqa: BLE001 - of any kind; its text is compared
            error = re.sub(r"\(pid \d+\)", "", str(raised).partition("Traceback")[0])
    return [loss for _, loss in waits.steps], [float(value.sum()) for value in model.state_dict().values()], error


def test_the_next_batch_is_read_before_the_host_waits_for_the_step():
    samples, waits = Samples(), Waits()
    fit(StandInAccelerator(), DataLoader(samples, batch_size=4), waits=waits)
    before = {index // 4: total for index, total in samples.reads if index % 4 == 0}  # of the last read
    assert waits.totals[3] > waits.totals[2]  # the host decides each step, for which it waits
    assert before[3] < waits.totals[2]  # read in the third step


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2, schedule=pipedream)"])
@pytest.mark.parametrize("form", ["samples", "samples and workers", "stream"])
def test_an_error_of_a_batch_that_is_read_ahead_is_that_of_its_step(plan, form):
    def train(device):
        samples = Samples(missing=14)  # of the fourth batch
        if form == "stream":
            return fit(device, samples.as_batches, plan)
        return fit(device, samples, plan, batch_size=4, num_workers=form.count("workers"))

    losses, weights, error = train(StandInAccelerator())
    expected_losses, expected_weights, expected_error = train("cpu")
    assert "sample 14 is gone" in expected_error
    assert error == expected_error
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", ["solo", "data(2)"])
@pytest.mark.parametrize("form", ["samples", "stream"])
def test_a_batch_that_was_copied_and_not_trained_is_read_again_by_a_run_that_continues(plan, form, tmp_path):
    def train(device, waits=None, **options):
        samples = Samples()
        data, size = (samples.as_batches, {}) if form == "stream" else (samples, {"batch_size": 4})
        losses, weights, error = fit(device, data, plan, waits=waits, **size, **options)
        assert error is None
        return losses, weights, [index for index, _ in samples.reads]

    whole, weights, _ = train("cpu")
    stopped = Waits(stop_after=1)
    with pytest.raises(StoppedBySignal, match="after step 2"):
        train(StandInAccelerator(), stopped, checkpoint_dir=tmp_path)
    rest, resumed, reads = train(StandInAccelerator(), resume=tmp_path)
    torch.testing.assert_close([loss for _, loss in stopped.steps] + rest, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(resumed, weights, rtol=0, atol=1e-12)
    assert form == "stream" or len(reads) >= 12  # the batch that was read ahead, too
