"""Process sets: groups of ranks for operations; all ranks know all sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from counterpoint.compat.horovod.errors import translate_peer_errors
from counterpoint.compat.horovod.world import PROCESS, HorovodWorld, current_world
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Group


class ProcessSet:
    """A set of ranks that run operations together; a rank may be in many.

    Args:
        ranks: global ranks.

    Attributes:
        process_set_id: None before the set is added and after it is removed.

    Raises:
        PlanError: a rank is not an int.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        given: object = ranks
        members = list(ranks) if isinstance(given, Iterable) else [None]
        if not all(type(rank) is int for rank in members):
            raise PlanError(f"ProcessSet({ranks!r}): a process set is a list of ranks; give ints from 0")
        self.ranks: list[int] | None = sorted(rank for rank in members if rank is not None)
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return the number of members; None if the set was not added."""
        return None if self.process_set_id is None else len(current_world().process_sets[self.process_set_id])

    def rank(self) -> int | None:
        """Return the index of this rank among the members; None if the set was not added.

        Raises:
            PlanError: this rank is not a member.
        """
        return None if self.process_set_id is None else member_group(self).index(current_world().fabric.rank)

    def included(self) -> bool | None:
        """Return whether this rank is a member; None if that is not known yet."""
        return None if PROCESS.world is None or self.ranks is None else PROCESS.world.fabric.rank in self.ranks

    def __str__(self) -> str:
        """Return the set as Horovod prints it."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class GlobalProcessSet(ProcessSet):
    """The set of all ranks, known after ``init``."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0
        self.ranks = None


global_process_set = GlobalProcessSet()


def member_group(process_set: ProcessSet) -> Group:
    """Return the ranks of the set, which include this one.

    Raises:
        PlanError: the set was not added, or this rank is not a member.
    """
    world = current_world()
    group = None if process_set.process_set_id is None else world.process_sets.get(process_set.process_set_id)
    if group is None:
        raise PlanError(
            f"{process_set} was not added; a process set is added by hvd.init(process_sets=[...]) or by "
            "hvd.add_process_set on every rank: add it before use"
        )
    if world.fabric.rank not in group:
        raise PlanError(
            f"rank {world.fabric.rank} is not in {process_set}; only members start its operations: check "
            "process_set.included() first"
        )
    return group


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a set on all ranks and return it; every rank calls this with the same ranks.

    Raises:
        HorovodInternalError: the ranks pass different sets.
        PlanError: a rank does not exist, or the set exists already.
    """
    world = current_world()
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    group = tuple(new.ranks or ())
    if not group or len(set(group)) != len(group) or not set(group) <= set(world.all_ranks):
        raise PlanError(
            f"{new}: a process set needs at least one rank, and distinct ranks below {len(world.all_ranks)}; correct "
            "the list"
        )
    if group in world.process_sets.values():
        raise PlanError(f"{new}: a process set of these ranks exists already; use that one, or remove it first")
    with translate_peer_errors():
        world.fabric.gather_values(f"process set of ranks {list(group)}", 0, world.all_ranks)
    new.process_set_id = world.next_process_set_id
    world.process_sets[world.next_process_set_id] = group
    world.next_process_set_id += 1
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set on all ranks and return whether it existed; every rank calls this. The global set stays.

    Raises:
        HorovodInternalError: the ranks pass different sets.
    """
    world, number = current_world(), process_set.process_set_id
    if number is None or number == 0 or number not in world.process_sets:
        return False
    with translate_peer_errors():
        world.fabric.gather_values(f"end of process set {number}", 0, world.all_ranks)
    del world.process_sets[number]
    process_set.process_set_id = None
    return True


def reset_process_sets(world: HorovodWorld | None, process_sets: Sequence[ProcessSet]) -> None:
    """Bind the global set to this world and add the given sets; without a world, unbind all."""
    global_process_set.ranks = None if world is None else list(world.all_ranks)
    for process_set in process_sets:
        process_set.process_set_id = None
        if world is not None:
            add_process_set(process_set)
