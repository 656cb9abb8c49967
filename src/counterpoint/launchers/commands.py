"""Launches that are a command: mpirun, torchrun, or our own on this host."""

from __future__ import annotations

from counterpoint.errors import LaunchError
from counterpoint.launchers.description import Launch, Written, rank_command


def on_mpi(launch: Launch) -> Written:
    """Return the mpirun of Open MPI that starts all ranks of a launch.

    Raises:
        LaunchError: there are several hosts, and nobody says which; or ranks are to be started again.
    """
    if launch.restarts:
        raise LaunchError(f"mpirun ends with the first rank that fails, and {launch.restarts} restarts are asked for; "
                          "leave --restarts away, or take another launcher")  # fmt: skip
    require_names(launch, "mpirun")
    places = [f"{host}:{launch.ranks_per_host}" for host in launch.host_names]
    words = ["mpirun", "-np", str(launch.num_ranks), "--bind-to", "none"]
    words += ["--host", ",".join(places)] if places else []
    variables = {**launch.variables(), **(launch.meeting() if launch.hosts > 1 else {})}
    for name, value in variables.items():
        words += ["-x", f"{name}={value}"]
    return Written(commands=((*words, *rank_command(launch)),))


def on_torchrun(launch: Launch) -> Written:
    """Return the torchrun of a launch on one host; for several, that of each of them.

    Raises:
        LaunchError: there are several hosts, and nobody says which.
    """
    require_names(launch, "torchrun")
    variables = tuple(f"{name}={value}" for name, value in launch.variables().items())
    prefix, torchrun = ("env", *variables) if variables else (), (launch.python, "-m", "torch.distributed.run")
    shape = (f"--nproc-per-node={launch.ranks_per_host}", f"--max-restarts={launch.restarts}")
    script = (launch.script, *launch.arguments)
    if launch.hosts == 1:
        return Written(commands=((*prefix, *torchrun, *shape, *script),))
    first = (f"--master-addr={launch.host_names[0]}", f"--master-port={launch.port}")
    return Written(
        elsewhere=tuple(
            (host, (*prefix, *torchrun, f"--nnodes={launch.hosts}", f"--node-rank={at}", *first, *shape, *script))
            for at, host in enumerate(launch.host_names)
        ),
        note="torchrun starts the ranks of its own host only",
    )


def on_local(launch: Launch) -> Written:
    """Return the command that starts all ranks on this host.

    Raises:
        LaunchError: there are several hosts, or ranks are to be started again.
    """
    if launch.hosts > 1 or launch.host_names or launch.restarts:
        raise LaunchError(
            f"{launch.hosts} hosts and {launch.restarts} restarts are asked for; `counterpoint run` has this host, and "
            "starts ranks once: take --on torchrun, mpi, slurm, ray or kubernetes"
        )
    words = (launch.python, "-m", "counterpoint", "run", "--ranks", str(launch.num_ranks))
    variables = tuple(f"{name}={value}" for name, value in launch.variables().items())
    prefix = ("env", *variables) if variables else ()
    return Written(commands=((*prefix, *words, launch.script, *launch.arguments),))


def require_names(launch: Launch, name: str) -> None:
    """The hosts of a launch have names where there are several.

    Raises:
        LaunchError: they have none.
    """
    if launch.hosts > 1 and not launch.host_names:
        raise LaunchError(
            f"{launch.hosts} hosts are wanted, and {name} must be told which; name them: --host-names a,b"
        )
