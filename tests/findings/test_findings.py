"""What an attacker or an operator did at commit 83a3118, as scripts: each succeeded there and does no harm now.

Only commands and public names are used, whose spellings then and now are in ``SPELLINGS``, so that the same tests also
run against a checkout of that commit, where all of them fail::

    git worktree add ../then 83a3118 && (cd ../then && python setup.py build_ext --inplace)
    COUNTERPOINT_SOURCE=../then/src pytest tests/findings
"""

import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

SOURCE = Path(os.environ.get("COUNTERPOINT_SOURCE", Path(__file__).parents[2] / "src")).resolve()
THEN = {
    "folder": "save_to",
    "keep": "keep",
    "slices": "pieces",
    "models": "from counterpoint.spark.modules import read_tree as decode, write_tree as encode",
    "jobs": """
from counterpoint.server.hosting import Contact as JobEndpoint, write_contact as write_job_file
from counterpoint.server.job import Asp, Job as JobConfig
from counterpoint.server.wire.place import parse_place as parse_address
""",
}
NOW = {
    "folder": "checkpoint_dir",
    "keep": "keep_last",
    "slices": "slices",
    "models": "from counterpoint.spark.module_codec import decode_module as decode, encode_module as encode",
    "jobs": """
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.job_file import JobEndpoint, write_job_file
from counterpoint.rpc.address import parse_address
""",
}
SPELLINGS = NOW if (SOURCE / "counterpoint" / "ps").is_dir() else THEN
GIBIBYTE = 1 << 30

TRAIN = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import counterpoint as cp

given = {"steps": 8, "width": 4, "sleep_s": 0.0, "leaves": False, "plan": "data", "holds": {}, "fit": {},
         **json.loads(sys.argv[1])}

class Tells(cp.Callback):
    def on_step(self, event):
        print("stepped", flush=True)
        time.sleep(given["sleep_s"])
        if str(event.step) in given["holds"]:
            print("holds", flush=True)
            while not os.path.exists(given["holds"][str(event.step)]):
                time.sleep(0.02)

def loss(outputs, targets):
    if given["leaves"] and os.environ["RANK"] == "1" and torch.is_grad_enabled() and trainer is not None:
        sys.exit(0)
    return nn.functional.mse_loss(outputs, targets)

trainer = None

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, given["width"]), nn.Linear(given["width"], 1))
data = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))
with cp.Trainer(model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                strategy=given["plan"], callbacks=[Tells()], progress="off") as trainer:
    trainer.fit(data, batch_size=8, epochs=given["steps"] // 2, **given["fit"])
print("trained", flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def options(**given):
    """The argument of the training script; options of ``fit`` have their spelling."""
    fit = {SPELLINGS.get(name, name): value for name, value in given.pop("fit", {}).items()}
    return json.dumps({**given, "fit": fit})


def environment(**variables):
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTHONPATH")}
    return {**others, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables}


RUNNING: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def ended():
    """Leave no process behind, also where a test fails."""
    yield
    while RUNNING:
        process = RUNNING.pop()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def start(*words, memory_bytes=0):
    """Start Python; a script that wants more memory than it may have fails, instead of this machine."""

    def limit():
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=limit,
    )
    RUNNING.append(process)
    return process


def end(process, timeout_s=60.0):
    """Return the output and the exit code; a process that hangs is killed, and has the code None."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0].decode(errors="replace"), None
    return output.decode(errors="replace"), process.returncode


def run(*words, timeout_s=60.0, memory_bytes=0):
    return end(start(*words, memory_bytes=memory_bytes), timeout_s)


def wait_for(process, text):
    """Read the output until a line has a text."""
    lines = []
    for line in process.stdout:
        lines.append(line.decode(errors="replace"))
        if text in lines[-1]:
            return
    raise AssertionError(f"the output has no {text}: {''.join(lines)}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def manifests(folder):
    return sorted(folder.glob("step-*/manifest.json"))


def forge(path, change):
    """Change a manifest, and give it the checksum that belongs to it: anybody can compute it."""
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    sha256 = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": sha256}))


def declare_four_gigabytes(content):
    """Declare two columns of two billion rows, of which no byte is in any file."""
    of_file = content["files"][0]
    record, rows = of_file[SPELLINGS["slices"]][0], 2_000_000_000
    of_file[SPELLINGS["slices"]] = [
        {**record, "key": f"tensor-0000{at}", "dtype": "uint8", "global_shape": [rows, 2], "shape": [rows, 1],
         "offset": [0, at], "start": record["start"] + at * rows, "stop": record["start"] + (at + 1) * rows}
        for at in range(2)
    ]  # fmt: skip
    of_file["num_bytes"] = record["start"] + 2 * rows


def test_s2_a_saved_spark_model_runs_no_code(tmp_path):
    """Attacker: the author of a model, whose attribute is called when it is used."""
    code = f"""
import cProfile, functools
from torch import nn
{SPELLINGS["models"]}
model = nn.ReLU()
model.__dict__["train"] = functools.partial(cProfile.run, "open({str(tmp_path / "ran")!r}, 'w')")
data = encode(model, "the model")
decode(data).eval()
"""
    output, _ = run("-c", code)
    assert not (tmp_path / "ran").exists()
    assert "PlanError" in output


def test_s3_nothing_listens_on_loopback_without_a_key(tmp_path):
    """Attacker: another user of the host, who connects to the port of a coordinator."""
    port = free_port()
    code = f"""
{SPELLINGS["jobs"]}
from pathlib import Path
write_job_file(JobEndpoint(JobConfig("job", Asp(), 1), parse_address("tcp:127.0.0.1:{port}")), Path({str(tmp_path / "job")!r}))
"""
    assert run("-c", code)[1] == 0
    coordinator = start("-m", "counterpoint", "serve", "coordinator", "--job", tmp_path / "job")
    is_open, stop = False, time.monotonic() + 30
    while not is_open and coordinator.poll() is None and time.monotonic() < stop:
        with socket.socket() as stranger:
            is_open = stranger.connect_ex(("127.0.0.1", port)) == 0
        with suppress(subprocess.TimeoutExpired):
            coordinator.wait(timeout=0.05)
    coordinator.terminate()
    output, _ = end(coordinator)
    assert not is_open
    assert "there is no job key" in output


def test_s4_a_stranger_neither_lists_nor_writes_the_keys_of_a_running_job(script, tmp_path):
    """Attacker: another user of the host, with torch's own client, while two ranks train over gloo."""
    port = free_port()
    go = tmp_path / "go"
    words = ("-n", "2", "--transport", "gloo", "--port", port, script, options(holds={3: str(go)}))
    job = start("-m", "counterpoint", "run", *words)
    wait_for(job, "holds")
    code = f"""
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
print("keys", store.num_keys())
store.set("stopped", "1: FORGED")
print("written")
"""
    output, _ = run("-c", code)
    go.touch()
    told, code = end(job)
    assert "keys" not in output
    assert "written" not in output
    assert code == 0
    assert "trained" in told


@pytest.fixture
def saved(script, tmp_path):
    """Checkpoints after the steps 2, 4 and 6."""
    folder = tmp_path / "saved"
    output, code = run(script, options(steps=6, fit={"folder": str(folder), "save_every": 2, "keep": 3}))
    assert code == 0, output
    assert len(manifests(folder)) == 3
    return folder


def is_continued_from_step_4(script, folder):
    words = options(steps=8, fit={"resume": str(folder)})
    output, code = run(script, words, memory_bytes=8 * GIBIBYTE)
    return (output.count("stepped"), "step-00000006" in output, code) == (4, True, 0)


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_s5_a_manifest_that_is_no_file_hides_no_intact_checkpoint(what, script, saved):
    """Attacker: who may write to the folder; a link leads to a device without end, a pipe has no writer."""
    path = manifests(saved)[-1]
    path.unlink()
    if what == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    assert is_continued_from_step_4(script, saved)


def test_s6_aliases_of_a_plan_file_take_neither_time_nor_memory():
    """Attacker: the author of a plan file of a few hundred bytes."""
    levels = [f"&a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 7)]
    text = f"plan:\n  strategy: [&a0 [x, x, x, x, x, x, x, x, x], {', '.join(levels)}]\n"
    code = f"""
import time
import counterpoint as cp
start = time.process_time()
try:
    cp.Plan.from_yaml({text!r})
except cp.PlanError as error:
    print("refused", time.process_time() - start < 2, len(str(error)) < 2000)
"""
    assert run("-c", code, timeout_s=30.0, memory_bytes=8 * GIBIBYTE)[0] == "refused True True\n"


def test_s7_an_exceptions_text_does_not_reach_the_terminal_raw(tmp_path):
    """Attacker: the author of data, whose text is in an error."""
    script = tmp_path / "fails.py"
    script.write_text("import counterpoint\nraise RuntimeError('\\x1b]0;owned\\x07')\n")
    output, code = run("-m", "counterpoint", "run", script)
    assert code == 1
    assert "owned" in output
    assert "\x1b]0;" not in output


def test_s8_pods_have_no_privileges_and_packages_have_hashes(script, tmp_path):
    """Attacker: who breaks out of a pod, or replaces a package."""
    key = tmp_path / "key"
    key.write_text("0f" * 32)
    key.chmod(0o600)
    words = ("--on", "kubernetes", "--dry-run", "--image", "image", "--key-file", key, script)
    output, code = run("-m", "counterpoint", "launch", *words)
    assert code == 0
    assert "runAsNonRoot: true" in output
    assert "fsGroup:" in output
    assert any("--hash=sha256:" in path.read_text() for path in SOURCE.parent.glob("requirements*.txt"))


def test_f3_sigterm_loses_no_step(script, tmp_path):
    """Operator: ends a job that has a folder to save to."""
    words = options(steps=4000, sleep_s=0.05, fit={"folder": str(tmp_path / "saved"), "save_every": 100_000})
    job = start("-m", "counterpoint", "run", "-n", "2", script, words)
    for _ in range(4):
        wait_for(job, "stepped")
    job.terminate()
    output, code = end(job)
    assert len(manifests(tmp_path / "saved")) == 1, output
    assert code == 128 + signal.SIGTERM


def test_f4_a_folder_that_cannot_be_written_is_known_before_the_first_step(script):
    """Operator: mistakes the folder."""
    output, code = run(script, options(plan="solo", fit={"folder": "/proc/self"}))
    assert code == 1
    assert "CheckpointError" in output
    assert "stepped" not in output


@pytest.fixture
def small_disk(tmp_path):
    """Yield a disk of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts disks, and not in every container")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(path):
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_f4_a_disk_that_is_full_for_a_while_ends_no_run(script, small_disk, tmp_path):
    """Operator: the disk fills up after the first checkpoints, and is freed later."""
    full, freed = tmp_path / "full", tmp_path / "freed"
    fit = {"folder": str(small_disk / "a"), "save_every": 2, "keep": 1}
    job = start(script, options(steps=20, width=64, holds={4: str(full), 14: str(freed)}, fit=fit))
    wait_for(job, "holds")
    fill(small_disk / "filler")
    full.touch()
    wait_for(job, "holds")
    (small_disk / "filler").unlink()
    freed.touch()
    output, code = end(job)
    assert code == 0, output
    assert [path.parent.name for path in manifests(small_disk / "a")] == ["step-00000020"]


def test_f5_a_second_run_in_the_folder_harms_neither(script, tmp_path):
    """Operator: starts another job in the folder of one that is running."""
    folder = str(tmp_path / "saved")
    go = tmp_path / "go"
    words = options(steps=36, holds={6: str(go)}, fit={"folder": folder, "save_every": 5, "keep": 3})
    first = start(script, words)
    wait_for(first, "holds")
    second = run(script, options(steps=42, width=8, fit={"folder": folder, "save_every": 7, "keep": 3}))
    go.touch()
    output, code = end(first)
    assert code == 0, output
    assert [path.parent.name for path in manifests(Path(folder))] == [f"step-000000{step}" for step in (30, 35, 36)]
    assert second[1] == 1
    assert "another run uses" in second[0]


def test_f6_a_manifest_that_declares_gigabytes_hides_no_intact_checkpoint(script, saved):
    """Attacker: the author of a checkpoint."""
    forge(manifests(saved)[-1], declare_four_gigabytes)
    assert is_continued_from_step_4(script, saved)


def test_f7_the_rank_that_left_is_the_first_that_is_named(script):
    """Operator: reads the first line of the report of a failed run."""
    output, code = run("-m", "counterpoint", "run", "-n", "2", script, options(leaves=True))
    (report, *_) = [line for line in output.splitlines() if not line.startswith("[rank ")] or [""]
    assert code != 0
    assert re.findall(r"rank \d", report)[:1] == ["rank 1"], output
