"""Launch on Ray: one placement group with a bundle per host, and one actor per rank, supervised from here.

Ray places the actors, and reports lost hosts. An actor runs a process with torchrun's environment, as under every
launcher, so that a script need not know Ray. No training data passes through Ray.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.exit_report import (
    ErrorRecord,
    RankExit,
    exit_code,
    format_report,
    wait_for_others_s,
    was_stopped,
)
from counterpoint.launchers.rank_agent import RankAgent, thread_variables, to_rank_exit
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, rank_command
from counterpoint.rpc.job_key import new_key
from counterpoint.terminal_text import warn, write_line

PLACEMENT_TIMEOUT_S = 60.0  # for the cluster to have room for all ranks
LOST_RETURNCODE = -9  # a rank on a lost host counts as killed
POLL_S = 0.1
TOKEN_BY_DEFAULT = (2, 61)  # the version of Ray from which every cluster asks for a token


def render_ray(spec: LaunchSpec) -> LaunchArtifacts:
    """Describe what Ray is asked for; there is no command.

    Raises:
        LaunchError: host names, which Ray chooses, or a time limit.
    """
    if spec.host_names or spec.resources.minutes:
        raise LaunchError("Ray chooses the hosts, and has no time limit; omit --host-names and --minutes")
    command = " ".join(rank_command(spec))
    strategy, bundles = placement_strategy(spec), resource_bundles(spec)
    return LaunchArtifacts(
        note=f"a placement group {strategy} of {bundles}, and in each bundle {spec.ranks_per_host} actors, each of "
        f"which runs: {command}; {spec.max_restarts} restarts"
    )


OPEN_RAY = (
    "Ray asks for no token, so anybody who can connect to its ports can run code on its hosts; set RAY_AUTH_MODE=token "
    "on all of them before Ray is started, and let only its hosts reach its ports"
)


def is_open(version: str, environ: Mapping[str, str]) -> bool:
    """Return whether Ray of this version asks for no token.

    Example:
        >>> is_open("2.60.0", {}), is_open("2.60.0", {"RAY_AUTH_MODE": "token"}), is_open("2.61.0", {})
        (True, False, False)
    """
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    default = "token" if numbers >= TOKEN_BY_DEFAULT else "disabled"
    return environ.get("RAY_AUTH_MODE", default) == "disabled"


def placement_strategy(spec: LaunchSpec) -> str:
    """Return the placement group's strategy."""
    return "STRICT_SPREAD" if spec.num_hosts > 1 else "STRICT_PACK"


def resource_bundles(spec: LaunchSpec) -> list[dict[str, float]]:
    """Return the resources of each host."""
    needs, ranks = spec.resources, spec.ranks_per_host
    bundle: dict[str, float] = {"CPU": ranks * needs.cpus_per_rank}
    if needs.gpus_per_rank:
        bundle["GPU"] = ranks * needs.gpus_per_rank
    if needs.memory_gib:
        bundle["memory"] = needs.memory_gib << 30
    return [bundle] * spec.num_hosts


def run_on_ray(spec: LaunchSpec, artifacts: LaunchArtifacts) -> int:
    """Run the ranks on the cluster at RAY_ADDRESS, or a local one; return the exit code.

    Raises:
        LaunchError: Ray is not installed, or has no room.
    """
    del artifacts
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed; pip install 'counterpoint[ray]' on all hosts") from error
    initialized_here = not ray.is_initialized()
    if initialized_here:
        ray.init()
    if is_open(ray.__version__, os.environ):
        warn(OPEN_RAY, stacklevel=2)
    group = placement_group(resource_bundles(spec), strategy=placement_strategy(spec))
    try:
        return run_attempts(ray, group, spec)
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray could not start the ranks: {error}; look at its logs, and at its hosts") from error
    finally:
        remove_placement_group(group)
        if initialized_here:
            ray.shutdown()


def run_attempts(ray: Any, group: Any, spec: LaunchSpec) -> int:  # noqa: ANN401 - Ray is not imported here
    """Start all ranks, and again after a failure; return the last exit code.

    Raises:
        LaunchError: Ray has no room.
    """
    for attempt in range(spec.max_restarts + 1):
        if not group.wait(PLACEMENT_TIMEOUT_S):
            raise LaunchError(
                f"Ray had no room for {spec.num_hosts} hosts with {resource_bundles(spec)[0]} in "
                f"{PLACEMENT_TIMEOUT_S:.0f} s; the cluster has {ray.cluster_resources()}: add hosts, or ask for less"
            )
        exits = RayAttempt(ray, group, spec, attempt).run()
        if exit_code(exits) == 0:
            return 0
        write_line(sys.stderr, format_report(exits))
        if was_stopped(exits):
            break
        if attempt < spec.max_restarts:
            write_line(sys.stderr, f"counterpoint: restart {attempt + 1} of {spec.max_restarts}")
    return exit_code(exits)


@dataclass(slots=True)
class RayAttempt:
    """One start of all ranks.

    Attributes:
        ray: the module.
        group: the placement group.
        spec: what to run.
        number: of the attempt, from 0.
        running: the pending result of each running rank.
        exits: of ranks that have ended.
        stopped_s: when the others were asked to end.
    """

    ray: Any
    group: Any
    spec: LaunchSpec
    number: int
    running: dict[Any, int] = field(default_factory=dict)
    exits: list[RankExit] = field(default_factory=list)
    stopped_s: float | None = None

    def run(self) -> list[RankExit]:
        """Return how all ranks ended, by rank."""
        began, stop_s = time.monotonic(), float("inf")
        seats = self._create_agents()
        try:
            self._start(seats)
            while self.running:
                self._collect_exits(began)
                stop_s = min(stop_s, time.monotonic() + wait_for_others_s(self.exits))
                if self.stopped_s is None and stop_s <= time.monotonic():
                    self.stopped_s = time.monotonic()
                    for rank in self.running.values():
                        seats[rank].stop.remote()
        finally:
            for agent in seats:
                self.ray.kill(agent)
        return sorted(self.exits, key=lambda outcome: outcome.rank)

    def _create_agents(self) -> list[Any]:
        """Return an actor for each rank; ranks of one host are consecutive."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self.spec.resources
        actor = self.ray.remote(RankAgent)
        return [
            actor.options(
                num_cpus=needs.cpus_per_rank,
                num_gpus=needs.gpus_per_rank,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self.group, placement_group_bundle_index=rank // self.spec.ranks_per_host
                ),
            ).remote()
            for rank in range(self.spec.num_ranks)
        ]

    def _start(self, agents: Sequence[Any]) -> None:
        """Start all ranks."""
        launch, job = self.spec, f"ray-{secrets.token_hex(6)}"
        host, port = self.ray.get(agents[0].reserve.remote(), timeout=PLACEMENT_TIMEOUT_S)
        extra_variables = {**launch.env_variables(), **thread_variables(launch.resources.cpus_per_rank)}
        extra_variables |= {
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        }
        secret = None if launch.key_file is not None else new_key().secret  # through Ray, whose own users can read it
        script = Path(launch.script)
        command = rank_command(replace(launch, script=str(script.absolute() if script.exists() else script)))
        for rank, agent in enumerate(agents):
            local_rank = rank % launch.ranks_per_host
            environment = RankEnvironment(rank, launch.num_ranks, local_rank, launch.ranks_per_host, host, port, job)
            self.running[agent.run.remote(command, environment, extra_variables, secret)] = rank

    def _collect_exits(self, began: float) -> None:
        """Record ranks that have ended, and those whose host is lost."""
        done, _ = self.ray.wait(list(self.running), timeout=POLL_S)
        for result in done:
            rank = self.running.pop(result)
            now_s = time.monotonic()
            try:
                info = self.ray.get(result)
            except self.ray.exceptions.RayError as lost:
                text = f"Ray has lost its actor, or the host: {lost}".splitlines()[0]
                error = ErrorRecord("LaunchError", text, "", is_peer=False, time_s=now_s)
                self.exits.append(RankExit(rank, 0, LOST_RETURNCODE, now_s - began, now_s, self.stopped_s, error))
            else:
                self.exits.append(to_rank_exit(rank, info, now_s, self.stopped_s))
