"""A launch on Slurm: a batch script whose ranks are the tasks of one srun, which tells them who they are."""

from __future__ import annotations

import shlex

from counterpoint.launchers.description import Launch, Written, rank_command

ENDED = "  [ $? -ne 143 ] || exit 143  # SIGTERM: the job is to end, not to start again"


def on_slurm(launch: Launch) -> Written:
    """Return the batch script of a launch, and what hands it to Slurm.

    Ranks that fail end the others; Slurm asks all of them to end before their time is over, and waits as long as the
    launch grants.
    """
    file = f"{launch.name}.sbatch"
    return Written(((file, batch_script(launch)),), (("sbatch", file),))


def batch_script(launch: Launch) -> str:
    """Return the text of the batch script."""
    needs, name = launch.needs, launch.name
    options = {
        "job-name": name,
        "nodes": launch.hosts,
        "ntasks-per-node": launch.ranks_per_host,
        "cpus-per-task": needs.cpus_per_rank,
        "gpus-per-node": launch.ranks_per_host * needs.gpus_per_rank,
        "mem": f"{needs.memory_gib}G" if needs.memory_gib else "",
        "time": needs.minutes,
        "signal": f"TERM@{needs.grace_s}" if needs.minutes and needs.grace_s else "",
        "nodelist": ",".join(launch.host_names),
        "output": f"{name}-%j.out",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}={value}" for option, value in options.items() if value)]
    lines += ["#SBATCH --requeue" if launch.restarts else "#SBATCH --no-requeue", "set -euo pipefail", ""]
    variables = {**launch.variables(), **launch.meeting()}
    lines += [f"export {variable}={shlex.quote(value)}" for variable, value in variables.items()]
    ranks = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={needs.cpus_per_rank}", *rank_command(launch)]
    if not launch.restarts:
        return "\n".join([*lines, f"exec {shlex.join(ranks)}", ""])
    again = [
        f"for start in $(seq 0 {launch.restarts}); do",
        f"  {shlex.join(ranks)} && exit 0",
        ENDED,
        "done",
        "exit 1",
    ]
    return "\n".join([*lines, *again, ""])
