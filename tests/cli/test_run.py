"""``counterpoint run``: a script runs as without a launcher, and the first line of a failure names it."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def command(*words, environment=()):
    return subprocess.run(
        [sys.executable, "-m", "counterpoint", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **dict(environment)},
    )


@pytest.fixture
def script(tmp_path):
    def make(text):
        path = tmp_path / "script.py"
        path.write_text(f"import os, sys, signal\nrank = int(os.environ.get('RANK', -1))\n{text}\n")
        return path

    return make


def test_the_scripts_own_options_reach_it_unchanged(script):
    result = command("run", "-n", 2, script("print(sys.argv[1:])"), "-n", "9", "--help", "--ranks=3", "--", "x")
    assert result.returncode == 0
    words = "['-n', '9', '--help', '--ranks=3', '--', 'x']"
    assert sorted(result.stdout.splitlines()) == [f"[rank {rank}] {words}" for rank in range(2)]


def test_threads_and_deadline_reach_the_ranks(script):
    path = script("print(os.environ['OMP_NUM_THREADS'], os.environ['COUNTERPOINT_TIMEOUT_S'])")
    assert command("run", "--threads", 3, "--timeout", 7, path).stdout == "[rank 0] 3 7.0\n"


def test_the_exit_code_is_that_of_the_rank_that_failed_and_the_report_names_it(script):
    result = command("run", "-n", 2, script("if rank == 1: raise ValueError('too wide')\nsignal.pause()"))
    assert result.returncode == 1
    report = [line for line in result.stderr.splitlines() if not line.startswith("[rank")]
    assert report[0].startswith("rank 1 failed: ValueError: too wide at ")
    assert report[1:] == ["rank 0 stopped because of rank 1"]


def test_a_killed_rank_is_reported_with_its_signal(script):
    result = command("run", "-n", 2, script("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else signal.pause()"))
    assert result.returncode == 137
    assert result.stderr.startswith("rank 0 was killed by SIGKILL")


def test_a_script_that_is_not_there_is_an_error_without_traceback():
    result = command("run", "nowhere.py")
    assert result.returncode == 1
    assert result.stderr.startswith("LaunchError: there is no script nowhere.py in ")
    assert "Traceback" not in result.stderr


def test_ranks_do_not_start_ranks(script):
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    result = command("run", script(""), environment={**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert result.returncode == 1
    assert result.stderr.startswith("LaunchError: this is already rank 0 of 1; ranks do not start ranks")
