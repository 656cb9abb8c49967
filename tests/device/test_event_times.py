"""Traces and profiles of a device have its own times: when its streams did the work, not when the host launched it."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from counterpoint.data.sampler import split_batch
from counterpoint.device.cuda import CudaAccelerator
from counterpoint.device.event_clock import EventClock
from counterpoint.fabric import LocalWorld
from counterpoint.plan.plan import Plan
from counterpoint.profiler.timer import Stopwatch, device_clock
from counterpoint.program.trace import TraceEvent
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.testing.device_survey import batches, build, make_optimizer
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.local_ranks import LocalRanks
from counterpoint.training.ranks.step_trace import trace_step
from counterpoint.training.reporting.calibration import calibrate
from counterpoint.viz.svg_timeline import draw_timeline

pytestmark = pytest.mark.filterwarnings("ignore")
ON = DEVICE.device
GPU = pytest.param(partial(CudaAccelerator, 0), marks=pytest.mark.gpu)
BEFORE = (TraceEvent(0, 0, "copy(inputs.0)", -2.0, -1.0, "link"),)


@pytest.fixture
def accelerator():
    return StandInAccelerator()


def compute(count):
    for tensor in [torch.ones(2, device=ON)] * count:
        tensor.mul_(2.0)


def trace(plan, passes=(), observe=lambda take: take(), make=StandInAccelerator):
    """Return the trace of the fourth step of a model of the survey, and its ranks' model."""
    plan, accelerator = replace(Plan.parse(plan), passes=passes), make()
    model = build("mlp").to(accelerator.device)
    spec = OptimizerSpec(make_optimizer("mlp", ""), dict(model.named_parameters()))
    with LocalWorld(plan.num_ranks) as world:
        ranks = LocalRanks(world, plan, model, F.cross_entropy, spec, TrainingOptions(), accelerator)
        for number, batch in enumerate(itertools.islice(batches("mlp"), 4)):
            source = SlicedBatch(batch, tuple(split_batch(len(batch[1]), plan.global_num_microbatches)))
            ranks.build(source.inputs(0), source.sizes[0])
            if number == 3:
                _, found = observe(lambda number=number, source=source: trace_step(ranks, number, source))
                return found, ranks.build(source.inputs(0), source.sizes[0]).model
            ranks.step(number, source)
    raise AssertionError("there are four batches")


def test_streams_work_side_by_side_and_an_event_that_is_waited_for_is_before_what_follows(accelerator):
    clock, other = EventClock(accelerator), accelerator.new_stream()
    began = clock()
    with accelerator.stream(other):
        compute(4)
        ended = clock()
    compute(2)
    own = clock()
    accelerator.current_stream().wait_event(ended)
    late = clock()
    began_s, ended_s, own_s, late_s = clock.read([began, ended, own, late])
    assert 0.0 < own_s - began_s < ended_s - began_s + 1e-9
    assert late_s == max(own_s, ended_s)


def test_what_is_launched_after_the_host_has_waited_does_not_begin_before(accelerator):
    clock, other = EventClock(accelerator), accelerator.new_stream()
    compute(5)
    before = clock()
    DEVICE.synchronize()
    with accelerator.stream(other):
        after = clock()
    before_s, after_s = clock.read([before, after])
    assert after_s >= before_s


def test_a_time_is_refused_before_the_device_has_reached_it_or_if_nobody_has_asked_for_it(accelerator):
    timed, untimed = accelerator.new_event(enable_timing=True), accelerator.new_event()
    timed.record(accelerator.current_stream())
    compute(1)
    end = EventClock(accelerator)()
    with pytest.raises(RuntimeError, match="device not ready"):
        timed.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(untimed)


def test_a_profile_waits_once_for_all_pieces_and_takes_the_times_of_the_device():
    watch = Stopwatch(device_clock(ON))
    with DEVICE.count_host_waits() as waits:
        first = watch.time_all([lambda: compute(1), lambda: compute(9)])
        assert not waits
        one_s, nine_s = watch.read()[first]
    assert one_s > 0
    assert nine_s - one_s == pytest.approx(0.008)
    assert waits.total() == 1


def test_a_traced_step_waits_once_and_has_whole_milliseconds_of_the_device():
    def observe(take):
        with DEVICE.count_host_waits(max_operations_behind=100) as waits:
            found = take()
        assert [kind for kind, _ in waits.elements()] == ["synchronize"]
        return found

    found, _ = trace("data(2)", observe=observe)
    for event in found.events:
        assert event.start_s * 1e3 == pytest.approx(round(event.start_s * 1e3), abs=1e-6)
    texts = [event.text for event in found.events if event.rank == 0 and event.lane == "compute"]
    assert texts == ["F0.0", "B0.0", "U0"]


def test_a_trace_shows_reductions_during_the_backward_that_they_overlap_with():
    found, _ = trace("data(2, bucket=0, first_bucket=0)", ("overlap",))
    own = [event for event in found.events if event.rank == 1]  # it joins last, and so starts them
    (backward,) = (event for event in own if event.text == "B0.1")
    reductions = [event for event in own if event.lane == "link" and event.text.startswith("all_reduce_start")]
    inside = [one for one in reductions if backward.start_s < one.start_s and one.stop_s < backward.stop_s]
    assert len(inside) > 3
    assert all(one.seconds > 0 for one in reductions)


def test_a_trace_shows_where_a_gather_of_weights_runs_and_where_the_computation_waits_for_it():
    found, _ = trace("zero(2, level=3)", ("overlap", "prefetch"))
    own = [event for event in found.events if event.rank == 0 and "all_gather" in event.text]
    on_link = {event.index for event in own if event.lane == "link"}
    assert on_link
    assert on_link <= {event.index for event in own if event.lane == "wait"}


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
@pytest.mark.parametrize("make", [StandInAccelerator, GPU], ids=["stand_in", "cuda"])
def test_a_trace_shows_the_copies_of_batches_before_the_step_that_reads_them(plan, make):
    found, _ = trace(plan, make=make)
    copies = [event for event in found.events if event.is_copy]
    micros = range(Plan.parse(plan).global_num_microbatches)
    names = {f"copy({part}.{micro})" for part in ("inputs", "targets") for micro in micros}
    assert {event.text for event in copies} == names
    for event in copies:
        backwards = [one.start_s for one in found.events if one.rank == event.rank and one.text.startswith("B")]
        assert (event.lane, event.seconds > 0, event.stop_s <= min(backwards)) == ("link", True, True)
    if make is StandInAccelerator:  # on which the host is never late
        assert min(event.start_s for event in copies) < 0


def test_copies_are_no_costs_of_instructions_and_not_drawn_before_the_step():
    found, model = trace("data(2)")
    without = replace(found, events=tuple(event for event in found.events if not event.is_copy))
    assert len(without.events) < len(found.events)
    assert calibrate(model, found) == calibrate(model, without)
    assert draw_timeline(replace(found, events=(*without.events, *BEFORE))) == draw_timeline(without)
