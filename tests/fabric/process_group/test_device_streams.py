"""Process groups of a device run on streams of their own, which the computing stream waits for and is waited for by."""

import re
from functools import partial

import pytest
import torch

from counterpoint.testing import stand_in_device
from tests.device.left_out_calls import SourceCall, find_calls, left_out
from tests.fabric.process_group.test_staged import COUNTS, TRIO, staged
from tests.fabric.run_ranks import on_gloo

pytestmark = pytest.mark.process
PAIR = (0, 1)
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "record_stream"}
OF_THE_HOST = {
    "group_queue.py:find_error wait[0]": "has ended, and is asked why",
    "p2p.py:PairChannel.recv wait[0]": "of gloo",
    "p2p.py:PairChannel._wait_oldest wait[0]": "of gloo",
    "staged.py:StagedWork.completes_within wait[0]": "copies what has arrived in host memory",
    "staged.py:StagedWork.wait wait[0]": "of a collective in host memory",
    "transport.py:ProcessGroupFabric.check_same_order wait[0]": "of values of the host",
    "transport.py:QueuedWork.completes_within wait[0]": "passes on to QueuedWork.wait",
    "watchdog.py:Watchdog._run wait[0]": "of a thread",
    "watchdog.py:Watchdog._run wait[1]": "of a thread",
}
"""Waits of the process groups that no stream needs, and why."""


def over_groups(scenario, control):
    """Run a scenario on process groups of the device; return its result, and the first race or error."""
    from counterpoint.testing.stand_in_process_group import over_stand_in_groups

    fabric = over_stand_in_groups(control)
    try:
        result = scenario(fabric)
        stand_in_device.DEVICE.require_no_races()
    except Exception as error:  # noqa: BLE001 - values that have not arrived may be anything, and so may an error
        return f"{type(error).__name__}: {error}"
    finally:
        fabric.close()
    return result


def wait_elsewhere(fabric):
    """Start collectives with scratch memory on one stream, and wait for them on another one."""
    from counterpoint.testing.stand_in_accelerator import StandInAccelerator

    accelerator = StandInAccelerator()
    fabric.use_accelerator(accelerator)
    other = accelerator.new_stream()
    with accelerator.stream(other):
        whole = torch.arange(7.0).to(accelerator.device)
        work = fabric.reduce_scatter("grad", whole, [0, 1, 7], PAIR)
    work.wait()
    accelerator.current_stream().wait_stream(other)
    accelerator.record_stream(whole, accelerator.current_stream())
    return whole[[0, 1, 1, 7][fabric.rank * 2] : [1, 7][fabric.rank]].tolist()


def record_times(fabric):
    """Return when a device begins and ends two collectives, and reaches what is after their start and their waits."""
    from counterpoint.device.event_clock import EventClock
    from counterpoint.testing.stand_in_accelerator import StandInAccelerator

    accelerator = StandInAccelerator()
    fabric.use_accelerator(accelerator)
    clock, tensors = EventClock(accelerator), [torch.ones(4).to(accelerator.device) for _ in range(2)]
    with fabric.record_spans() as spans:
        works = [fabric.all_reduce("grad", tensor, PAIR) for tensor in tensors]
    started = clock()
    for work in works:
        work.wait()
    unrecorded = fabric.all_reduce("grad", tensors[0], PAIR)
    times = clock.read([*(event for span in spans for event in (span.began, span.ended)), started, clock()])
    unrecorded.wait()
    return [round((seconds - times[0]) * 1e3, 6) for seconds in times]


def without(call, scenario, control):
    """Run a scenario without a call."""
    with left_out(call):
        return over_groups(scenario, control)


def test_collectives_and_messages_of_a_device_are_those_of_the_host():
    """The first collective on a device was refused where it is announced, as one that the hosts cannot move."""
    answers = on_gloo(partial(over_groups, staged), 3)
    assert [answer for answer in answers if not isinstance(answer, list)] == []
    for rank, (number, summed, _, whole, root, received, values) in enumerate(answers):
        assert (number, values) == ((rank - 1) % 3, [10.0 * ((rank - 1) % 3) + index for index in range(5)])
        assert summed == [30.0, 33.0, 36.0, 39.0, 42.0]
        assert (whole, root) == ([0.0, 21.0, 22.0, 23.0, 24.0], [20.0, 21.0, 22.0, 23.0, 24.0])
        assert received == [float(sender) for sender in TRIO for _ in range(COUNTS[sender][rank])]


def test_a_collective_may_be_waited_for_on_another_stream():
    assert on_gloo(partial(over_groups, wait_elsewhere), 2) == [[0.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]]


LEFT_OUT = [
    ("group_queue.py:GroupQueue.finish wait[0]", staged, 3),
    ("p2p.py:PairChannel.recv wait[1]", staged, 3),
    ("collectives.py:Scratch.clear record_stream[0]", wait_elsewhere, 2),
]


@pytest.mark.long
@pytest.mark.parametrize(("place", "scenario", "num_ranks"), LEFT_OUT)
def test_a_wait_that_is_left_out_is_found(place, scenario, num_ranks):
    call = waits()[place]
    found = on_gloo(partial(without, call, scenario), num_ranks)
    # a rank that finds a race ends, and another one may then only see that
    assert any(isinstance(text, str) and re.match("RaceError: |PeerError: .* and let stream", text) for text in found)


def test_every_wait_of_the_process_groups_is_left_out_or_of_the_host():
    assert waits().keys() == {place for place, *_ in LEFT_OUT} | OF_THE_HOST.keys()


def waits() -> dict[str, SourceCall]:
    """Return the waits of the process groups by their place."""
    return {str(call).rpartition("/")[2]: call for call in find_calls(WAITS, "fabric/process_group")}


def test_spans_of_collectives_have_the_times_of_the_group_and_the_computing_stream_does_not_wait_for_them():
    for began, ended, other_began, other_ended, started, waited in on_gloo(partial(over_groups, record_times), 2):
        assert began == started == 0
        assert other_began in {0, 1}  # the host may have seen the end of the first one before it launched the second
        assert (ended, other_ended, waited) == (1, 2, 2)
