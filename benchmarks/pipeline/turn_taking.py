"""Contenders whose processes all stay alive and run one at a time, so that machine noise affects all equally."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from counterpoint.errors import LaunchError

SCRIPT = Path(__file__).with_name("ranks.py")
DEADLINE_S, SELECT_S, PAUSE_S = 300, 1, 0.1


class ContenderProcesses:
    """The processes of one contender, waiting to run.

    Args:
        name: for errors.
        kind: a class of ``contenders.py``.
        argument: of the class.
        processes: their number.
        folder: an empty one.
        size: of the model, a key of ``SHAPES`` in ``contenders.py``.
    """

    def __init__(self, name, kind, argument, processes, folder, *, size):
        self.name, self.processes, self.folder = name, processes, folder
        folder.mkdir()
        for rank in range(processes):
            os.mkfifo(folder / f"turn.{rank}")
        os.mkfifo(folder / "done")
        self.done = os.open(folder / "done", os.O_RDWR)
        self.output = (folder / "output").open("w")
        command = [sys.executable, "-m", "counterpoint", "run", "-n", str(processes), "--threads", "1", str(SCRIPT)]
        self.process = subprocess.Popen(
            [*command, kind, argument or "-", str(folder), size], stdout=self.output, stderr=subprocess.STDOUT
        )
        self.turns = [os.open(folder / f"turn.{rank}", os.O_RDWR) for rank in range(processes)]

    def __enter__(self):
        self.run_turn()
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.output.close()
        for pipe in (*self.turns, self.done):
            os.close(pipe)

    def run_turn(self):
        """Run once on every rank; the first time, build the model."""
        self._write_all(b"t")
        self._wait_all()

    def collect_results(self):
        """Return the results of all ranks, which then exit."""
        self._write_all(b"e")
        self._wait_all()
        return [json.loads((self.folder / f"found.{rank}").read_text()) for rank in range(self.processes)]

    def _write_all(self, command):
        for pipe in self.turns:
            os.write(pipe, command)

    def _wait_all(self):
        end, left = time.monotonic() + DEADLINE_S, self.processes
        while left:
            ready, _, _ = select.select([self.done], [], [], SELECT_S)
            if ready:
                left -= len(os.read(self.done, left))
            elif self.process.poll() is not None or time.monotonic() > end:
                lines = (self.folder / "output").read_text().splitlines()
                raise LaunchError(f"{self.name} ended with {self.process.poll()}:\n" + "\n".join(lines[-12:]))


def wait_for_turns(folder, rank, on_idle):
    """Yield at the start of each turn of a rank, until there are no more.

    ``on_idle()`` is called repeatedly while waiting: an asynchronous pipeline may receive data for its next step.
    """
    with (
        (folder / f"turn.{rank}").open("rb", buffering=0) as commands,
        (folder / "done").open("wb", buffering=0) as done,
    ):
        while True:
            while not select.select([commands], [], [], PAUSE_S)[0]:
                on_idle()
            if commands.read(1) != b"t":
                return
            yield
            done.write(b"d")
