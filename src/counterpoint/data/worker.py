"""What runs in a loader's worker process: it reads microbatches when told their place, until nobody asks any more."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from counterpoint.data.fetch import Fields
from counterpoint.data.parcels import Fault, Ready, send
from counterpoint.data.reading import Reading, Spot

STACK_SIGNAL = signal.SIGUSR1
"""A worker that gets it writes what it is doing."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A worker's ends of its pipes.

    Args:
        orders: places to read.
        answers: takes parcels: first that it is ready, then fields or faults in the order of the places.
        owner: the process that they are for.
        life: nothing is ever written there; it is closed when its owner ends, however that happens.
        stacks: what it was doing, written when it is asked by a signal.
    """

    orders: Connection
    answers: Connection
    owner: int
    life: Connection
    stacks: Connection


def work(reading: Reading, ends: Ends) -> None:
    """Every place that was ordered has been answered, and nobody orders any more."""
    end_with(ends.life)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer as well, which ends its workers
    faulthandler.register(STACK_SIGNAL, file=ends.stacks.fileno(), all_threads=False)
    torch.set_num_threads(1)
    send(Ready(), ends.answers, ends.owner)
    while True:
        try:
            spot = Spot(*ends.orders.recv())
        except EOFError:
            return
        send(answer(reading, spot), ends.answers, ends.owner)


def answer(reading: Reading, spot: Spot) -> Fields | Fault:
    """Return the microbatch, or why it cannot be read."""
    try:
        return reading.read(spot)
    except Exception as error:  # noqa: BLE001 - whatever the dataset raises, it is told
        note = [f"while reading {spot}", *getattr(error, "__notes__", ())][-1]
        return Fault(f"{type(error).__name__}: {error}", note, "".join(traceback.format_exception(error)).rstrip())


def end_with(life: Connection) -> None:
    """The kernel ends this process when the other end of the pipe is closed, even while it computes or waits."""
    fcntl.fcntl(life.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life.fileno(), fcntl.F_SETFL, fcntl.fcntl(life.fileno(), fcntl.F_GETFL) | os.O_ASYNC)
    if life.poll(0):  # it was closed before the line above
        os._exit(1)
