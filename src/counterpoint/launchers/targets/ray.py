"""A launch on Ray: one placement group with a bundle for each host, one actor for each rank, watched from here.

Ray decides where, and says when an actor's host is lost; what an actor runs is a process of torchrun's contract, as
under every launcher, so that a script need not know Ray. Nothing of a training passes through Ray.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.exit_report import (
    ErrorRecord,
    RankExit,
    exit_code,
    find_root_cause,
    format_report,
    wait_for_others_s,
)
from counterpoint.launchers.rank_agent import RankAgent, thread_variables, to_rank_exit
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, rank_command

PLACEMENT_TIMEOUT_S = 60.0  # so long a cluster may take to have room for all ranks
LOST_RETURNCODE = -9  # how a rank ends whose host is lost: as if it were killed
POLL_S = 0.1


def render_ray(spec: LaunchSpec) -> LaunchArtifacts:
    """Return in words what Ray is asked for; there is no command.

    Raises:
        LaunchError: hosts are named, which Ray chooses, or the job is to have a time limit.
    """
    if spec.host_names or spec.resources.minutes:
        raise LaunchError("Ray chooses the hosts, and runs a job until it ends; leave --host-names and --minutes away")
    command = " ".join(rank_command(spec))
    strategy, bundles = placement_strategy(spec), resource_bundles(spec)
    return LaunchArtifacts(
        note=f"a placement group {strategy} of {bundles}, and in each bundle {spec.ranks_per_host} actors, each of "
        f"which runs: {command}; {spec.max_restarts} restarts"
    )


def placement_strategy(spec: LaunchSpec) -> str:
    """Return how Ray spreads the bundles."""
    return "STRICT_SPREAD" if spec.num_hosts > 1 else "STRICT_PACK"


def resource_bundles(spec: LaunchSpec) -> list[dict[str, float]]:
    """Return what each host must have."""
    needs, ranks = spec.resources, spec.ranks_per_host
    bundle: dict[str, float] = {"CPU": ranks * needs.cpus_per_rank}
    if needs.gpus_per_rank:
        bundle["GPU"] = ranks * needs.gpus_per_rank
    if needs.memory_gib:
        bundle["memory"] = needs.memory_gib << 30
    return [bundle] * spec.num_hosts


def run_on_ray(spec: LaunchSpec, artifacts: LaunchArtifacts) -> int:
    """The ranks have run on the cluster that RAY_ADDRESS names, or on one of this host; return the exit code.

    Raises:
        LaunchError: Ray is not installed, or has no room.
    """
    del artifacts
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed; pip install 'counterpoint[ray]' on all hosts") from error
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init()
    group = placement_group(resource_bundles(spec), strategy=placement_strategy(spec))
    try:
        for attempt in range(spec.max_restarts + 1):
            if not group.wait(PLACEMENT_TIMEOUT_S):
                raise LaunchError(
                    f"Ray had no room for {spec.num_hosts} hosts with {resource_bundles(spec)[0]} in {PLACEMENT_TIMEOUT_S:.0f} s; "
                    f"the cluster has {ray.cluster_resources()}: add hosts, or ask for less"
                )
            outcomes = RayAttempt(ray, group, spec, attempt).run()
            if exit_code(outcomes) == 0:
                return 0
            sys.stderr.write(f"{format_report(outcomes)}\n")
            if attempt < spec.max_restarts:
                sys.stderr.write(f"counterpoint: restart {attempt + 1} of {spec.max_restarts}\n")
        return exit_code(outcomes)
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray could not start the ranks: {error}; look at its logs, and at its hosts") from error
    finally:
        remove_placement_group(group)
        if is_ours:
            ray.shutdown()


@dataclass(slots=True)
class RayAttempt:
    """All ranks, started once.

    Attributes:
        ray: the module.
        group: where actors are placed.
        launch: what they run.
        number: from 0.
        running: what each rank that has not ended will answer.
        outcomes: of those that have.
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
        """Return how all ranks ended, by rank; none is left."""
        began, stop_s = time.monotonic(), float("inf")
        seats = self._create_agents()
        try:
            self._start(seats)
            while self.running:
                self._collect_exits(began)
                if find_root_cause(self.exits) is not None:
                    stop_s = min(stop_s, time.monotonic() + wait_for_others_s(self.exits, ()))
                if self.stopped_s is None and stop_s <= time.monotonic():
                    self.stopped_s = time.monotonic()
                    for rank in self.running.values():
                        seats[rank].stop.remote()
        finally:
            for seat in seats:
                self.ray.kill(seat)
        return sorted(self.exits, key=lambda outcome: outcome.rank)

    def _create_agents(self) -> list[Any]:
        """Return an actor for each rank; those of a host are neighbours in rank."""
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
        """Every rank runs, or is about to."""
        launch, job = self.spec, f"ray-{secrets.token_hex(6)}"
        host, port = self.ray.get(agents[0].reserve.remote(), timeout=PLACEMENT_TIMEOUT_S)
        more = {**launch.env_variables(), **thread_variables(launch.resources.cpus_per_rank)}
        more |= {"TORCHELASTIC_RESTART_COUNT": str(self.number), "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts)}
        here = Path(launch.script)
        command = rank_command(replace(launch, script=str(here.absolute() if here.exists() else here)))
        for rank, seat in enumerate(agents):
            local = rank % launch.ranks_per_host
            found = RankEnvironment(rank, launch.num_ranks, local, launch.ranks_per_host, host, port, job)
            self.running[seat.run.remote(command, found, more)] = rank

    def _collect_exits(self, began: float) -> None:
        """Whoever has ended is an outcome; a rank whose host is lost, too."""
        done, _ = self.ray.wait(list(self.running), timeout=POLL_S)
        for answer in done:
            rank = self.running.pop(answer)
            now_s = time.monotonic()
            try:
                ended = self.ray.get(answer)
            except self.ray.exceptions.RayError as lost:
                story = f"Ray has lost its actor, or the host: {lost}".splitlines()[0]
                error = ErrorRecord("LaunchError", story, "", is_peer=False, time_s=now_s)
                self.exits.append(RankExit(rank, 0, LOST_RETURNCODE, now_s - began, now_s, self.stopped_s, error))
            else:
                self.exits.append(to_rank_exit(rank, ended, now_s, self.stopped_s))
