"""Run ranks as processes of this host, prefix their output, and supervise them until the last one has ended."""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, Literal

from counterpoint.errors import LaunchError
from counterpoint.launchers.child_process import GRACE_S, ChildProcess, kill_processes
from counterpoint.launchers.environment import (
    ERROR_FILE,
    EXITED_FILE,
    KEY_FILE,
    STORE_FD,
    TIMEOUT_S,
    RankEnvironment,
    rank_variables,
    require_seconds,
)
from counterpoint.launchers.exit_report import (
    ErrorRecord,
    RankExit,
    exit_code,
    find_failed_stop,
    find_root_cause,
    format_report,
    format_stop,
    severity,
    wait_for_others_s,
)
from counterpoint.launchers.machine import place_on_this_host
from counterpoint.launchers.ports import LOOPBACK, reserve_port
from counterpoint.launchers.rank_activity import RankActivity, StopTimer, read_activity
from counterpoint.launchers.signals import ENDING_SIGNALS, collect_signals
from counterpoint.launchers.variables import THREADS_VARIABLE, requested_threads
from counterpoint.rpc.job_key import new_key, write_key
from counterpoint.terminal_text import escape_output, write_line
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding, RankPlacement

READ_BYTES = 65536
LINE_MAX_BYTES = 65536

OutputStream = Literal["out", "err"]


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line of a rank's output, without its line end."""

    rank: int
    stream: OutputStream
    text: str


OnLine = Callable[[OutputLine], None]


def write_prefixed(line: OutputLine) -> None:
    """Write the line to our stdout or stderr, after ``[rank N]``; control characters other than colors are escaped."""
    stream, prefix = sys.stdout if line.stream == "out" else sys.stderr, f"[rank {line.rank}] "
    write_line(stream, prefix + escape_output(line.text).replace("\r", f"\r{prefix}"))


class OutputReader:
    """Reads the pipes of all ranks without blocking on any; owns and closes the file descriptors.

    Mutable: it holds incomplete lines.
    """

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._parts: dict[int, tuple[int, OutputStream, bytearray]] = {}

    def add(self, descriptor: int, rank: int, stream: OutputStream) -> None:
        """Start to read this pipe."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._parts[descriptor] = (rank, stream, bytearray())

    def poll(self, wait_s: float) -> bool:
        """Pass on lines that arrive within ``wait_s``; return whether any did."""
        ready = self._selector.select(wait_s)
        for key, _ in ready:
            self._read(key.fd)
        return bool(ready)

    def finish(self, rank: int) -> None:
        """Forward the remaining output of an ended rank, and close its pipes, even if another process holds them."""
        for descriptor in [fd for fd, (owner, _, _) in self._parts.items() if owner == rank]:
            while descriptor in self._parts and self._read(descriptor):
                pass
            self._close_pipe(descriptor)

    def close(self) -> None:
        """Close everything; unread output is lost."""
        for descriptor in list(self._parts):
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._parts.clear()
        self._selector.close()

    def _read(self, descriptor: int) -> bool:
        """Pass on available output; return whether there may be more."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(descriptor)
            return False
        rank, stream, part = self._parts[descriptor]
        *whole, rest = (bytes(part) + data).split(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            whole, rest = [*whole, rest], b""
        part[:] = rest
        for text in whole:
            self._on_line(OutputLine(rank, stream, text.decode(errors="replace").rstrip("\r")))
        return True

    def _close_pipe(self, descriptor: int) -> None:
        if descriptor not in self._parts:
            return
        rank, stream, part = self._parts.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if part:
            self._on_line(OutputLine(rank, stream, part.decode(errors="replace")))


OPEN_FILES, OPEN_FILES_PER_RANK = 32, 2  # two pipes for the output of each
POLL_S = 0.02
STATE_POLL_S = 1.0
FORWARDED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1)
STOP_GRACE_S = 30.0
"""The default time that ranks have to save and end, from the signal that asks them to the one that kills them."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Args:
        exit_code: 0; else the failed rank's, or 128 + the signal that ended it or us.
        report: empty, or why the run failed; its first line names the rank at fault.
        failed_rank: the rank at fault, if any.
        exits: of every rank, by rank.
    """

    exit_code: int
    report: str
    failed_rank: int | None
    exits: tuple[RankExit, ...]


def script_command(script: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line of a rank that runs a script as ``python script.py arguments`` would.

    Raises:
        LaunchError: there is no such script.
    """
    if not Path(script).exists():
        raise LaunchError(f"there is no script {script} in {Path.cwd()}; give the path of a Python file")
    return [sys.executable, "-m", "counterpoint.launchers", str(script), *arguments]


def run_command(  # noqa: PLR0913 - the options of a run, most by keyword
    argv: Sequence[str],
    ranks: int,
    *,
    threads_per_rank: int | None = None,
    bind: Binding = DEFAULT_BINDING,
    port: int | None = None,
    timeout_s: float | None = None,
    transport: str | None = None,
    device: str | None = None,
    grace_s: float = STOP_GRACE_S,
    on_line: OnLine = write_prefixed,
) -> RunResult:
    """Run the command as ``ranks`` processes until all of them have ended.

    If one fails, the others are stopped (SIGTERM, after 2 s SIGKILL). SIGTERM, SIGUSR1 and SIGHUP (as SIGTERM) to this
    process are passed on once each, and after ``grace_s`` ranks that still run are killed. SIGINT is passed on as well,
    and kills if it is not the first signal. If this process is killed, the kernel kills the ranks.

    Args:
        argv: the command of every rank; see ``script_command``.
        ranks: number of ranks.
        threads_per_rank: OMP_NUM_THREADS of each; by default what the user has set, else cores // ranks. If ranks
            outnumber the cores it is 1, with a note on stderr.
        bind: binding to cores; see :func:`counterpoint.world.cpu_affinity.place_ranks`.
        port: rendezvous port on the loopback interface; None for a free one.
        timeout_s: passed to the ranks: how long they wait for each other to arrive.
        transport: passed to the ranks.
        device: passed to the ranks.
        grace_s: seconds that ranks have to save and end after a signal to this process.
        on_line: called with every line that a rank writes.

    Returns:
        How the run ended. A failed rank is a result, not an exception.

    Raises:
        LaunchError: no rank was started: an invalid number, no such command, or the port is taken.
    """
    _check_command(argv, ranks)
    require_seconds("grace", grace_s, 0.0)
    require_seconds("timeout", timeout_s)
    placement = place_on_this_host(ranks, threads_per_rank, bind)
    if placement.note:
        write_line(sys.stderr, f"counterpoint: {placement.note}")
    with ExitStack() as stack:
        received = stack.enter_context(collect_signals(FORWARDED_SIGNALS))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        lines = OutputReader(on_line)
        stack.callback(lines.close)
        supervisor = _RankSupervisor(lines, received, grace_s)
        stack.callback(supervisor.kill_all)
        with reserve_port(port) as port_socket:
            job, bound_port = f"counterpoint-{secrets.token_hex(6)}", port_socket.getsockname()[1]
            key_file = os.environ.get(KEY_FILE) or str(folder / "job.key")
            if KEY_FILE not in os.environ:
                write_key(new_key(), Path(key_file))
            for rank in range(ranks):
                store_fd = port_socket.fileno() if rank == 0 else None
                environment = RankEnvironment(
                    rank,
                    ranks,
                    rank,
                    ranks,
                    LOOPBACK,
                    bound_port,
                    job,
                    timeout_s,
                    store_fd,
                    transport=transport,
                    key_file=key_file,
                    device=device,
                )
                supervisor.start(argv, environment, folder / f"rank-{rank}.json", placement.ranks[rank])
        return supervisor.run()


def _check_command(argv: Sequence[str], ranks: int) -> None:
    if ranks < 1:
        raise LaunchError(f"{ranks} ranks cannot run; give at least 1")
    if not argv or shutil.which(argv[0]) is None:
        raise LaunchError(f"there is no command {argv[0] if argv else ''!r}; give a script, or a program on PATH")
    num_files, limit = OPEN_FILES + ranks * OPEN_FILES_PER_RANK, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and num_files > limit:
        raise LaunchError(
            f"{ranks} ranks need {num_files} open files in this process, which may have {limit}; start fewer ranks on "
            f"this host, or raise the limit with ulimit -n {num_files}"
        )


@dataclass(slots=True)
class _RankProcess:
    rank: int
    process: ChildProcess
    error_file: Path
    started_s: float
    stopped_s: float | None = None
    stop_timer: StopTimer = field(default_factory=StopTimer)
    activity: RankActivity | None = None

    def read_activity(self, now_s: float) -> RankActivity:
        """Return what the rank does, before it is stopped."""
        self.stop_timer.observe(self.process.stopped_by(), now_s)
        if self.stop_timer.stopped_by:
            return RankActivity(self.stop_timer.stopped_by, now_s - self.stop_timer.since_s)
        return read_activity(self.process, self.error_file)


@dataclass(slots=True)
class _RankSupervisor:
    """Running ranks, and the exits of the others."""

    lines: OutputReader
    received: list[int]
    grace_s: float
    running: list[_RankProcess] = field(default_factory=list)
    exits: list[RankExit] = field(default_factory=list)
    stop_s: float = inf
    kill_s: float = inf
    forwarded: set[int] = field(default_factory=set)
    killed: list[int] = field(default_factory=list)  # ranks that were still running after the grace period
    state_poll_s: float = 0.0

    def start(self, argv: Sequence[str], environment: RankEnvironment, error_file: Path, place: RankPlacement) -> None:
        """Start a rank, bound to its cores, and read its output."""
        are_threads_set = THREADS_VARIABLE in os.environ and requested_threads() == place.threads
        threads = {} if are_threads_set else {THREADS_VARIABLE: str(place.threads)}
        process = ChildProcess(
            argv,
            rank_environ(environment, error_file, threads),
            cpus=place.cpus,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            inherited_fd=environment.store_fd,
        )
        self.running.append(_RankProcess(environment.rank, process, error_file, time.monotonic()))
        pipes: list[tuple[IO[bytes] | None, OutputStream]] = [(process.stdout, "out"), (process.stderr, "err")]
        for pipe, stream in pipes:
            assert pipe is not None
            self.lines.add(os.dup(pipe.fileno()), environment.rank, stream)
            pipe.close()

    def run(self) -> RunResult:
        """Supervise until every rank has ended."""
        while self.running:
            self.lines.poll(POLL_S)
            self._reap()
            now_s = time.monotonic()
            self._report_stopped(now_s)
            self._update_deadlines(now_s)
        outcomes = tuple(sorted(self.exits, key=lambda outcome: outcome.rank))
        if self.received:
            grace_s = None if self._is_killed_by_user else self.grace_s
            text = format_stop(outcomes, self.received, self.killed, grace_s)
            failed = find_failed_stop(outcomes, self.received)
            if failed:
                return RunResult(failed.returncode if failed.returncode > 0 else 1, text, failed.rank, outcomes)
            return RunResult(128 + self.received[0], text, None, outcomes)
        root_cause = find_root_cause(outcomes)
        return RunResult(
            exit_code(outcomes), format_report(outcomes), None if root_cause is None else root_cause.rank, outcomes
        )

    def kill_all(self) -> None:
        """Kill and reap all running ranks."""
        kill_processes([child.process for child in self.running])
        self.running.clear()

    @property
    def _is_killed_by_user(self) -> bool:
        """Whether Ctrl-C came after another signal, and so asks to wait no longer."""
        return signal.SIGINT in self.received[1:]

    def _update_deadlines(self, now_s: float) -> None:
        """Decide when to stop the ranks: at once after a signal, soon after a certain failure, else a little later."""
        if self.received:
            self._forward_signals(now_s)
        else:
            records = {child.rank: record for child in self.running if (record := ErrorRecord.read(child.error_file))}
            self.stop_s = min(self.stop_s, now_s + wait_for_others_s(self.exits, records))
        if self.kill_s == inf and self.stop_s <= now_s:
            self._read_activities(now_s)
            self._signal(signal.SIGTERM)
            self.kill_s = now_s + GRACE_S
        if self.kill_s <= now_s or self._is_killed_by_user:
            self.killed = self.killed or [child.rank for child in self.running]
            for child in self.running:
                if self.received and child.process.stopped_by():
                    child.activity = child.read_activity(now_s)
            self._signal(signal.SIGKILL)

    def _forward_signals(self, now_s: float) -> None:
        """Pass each kind of signal on once: a scheduler may have sent it to this process twice, and to the ranks."""
        for number in set(self.received) - self.forwarded:
            self.forwarded.add(number)
            for child in self.running:
                child.stopped_s = child.stopped_s or now_s
                alone = signal.SIGTERM if number == signal.SIGHUP else number  # it may use what it has started
                child.process.send_signal(alone, to_session=False)
            self.kill_s = min(self.kill_s, now_s + self.grace_s)

    def _read_activities(self, now_s: float) -> None:
        """Find out what the running ranks do, if those that failed have only waited for one of them."""
        if not any(severity(rank_exit) < 2 for rank_exit in self.exits):
            for child in self.running:
                if not child.error_file.exists():  # its script has not ended
                    child.stopped_s = child.stopped_s or time.monotonic()  # being asked may end what it waits for
                    child.activity = child.read_activity(now_s)

    def _report_stopped(self, now_s: float) -> None:
        """Tell the user of a rank that has been stopped for a while, for which the others may wait."""
        if now_s < self.state_poll_s:
            return
        self.state_poll_s = now_s + STATE_POLL_S
        for child in self.running:
            timer, pid = child.stop_timer, child.process.pid
            if timer.observe(child.process.stopped_by(), now_s):
                write_line(
                    sys.stderr,
                    f"counterpoint: rank {child.rank} (pid {pid}) has been stopped by {timer.stopped_by} for "
                    f"{now_s - timer.since_s:.0f} s, and others may wait for it; `kill -CONT {pid}` lets it go on",
                )

    def _signal(self, number: signal.Signals) -> None:
        for child in self.running:
            child.stopped_s = child.stopped_s or time.monotonic()
            child.process.send_signal(number)
            child.process.send_signal(signal.SIGCONT)  # or a stopped process would not end before SIGKILL

    def _reap(self) -> None:
        """Record ranks that have ended."""
        for child in list(self.running):
            code = child.process.poll()
            if code is None:
                continue
            ended_s = time.monotonic()
            self.lines.finish(child.rank)
            self.running.remove(child)
            child.error_file.with_name(EXITED_FILE).touch()
            record = ErrorRecord.read(child.error_file)
            pid, seconds = child.process.pid, ended_s - child.started_s
            self.exits.append(
                RankExit(child.rank, pid, code, seconds, ended_s, child.stopped_s, record, child.activity)
            )
            stop_signal = record.stop_signal if record else 0
            if stop_signal and not self.received:  # a signal to the ranks alone
                self.received.append(stop_signal)
                self.forwarded.add(stop_signal)  # all ranks have agreed on it
                self.kill_s = ended_s + self.grace_s


def rank_environ(environment: RankEnvironment, error_file: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment variables: this process's, those of the rank, and extra ones.

    Args:
        environment: the rank's.
        error_file: for its error record.
        extra: further variables.
    """
    stale = {"TORCHELASTIC_USE_AGENT_STORE", STORE_FD, TIMEOUT_S}
    inherited = {name: value for name, value in os.environ.items() if name not in stale}
    return {**inherited, **rank_variables(environment), **extra, ERROR_FILE: str(error_file)}
