"""``counterpoint train -n 2``: one process per rank, shown as one, ended together."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.fabric.shm.native import native

pytestmark = pytest.mark.process


def words(*more):
    return [sys.executable, "-m", "counterpoint", "train", "digits", "-n", "2", "--folder", "run", *map(str, more)]


@contextlib.contextmanager
def training(folder):
    """Yield a run of two ranks that goes on for long, in its third step or later, with the ranks' process numbers."""
    command = words("--steps", 10**6, "--progress", "json", "--set", "output.interval_s=0")
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        for line in run.stdout:
            if json.loads(line).get("step") == 3:
                break
        yield run, ranks_of(run.pid)
    finally:
        run.kill()
        run.communicate()


def ranks_of(parent):
    """The process numbers of the ranks that a process has started, by rank."""
    actual: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                variables = (path.parent / "environ").read_text().split("\0")
                actual |= {int(v[5:]): int(path.parent.name) for v in variables if v.startswith("RANK=")}
    return actual


def check_run(run, began_s):
    """What a run said about its end, its exit code, and whether it came within 5 s."""
    _, errors = run.communicate(timeout=20)
    report = [line for line in errors.splitlines() if not line.startswith("[rank")]
    return report, run.returncode, time.monotonic() - began_s < 5


def is_alive(pid):
    return Path(f"/proc/{pid}").exists()


def losses_in(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


@pytest.mark.long
def test_two_processes_train_what_two_ranks_in_one_process_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ("--steps", 4, "--progress", "plain", "--folder")
    apart = subprocess.run(words(*short, "apart"), capture_output=True, text=True, check=True).stdout
    actual = CliRunner().invoke(build_app(["train"]), words(*short, "together", "--local", "--strategy", "data(2)")[3:])
    plan = "data(2, update=sharded)" if native().library is not None else "data(2)"  # they share memory if they can
    for name, output, expected in [("apart", apart, plan), ("together", actual.output, "data(2, update=sharded)")]:
        assert output.startswith(f"digits: {expected} on 2 ranks")
        assert output.splitlines()[-1] == f"report: {name}/report.html"
    assert losses_in(tmp_path / "apart") == pytest.approx(losses_in(tmp_path / "together"), rel=1e-5)


@pytest.mark.long
def test_a_killed_rank_ends_the_run_and_the_report_begins_with_its_name(tmp_path):
    with training(tmp_path) as (run, ranks):
        began_s = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        report, code, soon = check_run(run, began_s)
    assert report[0].startswith(f"rank 1 was killed by SIGKILL (pid {ranks[1]}, ")
    assert report[1].startswith("rank 0 stopped because of rank 1: rank 0 waited ")
    assert report[2:] == ["report: run/report.html"]
    assert (code, soon) == (137, True)
    assert not any(map(is_alive, ranks.values()))
    assert "ended early: " in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_ctrl_c_ends_all_ranks_with_130(tmp_path):
    with training(tmp_path) as (run, ranks):
        began_s = time.monotonic()
        run.send_signal(signal.SIGINT)
        report, code, soon = check_run(run, began_s)
    assert report == ["stopped by SIGINT; all 2 ranks have ended", "report: run/report.html"]
    assert (code, soon) == (130, True)
    assert not any(map(is_alive, ranks.values()))
    assert "ended early: interrupted by Ctrl-C" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    with training(tmp_path) as (run, ranks):
        run.stdout.close()
        assert run.wait(timeout=20) == 141
    assert not any(map(is_alive, ranks.values()))


@pytest.mark.long
def test_an_error_on_all_ranks_is_reported_once(tmp_path):
    result = subprocess.run(words("--batch-size", 7), cwd=tmp_path, capture_output=True, text=True)
    first, second = result.stderr.splitlines()
    named = re.match(
        r"rank ([01]) failed: PlanError: a batch of 7 samples cannot be split into the 2 equal microb", first
    )
    assert named, first  # both fail at the same moment: either may be reported first
    assert second == f"rank {1 - int(named[1])} failed in the same way"
    assert (result.returncode, list(tmp_path.iterdir())) == (1, [])
