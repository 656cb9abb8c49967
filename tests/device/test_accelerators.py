"""What every accelerator promises, on the host, on the stand-in device, and on a GPU where there is one."""

from functools import partial

import pytest
import torch

from counterpoint.device.cuda import CudaAccelerator
from counterpoint.device.host import HostAccelerator
from counterpoint.device.pending_scalars import PendingScalars
from counterpoint.testing.stand_in_accelerator import StandInAccelerator

GPU = pytest.param(partial(CudaAccelerator, 0), marks=pytest.mark.gpu)


@pytest.fixture(params=[HostAccelerator, StandInAccelerator, GPU], ids=["host", "stand_in", "cuda"])
def accelerator(request):
    return request.param()


def test_memory_is_where_it_is_said_to_be(accelerator):
    assert accelerator.empty(2, 3, dtype=torch.float64).device == accelerator.device
    pinned = accelerator.empty_pinned(2, 3, dtype=torch.int64)
    assert (pinned.device.type, pinned.shape, pinned.dtype) == ("cpu", (2, 3), torch.int64)
    assert accelerator.is_host == (accelerator.device.type == "cpu")


def test_streams_and_events_order_work_and_measure_it(accelerator):
    start, end = accelerator.new_event(enable_timing=True), accelerator.new_event(enable_timing=True)
    other = accelerator.new_stream()
    start.record(accelerator.current_stream())
    tensor = accelerator.to_device(torch.ones(3)) * 2.0
    other.wait_stream(accelerator.current_stream())
    with accelerator.stream(other):
        result = tensor + 1.0
        accelerator.record_stream(tensor, accelerator.current_stream())
        accelerator.current_stream().record_event(end)
    accelerator.current_stream().wait_event(end)
    end.wait(accelerator.current_stream())
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    other.synchronize()
    assert other.query()
    accelerator.synchronize()
    assert result.tolist() == [3.0, 3.0, 3.0]


def test_a_copy_to_the_host_does_not_change_with_its_source(accelerator):
    source = accelerator.to_device(torch.ones(2))
    copy = accelerator.start_copy_to_host(source)
    source.fill_(7.0)
    assert copy.wait().tolist() == [1.0, 1.0]
    assert copy.tensor.device.type == "cpu"


def test_the_same_seed_gives_the_same_numbers_again(accelerator):
    def draw():
        return torch.rand(3, device=accelerator.device).tolist()

    accelerator.manual_seed(5)
    first = draw()
    state = accelerator.get_rng_state()
    with accelerator.preserve_rng():
        second = draw()
    assert draw() == second
    accelerator.set_rng_state(state)
    assert draw() == second
    with accelerator.preserve_rng(enabled=False):
        accelerator.manual_seed(5)
    assert draw() == first


def test_memory_has_a_total(accelerator):
    stats = accelerator.memory_stats()
    assert 0 <= stats.allocated_bytes <= stats.peak_allocated_bytes
    assert 0 < stats.free_bytes <= stats.total_bytes
    accelerator.reset_peak_memory_stats()


def test_pending_scalars_are_read_once(accelerator):
    pending = PendingScalars(accelerator)
    pending.add(2, accelerator.to_device(torch.tensor(0.5)))
    pending.add(7, accelerator.to_device(torch.tensor(1.5)).requires_grad_())
    assert pending.read() == {2: 0.5, 7: 1.5}
    assert pending.read() == {}
    pending.add(1, accelerator.to_device(torch.tensor(1.0)))
    pending.clear()
    assert pending.read() == {}


def test_backward_runs_in_the_thread_that_calls_it(accelerator):
    import threading

    threads = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            threads.append(threading.get_ident())
            return grad

    leaf = accelerator.to_device(torch.ones(2)).requires_grad_()
    with accelerator.calling_thread():
        Watch.apply(leaf).sum().backward()
    assert threads == [threading.get_ident()]
