"""A rank knows which of its host's other ranks have ended, or are stopped, without a launcher."""

import os
import signal
import subprocess
from contextlib import closing

import pytest

from counterpoint.fabric.peer_liveness import PeerProcesses

pytestmark = pytest.mark.process


def test_a_rank_that_a_signal_has_stopped_is_named_with_its_process():
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process,
        closing(PeerProcesses([-1, os.pidfd_open(process.pid)])) as processes,
    ):
        assert processes.describe_stopped() == ""
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert processes.describe_stopped() == (
            f"rank 1 (pid {process.pid}) has been stopped by a signal: find what stops it; "
            f"`kill -CONT {process.pid}` lets it go on"
        )
        assert processes.exited_rank() is None
        process.kill()
        process.wait()
        assert (processes.describe_stopped(), processes.exited_rank()) == ("", 1)
