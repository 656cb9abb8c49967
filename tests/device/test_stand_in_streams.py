"""A wait that is missing between two streams, or between a stream and the host, is found every time."""

import pytest
import torch

from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.testing.stand_in_streams import RaceError

ON = DEVICE.device


@pytest.fixture
def accelerator():
    yield StandInAccelerator()
    DEVICE.order.errors.clear()


def compute_on_two_streams(accelerator, without=""):
    """Read on another stream what this one has written, and write it again; without one of the waits."""
    other, ready, done = accelerator.new_stream(), accelerator.new_event(), accelerator.new_event()
    tensor = torch.ones(3, device=ON)
    ready.record(accelerator.current_stream())
    with accelerator.stream(other):
        if without != "ready":
            ready.wait(accelerator.current_stream())
        result = tensor * 2.0
        done.record(accelerator.current_stream())
    if without != "done":
        done.wait(accelerator.current_stream())
    tensor.fill_(5.0)
    return result.tolist()


def test_ordered_streams_compute_as_one(accelerator):
    assert compute_on_two_streams(accelerator) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("ready", r"stream \d+ reads at .*test_stand_in_streams.py:\d+ what stream 0 writes at .*, and nothing puts"),
        ("done", r"stream 0 writes at .*test_stand_in_streams.py:\d+ what stream \d+ reads at .*; record an event"),
    ],
)
def test_a_missing_wait_is_found_with_both_lines(accelerator, without, message):
    with pytest.raises(RaceError, match=message):
        compute_on_two_streams(accelerator, without)


def test_waiting_on_the_host_orders_streams_too(accelerator):
    other = accelerator.new_stream()
    tensor = torch.ones(3, device=ON)
    accelerator.current_stream().synchronize()
    with accelerator.stream(other):
        tensor.add_(1.0)
    other.synchronize()
    assert other.query()
    assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_a_stream_may_wait_for_all_of_another(accelerator):
    other = accelerator.new_stream()
    other.wait_stream(accelerator.current_stream())
    tensor = torch.ones(3, device=ON)
    other.wait_stream(accelerator.current_stream())
    with accelerator.stream(other):
        tensor.add_(1.0)
    accelerator.current_stream().wait_event(other.record_event())
    assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_memory_that_another_stream_uses_may_be_freed_only_if_the_stream_was_recorded(accelerator):
    def use(*, is_recorded):
        other = accelerator.new_stream()
        tensor = torch.ones(3, device=ON)
        other.wait_stream(accelerator.current_stream())
        with accelerator.stream(other):
            result = tensor + 1.0
        if is_recorded:
            accelerator.record_stream(tensor, other)
        del tensor
        accelerator.current_stream().wait_stream(other)
        return result

    use(is_recorded=True)
    DEVICE.require_no_races()
    use(is_recorded=False)
    with pytest.raises(RaceError, match=r"memory of stream 0, allocated at .* is freed while stream \d+ uses it"):
        DEVICE.require_no_races()


def test_a_copy_to_pinned_memory_arrives_when_the_host_has_waited(accelerator):
    copy = accelerator.start_copy_to_host(torch.full((2,), 3.0, device=ON))
    assert copy.tensor.isnan().all()
    with DEVICE.count_host_waits() as waits:
        assert copy.wait().tolist() == [3.0, 3.0]
        assert copy.wait().tolist() == [3.0, 3.0]  # it is there
    assert sum(waits.values()) == 1


def test_a_batch_is_copied_without_a_wait(accelerator):
    batch = {"x": torch.ones(2), "y": [torch.arange(3), "text"]}
    with DEVICE.count_host_waits() as waits:
        moved = accelerator.to_device(batch)
    assert not waits
    assert (moved["x"].device, moved["y"][1]) == (ON, "text")
    assert moved["y"][0].tolist() == [0, 1, 2]
    assert accelerator.to_device(moved)["x"] is moved["x"]


def test_pinned_memory_must_not_change_before_it_was_copied(accelerator):
    pinned = accelerator.empty_pinned(2, dtype=torch.float32).fill_(1.0)
    pinned.to(ON, non_blocking=True)
    pinned.fill_(2.0)
    with pytest.raises(RaceError, match=r"the host changed memory that a copy at .*test_stand_in_streams.py"):
        accelerator.synchronize()
    accelerator.synchronize()


def test_operations_on_other_bytes_of_an_allocation_need_no_order(accelerator):
    other, flat = accelerator.new_stream(), torch.zeros(6, device=ON)
    other.wait_stream(accelerator.current_stream())
    with accelerator.stream(other):
        flat[2:4].fill_(1.0)
    flat[:2].fill_(2.0)
    flat[4:].fill_(3.0)
    with pytest.raises(RaceError, match=r"stream 0 writes at .* what stream \d+ writes at"):
        flat[3:5].fill_(4.0)
    accelerator.current_stream().wait_stream(other)
    assert flat.tolist() == [2.0, 2.0, 1.0, 4.0, 4.0, 3.0]


def test_storage_that_is_freed_while_another_stream_reads_it_is_found(accelerator):
    other, tensor = accelerator.new_stream(), torch.ones(3, device=ON)
    other.wait_stream(accelerator.current_stream())
    with accelerator.stream(other):
        result = tensor + 1.0
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RaceError, match=r"memory of stream 0, allocated at .* is freed while stream \d+ uses it"):
        DEVICE.require_no_races()
    accelerator.current_stream().wait_stream(other)
    assert result.tolist() == [2.0, 2.0, 2.0]


def test_a_race_in_a_thread_of_torch_is_kept_and_does_not_end_the_process(accelerator):
    other, weight = accelerator.new_stream(), torch.ones(3, device=ON, requires_grad=True)
    target = torch.zeros(3, device=ON)
    other.wait_stream(accelerator.current_stream())
    with accelerator.stream(other):
        target.fill_(1.0)
    weight.register_hook(lambda grad: target.add_(grad))  # called by the device's own thread of autograd
    (weight * 2.0).sum().backward()
    with pytest.raises(RaceError, match=r"stream 0 writes at .* what stream \d+ writes at"):
        DEVICE.require_no_races()
    accelerator.current_stream().wait_stream(other)
