"""A rank that fails, dies or differs ends the run everywhere, at once, with a first line that names it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import counterpoint as cp
from counterpoint.launchers import launch
from tests.process import rank_functions as ranks

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
ENDLESS = """
import os
import counterpoint as cp
from counterpoint.launchers import launch
from tests.training.trainers import dataset, make_trainer

class Tell(cp.Callback):
    on_every_rank = True

    def on_step(self, event):
        if event.step == 2:
            print("started", os.environ["RANK"], os.getpid(), flush=True)

with make_trainer("{plan}", callbacks=[Tell()]) as one:
    one.fit(dataset(), batch_size=12, epochs=1_000_000)
"""


def variables():
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def running(folder, plan, num_ranks):
    """Yield `counterpoint run` of a training that never ends, and the process of each rank, all past step 2."""
    script = folder / "endless.py"
    script.write_text(ENDLESS.format(plan=plan))
    command = [sys.executable, "-m", "counterpoint", "run", "-n", str(num_ranks), str(script)]
    process = subprocess.Popen(command, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids: dict[int, int] = {}
    assert process.stdout is not None
    try:
        while len(pids) < num_ranks:
            line = process.stdout.readline()
            assert line, process.communicate()
            pids |= {int(rank): int(pid) for rank, pid in re.findall(r"started (\d+) (\d+)", line)}
        yield process, pids
    finally:
        process.kill()
        process.communicate()


def ended(process, began):
    """Return the exit code and the report; all of it within 5 seconds."""
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    lines = [line for line in errors.splitlines() if not line.startswith("[rank ")]
    return process.returncode, lines


def gone(pids):
    return not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


@pytest.mark.long
def test_a_killed_rank_ends_the_run_within_five_seconds_and_is_named(tmp_path):
    with running(tmp_path, "pipeline(2)", 2) as (process, pids):
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        code, lines = ended(process, began)
        assert code == 128 + signal.SIGKILL
        assert re.match(
            rf"rank 1 was killed by SIGKILL \(pid {pids[1]}, after [\d.]+ s\); unless a user sent it", lines[0]
        )
        assert gone(pids)


@pytest.mark.long
def test_ctrl_c_ends_the_run_with_130(tmp_path):
    with running(tmp_path, "zero(2, level=3)", 2) as (process, pids):
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        code, lines = ended(process, began)
        assert code == 130
        assert lines[-1] == "stopped by SIGINT; all 2 ranks have ended"
        assert gone(pids)


@pytest.mark.long
def test_ranks_that_differ_or_fail_are_named_on_all_ranks():
    lines: dict[int, list[str]] = {0: [], 1: []}
    with pytest.raises(
        cp.LaunchError, match=r"^rank 1 failed: OSError: OSError: the disk is full at .*rank_functions\.py:\d+"
    ):
        launch(ranks.fail, ranks=2, on_line=lambda line: lines[line.rank].append(line.text))
    error_lines = [[text for text in texts if re.match(r"\w+Error: ", text)] for texts in lines.values()]
    (mine, failed, *_), (theirs, own, *_) = error_lines
    assert mine == theirs
    assert mine.startswith(
        "PlanError: the ranks do not train the same model: 2.weight is float64 (8, 8) on cpu on rank 0, "
        "float64 (4, 8) on cpu on rank 1; every rank must build the same one"
    )
    assert own == "OSError: the disk is full"
    assert re.match(r"PeerError: .*rank 1.*OSError: the disk is full", failed)


def test_a_port_in_use_is_refused_before_any_rank_starts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('a rank has started')")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "counterpoint", "run", "-n", "2", "--port", str(port), str(script)]
        done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert str(port) in done.stderr
    assert "a rank has started" not in done.stdout
    assert "Traceback" not in done.stderr
