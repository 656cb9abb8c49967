"""Where a run's ranks are: in this process, or one in each of many."""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeVar

from counterpoint.errors import LaunchError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.local import LocalWorld
from counterpoint.fabric.meeting import Address, asked_for, connect
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.keys import key_mark, require_key
from counterpoint.training.threads import settle_threads

T = TypeVar("T")


class World(Protocol):
    """Where ranks run: one fabric for each rank of this process."""

    @property
    def fabrics(self) -> Sequence[Fabric]:
        """The fabrics of this process's ranks."""
        ...

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return what ``work`` returns on each rank of this process."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...


class JoinedWorld:
    """This process's one rank among many processes.

    Args:
        fabric: its way to the others; it stays open for the next world of this process, unless something failed.
        failures: what ended the ranks of this process; at most one, noted here.
    """

    def __init__(self, fabric: Fabric, failures: list[str]) -> None:
        self.fabrics: Sequence[Fabric] = (fabric,)
        self.failures = failures

    @property
    def has_failed(self) -> bool:
        """Whether the ranks have ended with an error."""
        return bool(self.failures)

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return what ``work`` returns here; tell the other ranks if it fails."""
        try:
            return [work(self.fabrics[0])]
        except BaseException as error:
            self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""
        if not self.has_failed:
            self.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            self.fabrics[0].stop(self.failures[0])

    def close(self) -> None:
        """Leave the world."""
        if self.has_failed:
            self.fabrics[0].close()


@cache
def met(environment: RankEnvironment) -> list[Fabric]:
    """Return this process's connection, if it has one: ranks meet once per job, but may train several models."""
    return []


@cache
def failures_of(environment: RankEnvironment) -> list[str]:
    """Return what has ended the ranks that met in this process."""
    return []


def open_world(environment: RankEnvironment | None, num_ranks: int, deadline_s: float) -> World:
    """Return the world a launcher made, or one with all ranks in this process.

    Args:
        environment: what a launcher told this process; None when none started it.
        num_ranks: ranks of the plan, for a world in this process.
        deadline_s: the longest that a rank waits for another.

    Raises:
        LaunchError: this process only imports the script of the one that started it, or its ranks have ended.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            f"this is {multiprocessing.current_process().name}, which imports the script of the process that started "
            "it, and the script trains as soon as it is imported; put what it does under "
            "`if __name__ == '__main__':`"
        )
    if environment is None or environment.world_size == 1:
        return LocalWorld(num_ranks, deadline_s)
    known, failures = met(environment), failures_of(environment)
    if failures:
        raise LaunchError(
            f"the ranks of this job have ended with an error, {failures[0]!r}; an error on one rank ends all of them, "
            "so that nothing more can be trained in these processes: start the ranks again"
        )
    if known:
        return JoinedWorld(known[0], failures)
    patience = environment.deadline_s if environment.deadline_s is not None else deadline_s
    address = Address(
        environment.master_addr,
        environment.master_port,
        environment.store_fd,
        kept_by="launcher" if environment.agent_keeps_store else "rank 0",
    )
    fabric = connect(
        environment.rank,
        environment.world_size,
        address,
        job=environment.job,
        deadline_s=patience,
        transport=asked_for(environment.transport),
        facts={"job key": key_mark(environment.key_file)},
    )
    atexit.register(fabric.close)
    require_key(environment.key_file)  # after the meeting: where only some hosts have it, all ranks know which
    known.append(fabric)
    settle_threads(fabric, is_placed=environment.is_placed)
    return JoinedWorld(fabric, failures)


def another(world: World, deadline_s: float) -> World:
    """Return a world of the same ranks for another team beside the one that has this world."""
    return world if isinstance(world, JoinedWorld) else LocalWorld(world.fabrics[0].num_ranks, deadline_s)


def is_one_of_many(world: World) -> bool:
    """Tell whether other processes have ranks, too."""
    return len(world.fabrics) < world.fabrics[0].num_ranks
