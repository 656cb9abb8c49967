"""The same script under python, under our launcher and under torchrun gives the same losses."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.test_faults import variables

pytestmark = pytest.mark.process
SCRIPT = """
import json, sys
from pathlib import Path
from tests.training.trainers import dataset, make_trainer

with make_trainer("data(2)") as one:
    history = one.fit(dataset(), batch_size=12, epochs=2)
    Path(sys.argv[1], f"{one.rank}.json").write_text(json.dumps(history.losses))
"""


def losses_of(folder):
    """The losses that every rank has written, which are the same on all of them."""
    result = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert all(losses == result[0] for losses in result)
    return result[0], len(result)


@pytest.mark.long
def test_one_script_under_three_launchers(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = Path(sys.executable).with_name("torchrun")
    commands = {
        "ours": [sys.executable, "-m", "counterpoint", "run", "-n", "2", script],
        "torchrun": [torchrun, "--nproc-per-node", "2", script],
    }
    started = {name: start([*command, tmp_path / name]) for name, command in commands.items()}
    (tmp_path / "python").mkdir()
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "python")])
    runpy.run_path(str(script), run_name="__main__")  # as `python script` does, but torch is loaded already
    for process in started.values():
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    (alone, one), (ours, two), (theirs, also_two) = (losses_of(tmp_path / name) for name in ("python", *commands))
    assert (one, two, also_two) == (1, 2, 2)
    assert ours == theirs
    assert ours == pytest.approx(alone, rel=1e-12)


def start(command):
    command[-1].mkdir()
    words = list(map(str, command))
    return subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
