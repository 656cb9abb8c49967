"""A supervised process ends with all that it has started, whoever waits for it."""

import os
import pathlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from counterpoint.launchers.child_process import ChildProcess, kill_processes, stop_processes

pytestmark = pytest.mark.process
STARTS_ANOTHER = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
"""


def start(code):
    """A process that has printed its first line, and that line."""
    process = ChildProcess([sys.executable, "-c", code], os.environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        return process, out.readline()


def is_running(pid):
    """Whether a process runs; one that has ended may still wait for init."""
    try:
        with pathlib.Path(f"/proc/{pid}/stat").open(encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pid):
    """Return once the process has ended; the test's timeout is the limit."""
    while is_running(pid):
        os.sched_yield()


def test_what_a_process_has_started_is_killed_when_it_ends():
    process, pid = start(STARTS_ANOTHER + "sys.exit(7)")
    assert process.wait() == process.poll() == 7
    await_end(int(pid))
    assert not is_running(int(pid))


@pytest.mark.long
def test_a_process_that_ignores_sigterm_is_killed_with_what_it_started():
    process, pid = start(STARTS_ANOTHER + "while True: signal.pause()")
    other, _ = start("import signal; print(1, flush=True); signal.pause()")
    stop_processes([process, other])
    assert (process.poll(), other.poll()) == (-signal.SIGKILL, -signal.SIGTERM)
    await_end(int(pid))
    assert not is_running(int(pid))


def test_several_threads_can_wait_for_one_process_and_signal_it_after_its_end():
    process, _ = start("import signal; print(1, flush=True); signal.pause()")
    with ThreadPoolExecutor(3) as pool:
        codes = [pool.submit(process.wait) for _ in range(3)]
        kill_processes([process])
        assert [code.result() for code in codes] == [-signal.SIGKILL] * 3
    process.send_signal(signal.SIGTERM)
    assert process.poll() == -signal.SIGKILL
