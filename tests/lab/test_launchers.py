"""The same script under mpirun, on a Ray cluster and on two Slurm nodes: the losses of plain python."""

import socket
import sys

import pytest

from counterpoint.rpc.job_key import new_key, write_key
from tests.lab.launch_systems import (
    AS_ROOT,
    RAY,
    Slurm,
    losses_alone,
    script_in,
    started,
    why_no,
    why_no_mpirun,
    why_no_slurm,
)
from tests.process.test_launchers import losses_of

pytestmark = [pytest.mark.process, pytest.mark.integration, pytest.mark.timeout(180)]
needs_mpirun = pytest.mark.skipif(bool(why_no_mpirun()), reason=why_no_mpirun())
needs_mpi4py = pytest.mark.skipif(bool(why_no("mpi4py")), reason=why_no("mpi4py"))
needs_ray = pytest.mark.skipif(bool(why_no("ray")), reason=why_no("ray"))
needs_slurm = pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm())


def require_the_losses_of_python(tmp_path, words, more):
    """The command has started two ranks, whose losses are those of one process; return what it wrote."""
    (tmp_path / "ranks").mkdir()
    result = started(["launch", *words, "-n", 2, script_in(tmp_path), tmp_path / "ranks"], more)
    assert result.returncode == 0, result.stderr
    losses, num_ranks = losses_of(tmp_path / "ranks")
    assert num_ranks == 2
    assert losses == pytest.approx(losses_alone(tmp_path), rel=1e-12)
    return result


@needs_mpirun
def test_the_same_script_under_mpirun(tmp_path):
    require_the_losses_of_python(tmp_path, ["--on", "mpi"], AS_ROOT)


@needs_mpirun
@needs_mpi4py
@pytest.mark.slow
def test_the_same_script_joined_by_mpi(tmp_path):
    require_the_losses_of_python(tmp_path, ["--on", "mpi", "--transport", "mpi"], AS_ROOT)


@needs_ray
@pytest.mark.slow
def test_the_same_script_on_a_cluster_of_ray(tmp_path):
    require_the_losses_of_python(tmp_path, ["--on", "ray"], RAY)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "message"),
    [("pid", "rank 1 was killed by SIGKILL"), ("ppid", "rank 1 failed: LaunchError: Ray has lost its actor")],
)
def test_all_ranks_start_again_where_one_has_died_or_lost_its_actor(tmp_path, who, message):
    dies = f"""import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.get{who}(), 9)
"""
    (tmp_path / "ranks").mkdir()
    script = script_in(tmp_path)
    script.write_text(dies + script.read_text())
    result = started(["launch", "--on", "ray", "-n", 2, "--restarts", 1, script, tmp_path / "ranks"], RAY)
    assert result.returncode == 0, result.stderr
    assert message in result.stderr
    assert "counterpoint: restart 1 of 1" in result.stderr
    assert losses_of(tmp_path / "ranks")[1] == 2


@needs_slurm
@pytest.mark.slow
def test_the_same_script_on_two_nodes_of_slurm(tmp_path):
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm") as slurm:
        here = {"MASTER_ADDR": "127.0.0.1", "SBATCH_WAIT": "1", "SBATCH_OUTPUT": str(tmp_path / "out.txt")}
        (tmp_path / "ranks").mkdir()
        write_key(new_key(), tmp_path / "job.key")
        words = ["launch", "--on", "slurm", "--hosts", 2, "--key-file", tmp_path / "job.key"]
        words += [script_in(tmp_path), tmp_path / "ranks"]
        result = started(words, {**slurm.variables, **here})
        assert result.returncode == 0, result.stderr + (tmp_path / "out.txt").read_text()
    losses, num_ranks = losses_of(tmp_path / "ranks")
    assert num_ranks == 2
    assert losses == pytest.approx(losses_alone(tmp_path), rel=1e-12)


@needs_mpirun
def test_a_host_without_the_jobs_key_is_named(tmp_path):
    script = tmp_path / "train.py"
    keys = f"""import os, pathlib
from counterpoint.rpc.job_key import new_key, write_key
own = pathlib.Path({str(tmp_path)!r}, "key" + os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["COUNTERPOINT_KEY_FILE"] = str(own)
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    write_key(new_key(), own)
"""
    script.write_text(keys + script_in(tmp_path).read_text())
    (tmp_path / "ranks").mkdir()
    result = started(["launch", "--on", "mpi", "-n", 2, script, tmp_path / "ranks"], AS_ROOT)
    assert result.returncode != 0
    assert f"rank 1 on {socket.gethostname()}: cannot read the job key in {tmp_path}/key1" in result.stderr
    assert (tmp_path / "key0").read_text().strip() not in result.stderr + result.stdout + " ".join(sys.argv)
