"""A known key in a job: it is in no command line, environment, output, file, report or error text of the job."""

import base64
import os
import threading
from pathlib import Path

import pytest
import torch

from counterpoint.errors import LaunchError
from counterpoint.launchers import run_command, script_command
from counterpoint.launchers.environment import KEY_FILE
from counterpoint.launchers.server_processes import start_servers
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.join_job import join
from counterpoint.ps.update_rules import Sgd
from counterpoint.rpc.job_key import JobKey, new_key, write_key
from tests.launchers.ranks import script

pytestmark = pytest.mark.process
SECRET = bytes(range(0x41, 0x61))
FORMS = [
    SECRET,
    SECRET.hex().encode(),
    SECRET.hex().upper().encode(),
    base64.b64encode(SECRET)[:40],
    repr(SECRET)[2:-1].encode(),
]
TRAIN = """
import torch, counterpoint as cp
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
model = torch.nn.Linear(2, 1)
trainer = cp.Trainer(model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), strategy="data(2)")
trainer.fit(data, batch_size=4, max_steps=2, run_dir="run", save_every=1)
raise RuntimeError(f"the rank crashes with {trainer!r}, {vars(trainer)}")
"""


def descendants(root):
    """The processes that this one has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


class ProcessRecords(threading.Thread):
    """Reads command line and environment of all descendants, again and again until it is stopped."""

    def __init__(self):
        super().__init__()
        self.over, self.texts = threading.Event(), {}

    def run(self):
        while not self.over.wait(0.5):
            for pid in descendants(os.getpid()):
                for name in ("cmdline", "environ"):
                    try:
                        self.texts[pid, name] = Path(f"/proc/{pid}/{name}").read_bytes() or self.texts.get(
                            (pid, name), b""
                        )
                    except OSError:
                        continue

    def stop(self):
        self.over.set()
        self.join()


def files_below(folder, when):
    return {f"{when}: {path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_job(folder, key):
    """Everything that a job with two ranks, a coordinator, a server and a stranger shows or writes, by its name."""
    lines, job = [], JobConfig("canary", Asp(), 1)
    with start_servers(job, folder=folder / "servers", key=key, is_journaled=True) as servers:
        with servers.join("worker-0") as session:
            session.init("weight", torch.zeros(3), Sgd(0.1))
            session.push("weight", torch.ones(3)).wait()
            command = script_command(script(folder, TRAIN))
            result = run_command(command, 2, on_line=lambda line: lines.append(line.text))
            texts = files_below(folder, "during")
        with pytest.raises(LaunchError) as caught:
            join(servers.contact, "stranger", new_key(), timeout_s=1.0)
    shown = {
        "report": result.report,
        "result": repr(result),
        "output": "\n".join(lines),
        "stranger": repr(caught.value),
    }
    return texts | files_below(folder, "after") | {name: text.encode() for name, text in shown.items()}


def where_the_key_is(texts):
    return [name for name, text in texts.items() if any(form in text for form in FORMS)]


@pytest.mark.long
def test_the_key_of_a_job_is_nowhere_but_in_its_file(tmp_path, monkeypatch):
    key = JobKey(SECRET)
    write_key(key, tmp_path / "job.key")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "job.key"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    records = ProcessRecords()
    records.start()
    try:
        texts = run_job(tmp_path, key)
    finally:
        records.stop()
    assert b"the rank crashes with" in texts["report"]
    assert any("checkpoints" in name for name in texts)
    assert len({pid for pid, _ in records.texts}) >= 4
    assert where_the_key_is(records.texts | texts) == ["during: job.key", "after: job.key"]


def test_the_search_finds_the_key_in_each_form():
    assert where_the_key_is({form: b"text " + form + b" text" for form in FORMS}) == FORMS
