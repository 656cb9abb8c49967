"""Process groups of a device: a wait returns at once, so only the watchdog can see that something is wrong.

A stand-in for NCCL: process groups of gloo whose works do not block the host. What they compute is not read.
"""

import itertools
import os
import re
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from counterpoint.errors import PeerError
from counterpoint.fabric.gloo.connections import abort_connections
from counterpoint.fabric.process_group.backends import ProcessGroupBackend
from counterpoint.fabric.process_group.transport import ProcessGroupFabric
from tests.fabric.run_ranks import on_gloo

pytestmark = pytest.mark.process
PAIR = (0, 1)


class LaunchedWork:
    """A work whose wait orders streams only, as NCCL's, and raises once it has failed."""

    def __init__(self, work):
        self.work = work

    def is_completed(self):
        return self.work.is_completed()

    def wait(self):
        if self.work.is_completed():
            self.work.wait()


class DeviceGroup:
    """Collectives of a process group of gloo, as launched work."""

    def __init__(self, gloo):
        self.gloo = gloo

    def __getattr__(self, name):
        found = getattr(self.gloo, name)
        return (lambda *args: LaunchedWork(found(*args))) if name in {"allreduce", "broadcast"} else found


def abort_device_groups(groups):
    abort_connections([one.gloo for one in groups])


def over_devices(control):
    """Return a fabric that takes host memory for a device's."""
    rendezvous = control._rendezvous

    def connect(*args):
        return DeviceGroup(rendezvous.connect(*args))

    backend = ProcessGroupBackend("stand-in", "cpu", waits_on_host=False)
    groups = replace(rendezvous, connect=connect, abort=abort_device_groups, secret=None)
    return ProcessGroupFabric(control, control, groups, backend)


def start_known(fabric, labels="ab"):
    """Start collectives until the group knows them."""
    for _ in range(2):
        for label in labels:
            fabric.all_reduce(label, torch.ones(3), PAIR).wait()


def go_on(wait, control):
    """Rank 1 goes wrong in a step; rank 0 launches its collectives, and learns of it in its next wait on the host."""
    fabric = over_devices(control)
    start_known(fabric)
    fabric.barrier(PAIR)
    began = time.monotonic()
    if fabric.rank == 1:
        return wait(fabric)
    with pytest.raises(PeerError) as failure:
        go_wrong(fabric)
    fabric.close()
    return str(failure.value), time.monotonic() - began


def go_wrong(fabric):
    for label in itertools.cycle("ab"):
        fabric.all_reduce(label, torch.ones(3), PAIR).wait()  # does not block
        signal.sigtimedwait([signal.SIGUSR1], 0.05)


def is_killed(fabric):
    os.kill(os.getpid(), signal.SIGKILL)


def is_late(fabric):
    signal.sigtimedwait([signal.SIGUSR1], 2.5)


def differs(fabric):
    for label in "ba":
        fabric.all_reduce(label, torch.ones(3), PAIR)
    signal.sigtimedwait([signal.SIGUSR1], 2.5)


CASES = [
    (is_killed, r"rank 0 waited \d\.\d s for all_reduce sum of [ab] with rank 1: rank 1 has ended; look at", 2.0, 10.0),
    (is_late, r"rank 0 waited .* the timeout of 1\.0 s has passed; rank 1 has not started it ", 4.0, 1.0),
    (differs, r"ranks 0 and 1 disagree on collective 4 of their group: rank 0 starts all_reduce sum of a, ", 4.0, 10.0),
]


@pytest.mark.long(quick=["is_killed---"])
@pytest.mark.parametrize(
    ("wait", "pattern", "limit_s", "timeout_s"), CASES, ids=lambda one: getattr(one, "__name__", "")
)
def test_the_watchdog_names_what_no_wait_on_the_host_sees(wait, pattern, limit_s, timeout_s):
    text, seconds = on_gloo(partial(go_on, wait), 2, timeout_s=timeout_s)[0]
    assert re.match(pattern, text), text
    assert seconds < limit_s
