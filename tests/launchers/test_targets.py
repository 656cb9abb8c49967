"""What each target would start: reviewed texts, and manifests that match the published schemas."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from counterpoint.errors import LaunchError
from counterpoint.launchers.targets.commands import batch_script
from counterpoint.launchers.targets.registry import TARGETS, format_artifacts, render_launch, run_commands
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, ResourceRequest
from counterpoint.rpc.job_key import new_key, write_key
from tests.launchers.json_schema import faults_of

PLAIN = LaunchSpec("train.py", ("--epochs", "3"), name="digits", ranks_per_host=2)
POD = replace(PLAIN, image="registry.example/digits:1")
FULL = replace(
    PLAIN,
    num_hosts=2,
    key_file=Path("/home/me/job.key"),
    timeout_s=120.0,
    max_restarts=2,
    resources=ResourceRequest(cpus_per_rank=4, gpus_per_rank=1, memory_gib=64, minutes=90, grace_s=60),
)
NAMED = replace(FULL, host_names=("a", "b"), max_restarts=0, transport="gloo")
FULL_POD = replace(FULL, image="registry.example/digits:1")
GOLDEN = {
    "local": {"local": replace(PLAIN, transport="shm")},
    "torchrun": {"torchrun": PLAIN, "torchrun-hosts": replace(NAMED, max_restarts=2)},
    "mpi": {"mpi": replace(PLAIN, transport="mpi"), "mpi-hosts": NAMED},
    "slurm": {"slurm": PLAIN, "slurm-full": FULL, "slurm-hosts": NAMED},
    "ray": {"ray": PLAIN, "ray-full": replace(FULL, resources=replace(FULL.resources, minutes=0))},
    "kubernetes": {"kubernetes": POD, "kubernetes-full": FULL_POD},
    "jobset": {"jobset-full": FULL_POD},
    "kubeflow": {"kubeflow-full": FULL_POD},
}
CASES = [(target, name, launch) for target, named in GOLDEN.items() for name, launch in named.items()]


@pytest.mark.parametrize(("target", "name", "launch"), CASES, ids=[name for _, name, _ in CASES])
def test_what_would_be_started_reads_as_written(target, name, launch, golden):
    golden(f"launch/{name}.txt", format_artifacts(TARGETS[target].render(launch)))


MANIFESTS = [
    (name, manifest)
    for target, name, launch in CASES
    if TARGETS[target].is_remote
    for manifest in yaml.safe_load_all(TARGETS[target].render(launch).files[0][1])
]


def find_pods(value):
    """The specifications of all pods in a manifest."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from find_pods(part)


@pytest.mark.parametrize(("name", "manifest"), MANIFESTS, ids=[f"{name} {m['kind']}" for name, m in MANIFESTS])
def test_a_manifest_keeps_the_published_schema(name, manifest):
    assert faults_of(manifest) == []


PODS = [(name, pod) for name, manifest in MANIFESTS for pod in find_pods(manifest)]


@pytest.mark.parametrize(("name", "pod"), PODS, ids=[name for name, _ in PODS])
def test_a_pod_runs_as_a_user_without_privileges_who_can_read_the_key(name, pod):
    """It ran as root, and had to: nobody else could read the key. The rules are Kubernetes' `restricted` standard."""
    user = pod["securityContext"]
    assert user["runAsNonRoot"]
    assert user["runAsUser"] == user["runAsGroup"] == user["fsGroup"] > 0
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert "emptyDir" in mounts["/dev/shm"]
        assert "emptyDir" in mounts[variables["HOME"]]
        if "full" in name:
            assert mounts[str(Path(variables["COUNTERPOINT_KEY_FILE"]).parent)]["secret"]["defaultMode"] == 0o440


def test_the_schemas_reject_an_unknown_field_and_a_value_of_the_wrong_type():
    job = yaml.safe_load_all(TARGETS["kubeflow"].render(FULL_POD).files[0][1])
    train_job = list(job)[1]
    train_job["spec"]["trainer"].update(numNode=2, numNodes="two")
    assert faults_of(train_job) == [
        "TrainJob.spec.trainer.numNodes is 'two', not integer", "TrainJob.spec.trainer.numNode is not known"
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "sagemaker"])
def test_the_key_is_in_no_text_and_no_command(name, tmp_path):
    write_key(key := new_key(), tmp_path / "key")
    launch = replace(POD, key_file=tmp_path / "key")
    launch = replace(launch, image="") if not TARGETS[name].is_remote else launch
    assert key.secret.hex() not in format_artifacts(render_launch(name, launch))


REFUSED = [
    (
        "ssh",
        PLAIN,
        "there is no launcher .ssh.; .*; for ssh, torchrun with --host-names a,b --dry-run prints the command of each host",
    ),
    ("spork", PLAIN, "there is no launcher 'spork'; give one of local, torchrun, mpi, slurm, ray, kubernetes"),
    (
        "slurm",
        replace(PLAIN, timeout_s=float("nan")),
        "timeout=nan is not a time limit; give a number of seconds above 0, ",
    ),
    ("slurm", replace(PLAIN, num_hosts=0), "0 hosts are not possible; give 1 or more"),
    ("slurm", replace(PLAIN, resources=ResourceRequest(cpus_per_rank=0)), "0 cores per rank are not possible"),
    ("slurm", replace(PLAIN, port=0), "port 0 does not exist"),
    ("slurm", replace(PLAIN, name="My_Job"), "'My_Job' is not a valid job name on all systems"),
    ("slurm", replace(PLAIN, num_hosts=3, host_names=("a", "b", "a")), "the launch has 3 hosts, but a, b, a names 2"),
    ("slurm", replace(PLAIN, key_file=Path("/nowhere/key")), "cannot read the job key in /nowhere/key"),
    ("mpi", replace(PLAIN, num_hosts=2), "mpirun cannot choose 2 hosts itself"),
    ("mpi", replace(PLAIN, max_restarts=1), "mpirun ends with the first rank that fails, and cannot do 1 restarts"),
    ("torchrun", replace(PLAIN, num_hosts=2), "torchrun cannot choose 2 hosts itself"),
    (
        "local",
        replace(PLAIN, num_hosts=2),
        "`counterpoint run` starts ranks once, on this host, and cannot do 2 hosts and 0 restarts",
    ),
    (
        "slurm",
        replace(PLAIN, num_hosts=2),
        "Slurm is to start ranks on 2 hosts over TCP, and there is no job key: .* give --key-file job.key",
    ),
    (
        "mpi",
        replace(PLAIN, num_hosts=2, host_names=("a", "b")),
        "mpirun is to start ranks on 2 hosts over TCP, and there is no job key: ",
    ),
    ("ray", replace(PLAIN, host_names=("a",)), "Ray chooses the hosts"),
    ("kubernetes", PLAIN, "a pod needs an image that has this package and the script"),
    ("kubeflow", replace(POD, host_names=("a",)), "Kubernetes chooses the hosts itself, and a are named"),
    ("sagemaker", PLAIN, "SageMaker starts train.py itself: give it as entry_point"),
]


@pytest.mark.parametrize(("name", "launch", "text"), REFUSED)
def test_what_cannot_be_started_is_refused_with_the_remedy(name, launch, text):
    with pytest.raises(LaunchError, match=f"^{text}"):
        render_launch(name, launch)


def test_a_command_that_is_not_installed_is_named():
    written = replace(render_launch("slurm", PLAIN), commands=(("no-such-sbatch", "digits.sbatch"),))
    with pytest.raises(LaunchError, match="there is no no-such-sbatch on this machine"):
        run_commands(PLAIN, written)


def test_commands_for_other_hosts_are_not_run_here():
    with pytest.raises(LaunchError, match="torchrun starts the ranks of its own host only, but the launch has 2 hosts"):
        run_commands(NAMED, TARGETS["torchrun"].render(NAMED))


STOPS = "trap 'exit 7' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done"


def test_a_signal_to_the_launch_reaches_the_command_that_it_has_started():
    before = signal.getsignal(signal.SIGUSR1)
    assert run_commands(PLAIN, LaunchArtifacts(commands=(("sh", "-c", STOPS),))) == 7
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(("code", "num_starts", "result"), [(138, 1, 138), (143, 1, 143), (1, 3, 1), (0, 1, 0)])
def test_a_batch_script_starts_ranks_again_unless_a_signal_has_stopped_them(code, num_starts, result, tmp_path):
    fake = tmp_path / "srun"
    fake.write_text(f"#!/bin/sh\necho start >> {tmp_path}/starts\nexit {code}\n")
    fake.chmod(0o755)
    (tmp_path / "job").write_text(batch_script(replace(PLAIN, max_restarts=2)))
    ended = subprocess.run(
        ["bash", str(tmp_path / "job")], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False, cwd=tmp_path
    )
    assert ended.returncode == result
    assert (tmp_path / "starts").read_text().split() == ["start"] * num_starts


def test_commands_are_run_one_after_the_other_with_the_files_until_one_fails(tmp_path):
    copy = ("cp", "digits.sbatch", str(tmp_path / "copy"))
    written = replace(render_launch("slurm", PLAIN), commands=(copy, ("false",), ("touch", str(tmp_path / "more"))))
    assert run_commands(PLAIN, written) == 1
    assert (tmp_path / "copy").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=digits\n")
    assert not (tmp_path / "more").exists()
