"""Collectives among ranks of one process run beside the computing stream, which waits where the program waits."""

import itertools

import pytest
import torch

from counterpoint.fabric import LocalWorld
from counterpoint.testing.device_survey import batches, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.testing.stand_in_streams import RaceError

ON, PAIR = DEVICE.device, (0, 1)


@pytest.fixture
def world():
    with LocalWorld(2) as world:
        world.fabrics[0].use_accelerator(StandInAccelerator())
        yield world
    DEVICE.order.errors.clear()


def test_a_collective_does_not_hold_up_what_is_computed_after_its_start(world):
    def work(fabric):
        gradient, other = (torch.full((2,), 1.0 + fabric.rank, device=ON) for _ in range(2))
        reduction = fabric.all_reduce("grad", gradient, PAIR)
        assert other.mul_(2.0).sum().item() == 4.0 * (1 + fabric.rank)
        reduction.wait()
        return gradient.tolist()

    assert world.run(work) == [[3.0, 3.0], [3.0, 3.0]]
    DEVICE.require_no_races()


def test_what_a_collective_has_not_returned_may_not_be_read(world):
    def work(fabric):
        gradient = torch.ones(2, device=ON)
        reduction = fabric.all_reduce("grad", gradient, PAIR)
        fabric.barrier(PAIR)
        result = gradient + 1.0
        reduction.wait()
        return result

    with pytest.raises(RaceError, match=r"stream 0 reads at .* what stream \d+ writes at fabric/local_collective.py"):
        world.run(work)


def test_ranks_compute_on_the_stream_of_their_caller(world):
    accelerator = StandInAccelerator()
    own, tensors = accelerator.new_stream(), [torch.ones(2, device=ON) for _ in PAIR]
    own.wait_stream(accelerator.current_stream())

    def work(fabric):
        fabric.all_reduce("sum", tensors[fabric.rank].mul_(3.0), PAIR).wait()

    with accelerator.stream(own):
        world.run(work)
        assert [tensor.sum().item() for tensor in tensors] == [12.0, 12.0]
    accelerator.current_stream().wait_stream(own)


def test_memory_of_a_failed_run_is_kept_until_its_collectives_have_ended(world):
    def work(fabric):
        fabric.all_reduce("grad", torch.ones(2, device=ON), PAIR)
        fabric.barrier(PAIR)
        raise ValueError("the model is wrong")

    with pytest.raises(ValueError, match="the model is wrong"):
        world.run(work)
    DEVICE.require_no_races()


@pytest.mark.parametrize(
    "plan",
    [
        "data(2, bucket=0, first_bucket=0) + overlap",
        "zero(2, level=3) + overlap + prefetch",
        "zero(2, level=3) + overlap + prefetch:2",
    ],
)
def test_a_step_computes_while_its_collectives_run(plan, monkeypatch):
    step, _ = make_step("mlp", plan, StandInAccelerator())
    first, second, third = itertools.islice(batches("mlp"), 3)
    with step:
        step(*first)
        step(*second)  # in the first step, reducers find the order of their buckets
        order, is_overlapped = DEVICE.order, []
        launch, before = order.launch, dict(order.clocks)

        def observe(reads, writes):
            started = [stream for stream, clock in order.clocks.items() if stream and clock != before.get(stream)]
            is_overlapped.append(any(not is_waited_for(order, stream) for stream in started))
            return launch(reads, writes)

        monkeypatch.setattr(order, "launch", observe)
        step(*third)
    assert sum(is_overlapped) > 10


def is_waited_for(order, stream):
    """Return whether the computing stream waits for all that another one has been given."""
    return order.current != 0 or order.clocks[0].get(stream, 0) >= order.clocks[stream].get(stream, 0)
