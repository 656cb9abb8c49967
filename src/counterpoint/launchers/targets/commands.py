"""Targets that are commands: mpirun, torchrun, a local run, and Slurm's sbatch."""

from __future__ import annotations

import shlex

from counterpoint.errors import LaunchError
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, rank_command


def render_mpi(spec: LaunchSpec) -> LaunchArtifacts:
    """Render Open MPI's mpirun command for all ranks.

    Raises:
        LaunchError: several hosts without names or without a key, or restarts.
    """
    if spec.max_restarts:
        raise LaunchError(f"mpirun ends with the first rank that fails, and cannot do {spec.max_restarts} restarts; "
                          "omit --restarts, or use another launcher")  # fmt: skip
    check_host_names(spec, "mpirun")
    require_key_between_hosts(spec, "mpirun")
    host_slots = [f"{host}:{spec.ranks_per_host}" for host in spec.host_names]
    command = ["mpirun", "-np", str(spec.num_ranks), "--bind-to", "none"]
    command += ["--host", ",".join(host_slots)] if host_slots else []
    variables = {**spec.env_variables(), **(spec.master_variables() if spec.num_hosts > 1 else {})}
    for name, value in variables.items():
        command += ["-x", f"{name}={value}"]
    return LaunchArtifacts(commands=((*command, *rank_command(spec)),))


def render_torchrun(spec: LaunchSpec) -> LaunchArtifacts:
    """Render the torchrun command, or one per host.

    Raises:
        LaunchError: several hosts without names.
    """
    check_host_names(spec, "torchrun")
    variables = tuple(f"{name}={value}" for name, value in spec.env_variables().items())
    prefix, torchrun = ("env", *variables) if variables else (), (spec.python, "-m", "torch.distributed.run")
    shape = (f"--nproc-per-node={spec.ranks_per_host}", f"--max-restarts={spec.max_restarts}")
    script = (spec.script, *spec.arguments)
    if spec.num_hosts == 1:
        return LaunchArtifacts(commands=((*prefix, *torchrun, *shape, *script),))
    first = (f"--master-addr={spec.host_names[0]}", f"--master-port={spec.port}")
    return LaunchArtifacts(
        per_host_commands=tuple(
            (host, (*prefix, *torchrun, f"--nnodes={spec.num_hosts}", f"--node-rank={index}", *first, *shape, *script))
            for index, host in enumerate(spec.host_names)
        ),
        note="torchrun starts the ranks of its own host only",
    )


def render_local(spec: LaunchSpec) -> LaunchArtifacts:
    """Render the command that starts all ranks on this host.

    Raises:
        LaunchError: several hosts, or restarts.
    """
    if spec.num_hosts > 1 or spec.host_names or spec.max_restarts:
        raise LaunchError(
            f"`counterpoint run` starts ranks once, on this host, and cannot do {spec.num_hosts} hosts and "
            f"{spec.max_restarts} restarts; use --on torchrun, mpi, slurm, ray or kubernetes"
        )
    grace = ("--grace", str(spec.resources.grace_s))
    command = (spec.python, "-m", "counterpoint", "run", "--ranks", str(spec.num_ranks), *grace)
    variables = tuple(f"{name}={value}" for name, value in spec.env_variables().items())
    prefix = ("env", *variables) if variables else ()
    return LaunchArtifacts(commands=((*prefix, *command, spec.script, *spec.arguments),))


def check_host_names(spec: LaunchSpec, name: str) -> None:
    """Check that several hosts have names.

    Raises:
        LaunchError: they have none.
    """
    if spec.num_hosts > 1 and not spec.host_names:
        raise LaunchError(f"{name} cannot choose {spec.num_hosts} hosts itself; name them: --host-names a,b")


def require_key_between_hosts(spec: LaunchSpec, name: str) -> None:
    """Check that ranks of several hosts are given the job's key, without which each of them would end later.

    Raises:
        LaunchError: they are not.
    """
    if spec.num_hosts > 1 and spec.key_file is None and spec.transport != "mpi":
        raise LaunchError(
            f"{name} is to start ranks on {spec.num_hosts} hosts over TCP, and there is no job key: make "
            "one with `counterpoint key job.key`, copy it to every host, and give --key-file job.key"
        )


EXIT_IF_STOPPED = (
    "  code=$?; case $code in 138 | 143) exit $code ;; esac  # SIGUSR1, SIGTERM: end the job, without a restart"
)


def render_slurm(spec: LaunchSpec) -> LaunchArtifacts:
    """Render a batch script whose ranks are the tasks of one srun, and the sbatch command.

    A failed rank ends the others. Slurm asks all to end before the time limit, and waits for the grace period.

    Raises:
        LaunchError: several hosts without a key.
    """
    require_key_between_hosts(spec, "Slurm")
    file = f"{spec.name}.sbatch"
    return LaunchArtifacts(((file, batch_script(spec)),), (("sbatch", file),))


def batch_script(spec: LaunchSpec) -> str:
    """Return the text of the batch script."""
    resources, name = spec.resources, spec.name
    options = {
        "job-name": name,
        "nodes": spec.num_hosts,
        "ntasks-per-node": spec.ranks_per_host,
        "cpus-per-task": resources.cpus_per_rank,
        "gpus-per-node": spec.ranks_per_host * resources.gpus_per_rank,
        "mem": f"{resources.memory_gib}G" if resources.memory_gib else "",
        "time": resources.minutes,
        "signal": f"TERM@{resources.grace_s}" if resources.minutes and resources.grace_s else "",
        "nodelist": ",".join(spec.host_names),
        "output": f"{name}-%j.out",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}={value}" for option, value in options.items() if value)]
    lines += ["#SBATCH --requeue" if spec.max_restarts else "#SBATCH --no-requeue", "set -euo pipefail", ""]
    variables = {**spec.env_variables(), **spec.master_variables()}
    lines += [f"export {variable}={shlex.quote(value)}" for variable, value in variables.items()]
    srun = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={resources.cpus_per_rank}", *rank_command(spec)]
    if not spec.max_restarts:
        return "\n".join([*lines, f"exec {shlex.join(srun)}", ""])
    retries = [
        f"for start in $(seq 0 {spec.max_restarts}); do",
        f"  {shlex.join(srun)} && exit 0",
        EXIT_IF_STOPPED,
        "done",
        "exit 1",
    ]
    return "\n".join([*lines, *retries, ""])
