"""Commands on hosts: their output, their exit, and a common timeout."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from benchmarks.lab.host import LabError, LabHost

TAIL_LINES = 12
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class FinishedCommand:
    """A finished command.

    Args:
        name: its host, or its rank and host.
        code: exit status; minus the signal that killed it.
        out: its standard output.
        err: its standard error.
    """

    name: str
    code: int
    out: str
    err: str

    def text(self) -> str:
        """Return its standard output if it succeeded.

        Raises:
            LabError: it failed; the message has its last lines.
        """
        if self.code:
            raise LabError(f"{self.name} ended with {self.code}:\n{self.last_lines()}")
        return self.out

    def last_lines(self) -> str:
        return "\n".join(f"  {line}" for line in (self.out + self.err).splitlines()[-TAIL_LINES:])


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """A command that was started on a host.

    Args:
        name: for errors.
        process: the ``nsenter`` around it; both are in one process group.
        out: the nameless file that takes its standard output.
        err: likewise its standard error.
    """

    name: str
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command and to its children that stayed in its group."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait for its exit."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Close its output files."""
        self.out.close()
        self.err.close()

    def wait_for(self, text: str, deadline_s: float = 10.0) -> None:
        """Wait until it has written this to standard output.

        Raises:
            LabError: it had not within ``deadline_s``, or ended without it.
        """
        until = time.perf_counter() + deadline_s
        while text not in self.written():
            if self.process.poll() is not None and text not in self.written():
                raise LabError(f"{self.name} ended without writing {text!r}:\n{self.ended().last_lines()}")
            if time.perf_counter() > until:
                raise LabError(
                    f"{self.name} had not written {text!r} after {deadline_s:g} s; its deadline may be short"
                )
            time.sleep(POLL_S)

    def written(self) -> str:
        """Return its standard output so far."""
        return _content(self.out)

    def ended(self) -> FinishedCommand:
        """Wait for its exit and return the result."""
        return FinishedCommand(self.name, self.process.wait(), _content(self.out), _content(self.err))


def start(
    host: LabHost, command: Sequence[str], environ: Mapping[str, str] | None, name: str | None = None
) -> RunningCommand:
    """Start a command on a host with its output in unnamed files."""
    with contextlib.ExitStack() as opening:
        out, err = (opening.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        running = RunningCommand(name or host.name, host.start(command, environ, stdout=out, stderr=err), out, err)
        opening.pop_all()  # they are the command's now, until it is closed
        return running


def wait_all(running: Sequence[RunningCommand], deadline_s: float) -> list[FinishedCommand]:
    """Wait until all have ended and return how, in the order given.

    Raises:
        LabError: the deadline passed; it names those that were still running, which are killed, with their last lines.
    """
    until = time.perf_counter() + deadline_s
    late = []
    for one in running:
        try:
            one.process.wait(max(0.0, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            late.append(one)
    for one in late:
        one.kill()
    ended = [one.ended() for one in running]
    if late:
        names = {one.name for one in late}
        told = "\n".join(f"{one.name} ({_state(one, names)}):\n{one.last_lines()}" for one in ended)
        raise LabError(f"{', '.join(sorted(names))} had not ended after {deadline_s:g} s and were killed\n{told}")
    return ended


def _state(one: FinishedCommand, late: set[str]) -> str:
    return "killed" if one.name in late else f"ended with {one.code}"


def _content(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
