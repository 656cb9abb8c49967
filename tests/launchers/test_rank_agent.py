"""An agent runs a rank's process on another host, and reports how it ended."""

import sys
import threading

import pytest

from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.liveness_probe import live_ranks
from counterpoint.launchers.rank_agent import RankAgent, to_rank_exit

pytestmark = pytest.mark.process


def found_at(agent):
    host, port = agent.reserve()
    return RankEnvironment(0, 2, 0, 1, host, port, "job")


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return ["python", "-m", "counterpoint.launchers", str(path)]


def test_an_agent_runs_a_rank_with_its_environment(tmp_path):
    agent = RankAgent()
    rank_env = found_at(agent)
    out = tmp_path / "rank_env"
    text = f"import pathlib, counterpoint.launchers as l; pathlib.Path({str(out)!r}).write_text(repr(l.detect()))"
    assert agent.run(script(tmp_path, text), rank_env, {"TORCHELASTIC_RESTART_COUNT": "1"})["returncode"] == 0
    assert f"world_size=2, local_rank=0, local_world_size=1, master_addr='{rank_env.master_addr}'" in out.read_text()


def test_an_error_is_reported_with_its_location_in_the_supervisors_clock(tmp_path):
    agent = RankAgent()
    ended = agent.run(script(tmp_path, "raise ValueError('too wide')"), found_at(agent), {})
    outcome = to_rank_exit(3, ended, now_s=1000.0, stopped_s=None)
    assert outcome.error is not None
    assert (outcome.rank, outcome.error.kind, outcome.error.message) == (3, "ValueError", "too wide")
    assert outcome.error.location.endswith("script.py:1")
    assert 990 < outcome.error.time_s < 1000


def test_a_rank_that_is_asked_to_end_ends(tmp_path):
    agent = RankAgent()
    threading.Timer(0.5, agent.stop).start()
    ended = agent.run([sys.executable, "-c", "import signal; signal.pause()"], found_at(agent), {})
    assert ended["returncode"] == -15


def process(proc, pid, parent, state, environ):
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "environ").write_bytes(environ)
    (folder / "stat").write_text(f"{pid} (a (b) c) {state} {parent} {'1 ' * 48}")


def test_ranks_live_that_have_neither_ended_nor_been_stopped(tmp_path):
    process(tmp_path, 1, 0, "S", b"PATH=/bin\0PET_NNODES=2\0")
    process(tmp_path, 10, 1, "R", b"PATH=/bin\0LOCAL_RANK=0\0")
    process(tmp_path, 11, 1, "T", b"LOCAL_RANK=1\0")
    process(tmp_path, 12, 11, "S", b"LOCAL_RANK=1\0")  # a worker of a rank that is stopped
    process(tmp_path, 13, 1, "Z", b"LOCAL_RANK=2\0")
    (tmp_path / "14").mkdir()
    (tmp_path / "self").mkdir()
    assert live_ranks(tmp_path) == {0}
