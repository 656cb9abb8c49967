"""Run by mpirun: scenarios of the fabric's tests on MPI, one after the other; each rank writes down what it got.

``python -m tests.lab.mpi_scenarios FOLDER SCENE...``, where a scenario is a function of tests/fabric/test_transports.py.
"""

import sys
import threading
import time
from pathlib import Path

import torch

from counterpoint.errors import PeerError
from counterpoint.launchers import detect
from counterpoint.training.distributed_world import open_world
from tests.fabric import test_transports


def as_text(value):
    """A value as text, dictionaries in the order of their keys: who comes first may differ."""
    return repr(sorted(value.items())) if isinstance(value, dict) else repr(value)


def main(folder, *scenarios):
    environment = detect()
    assert environment is not None, "this is started by mpirun"
    torch.set_num_threads(1)
    world = open_world(environment, environment.world_size, 20.0)
    (fabric,) = world.fabrics
    result = {scenario: as_text(getattr(test_transports, scenario)(fabric)) for scenario in scenarios}
    try:
        if fabric.rank == 1:
            fabric.abort("the disk is full")
        else:
            fabric.recv(1, "never sent")
    except PeerError as error:
        result["told"] = str(error)
    text = "\n".join(f"{scenario}\t{value}" for scenario, value in result.items())
    Path(folder, f"{fabric.rank}.txt").write_text(text)
    end = time.monotonic() + 20  # mpirun ends all with the first that leaves after an error
    while len(list(Path(folder).glob("*.txt"))) < fabric.num_ranks and time.monotonic() < end:
        threading.Event().wait(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
