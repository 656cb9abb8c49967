"""Launches that are a command: mpirun, torchrun, or our own on this host.

A launch on Slurm: a batch script whose ranks are the tasks of one srun, which tells them who they are.
"""

from __future__ import annotations

import shlex

from counterpoint.errors import LaunchError
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, rank_command


def render_mpi(spec: LaunchSpec) -> LaunchArtifacts:
    """Return the mpirun of Open MPI that starts all ranks of a launch.

    Raises:
        LaunchError: there are several hosts, and nobody says which; or ranks are to be started again.
    """
    if spec.max_restarts:
        raise LaunchError(f"mpirun ends with the first rank that fails, and {spec.max_restarts} restarts are asked for; "
                          "leave --restarts away, or take another launcher")  # fmt: skip
    check_host_names(spec, "mpirun")
    places = [f"{host}:{spec.ranks_per_host}" for host in spec.host_names]
    words = ["mpirun", "-np", str(spec.num_ranks), "--bind-to", "none"]
    words += ["--host", ",".join(places)] if places else []
    variables = {**spec.env_variables(), **(spec.master_variables() if spec.num_hosts > 1 else {})}
    for name, value in variables.items():
        words += ["-x", f"{name}={value}"]
    return LaunchArtifacts(commands=((*words, *rank_command(spec)),))


def render_torchrun(spec: LaunchSpec) -> LaunchArtifacts:
    """Return the torchrun of a launch on one host; for several, that of each of them.

    Raises:
        LaunchError: there are several hosts, and nobody says which.
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
            (host, (*prefix, *torchrun, f"--nnodes={spec.num_hosts}", f"--node-rank={at}", *first, *shape, *script))
            for at, host in enumerate(spec.host_names)
        ),
        note="torchrun starts the ranks of its own host only",
    )


def render_local(spec: LaunchSpec) -> LaunchArtifacts:
    """Return the command that starts all ranks on this host.

    Raises:
        LaunchError: there are several hosts, or ranks are to be started again.
    """
    if spec.num_hosts > 1 or spec.host_names or spec.max_restarts:
        raise LaunchError(
            f"{spec.num_hosts} hosts and {spec.max_restarts} restarts are asked for; `counterpoint run` has this host, and "
            "starts ranks once: take --on torchrun, mpi, slurm, ray or kubernetes"
        )
    words = (spec.python, "-m", "counterpoint", "run", "--ranks", str(spec.num_ranks))
    variables = tuple(f"{name}={value}" for name, value in spec.env_variables().items())
    prefix = ("env", *variables) if variables else ()
    return LaunchArtifacts(commands=((*prefix, *words, spec.script, *spec.arguments),))


def check_host_names(spec: LaunchSpec, name: str) -> None:
    """The hosts of a launch have names where there are several.

    Raises:
        LaunchError: they have none.
    """
    if spec.num_hosts > 1 and not spec.host_names:
        raise LaunchError(
            f"{spec.num_hosts} hosts are wanted, and {name} must be told which; name them: --host-names a,b"
        )


EXIT_IF_TERMINATED = "  [ $? -ne 143 ] || exit 143  # SIGTERM: the job is to end, not to start again"


def render_slurm(spec: LaunchSpec) -> LaunchArtifacts:
    """Return the batch script of a launch, and what hands it to Slurm.

    Ranks that fail end the others; Slurm asks all of them to end before their time is over, and waits as long as the
    launch grants.
    """
    file = f"{spec.name}.sbatch"
    return LaunchArtifacts(((file, batch_script(spec)),), (("sbatch", file),))


def batch_script(spec: LaunchSpec) -> str:
    """Return the text of the batch script."""
    needs, name = spec.resources, spec.name
    options = {
        "job-name": name,
        "nodes": spec.num_hosts,
        "ntasks-per-node": spec.ranks_per_host,
        "cpus-per-task": needs.cpus_per_rank,
        "gpus-per-node": spec.ranks_per_host * needs.gpus_per_rank,
        "mem": f"{needs.memory_gib}G" if needs.memory_gib else "",
        "time": needs.minutes,
        "signal": f"TERM@{needs.grace_s}" if needs.minutes and needs.grace_s else "",
        "nodelist": ",".join(spec.host_names),
        "output": f"{name}-%j.out",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}={value}" for option, value in options.items() if value)]
    lines += ["#SBATCH --requeue" if spec.max_restarts else "#SBATCH --no-requeue", "set -euo pipefail", ""]
    variables = {**spec.env_variables(), **spec.master_variables()}
    lines += [f"export {variable}={shlex.quote(value)}" for variable, value in variables.items()]
    ranks = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={needs.cpus_per_rank}", *rank_command(spec)]
    if not spec.max_restarts:
        return "\n".join([*lines, f"exec {shlex.join(ranks)}", ""])
    again = [
        f"for start in $(seq 0 {spec.max_restarts}); do",
        f"  {shlex.join(ranks)} && exit 0",
        EXIT_IF_TERMINATED,
        "done",
        "exit 1",
    ]
    return "\n".join([*lines, *again, ""])
