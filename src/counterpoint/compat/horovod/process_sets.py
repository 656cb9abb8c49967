"""Some of the ranks, to which an operation is limited; all ranks know all sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from counterpoint.compat.horovod.errors import translate_peer_errors
from counterpoint.compat.horovod.world import PROCESS, HorovodWorld, current_world
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Group


class ProcessSet:
    """Horovod's ``ProcessSet``: ranks that run operations together; a member of the whole job may be in many.

    Args:
        ranks: whose set it is, as ranks of the whole job.

    Attributes:
        process_set_id: its number; None before it was added, and after it was removed.

    Raises:
        PlanError: the ranks are no whole numbers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        given: object = ranks
        members = list(ranks) if isinstance(given, Iterable) else [None]
        if not all(type(rank) is int for rank in members):
            raise PlanError(f"ProcessSet({ranks!r}): a process set is a list of ranks; give whole numbers from 0")
        self.ranks: list[int] | None = sorted(rank for rank in members if rank is not None)
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Return how many they are; None where the set was not added."""
        return None if self.process_set_id is None else len(current_world().process_sets[self.process_set_id])

    def rank(self) -> int | None:
        """Return the place of this rank among them; None where the set was not added.

        Raises:
            PlanError: this rank is not one of them.
        """
        return None if self.process_set_id is None else member_group(self).index(current_world().fabric.rank)

    def included(self) -> bool | None:
        """Return whether this rank is one of them; None where that is not known yet."""
        return None if PROCESS.world is None or self.ranks is None else PROCESS.world.fabric.rank in self.ranks

    def __str__(self) -> str:
        """Read as in Horovod."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class GlobalProcessSet(ProcessSet):
    """All ranks; what they are is known from ``init`` on."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0
        self.ranks = None


global_process_set = GlobalProcessSet()


def member_group(process_set: ProcessSet) -> Group:
    """Return the ranks of the set, this one among them.

    Raises:
        PlanError: the set was not added, or this rank is not in it.
    """
    world = current_world()
    group = None if process_set.process_set_id is None else world.process_sets.get(process_set.process_set_id)
    if group is None:
        raise PlanError(
            f"{process_set} is not known to all ranks; a process set is made by hvd.init(process_sets=[...]) or by "
            "hvd.add_process_set on every rank: add it before it is used"
        )
    if world.fabric.rank not in group:
        raise PlanError(
            f"rank {world.fabric.rank} is not in {process_set}; only its members start its operations: ask "
            "process_set.included() before"
        )
    return group


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Return the set, known to all ranks; every rank calls this with the same ranks.

    Raises:
        HorovodInternalError: the ranks name different sets.
        PlanError: some of them do not exist, or the set exists already.
    """
    world = current_world()
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    group = tuple(new.ranks or ())
    if not group or len(set(group)) != len(group) or not set(group) <= set(world.all_ranks):
        raise PlanError(
            f"{new}: a process set has different ranks below {len(world.all_ranks)}, at least one; correct the list"
        )
    if group in world.process_sets.values():
        raise PlanError(f"{new}: there is a process set of these ranks already; use that one, or remove it before")
    with translate_peer_errors():
        world.fabric.gather_values(f"process set of ranks {list(group)}", 0, world.all_ranks)
    new.process_set_id = world.next_process_set_id
    world.process_sets[world.next_process_set_id] = group
    world.next_process_set_id += 1
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Return whether the set was known, and is no more; every rank calls this. The set of all ranks stays.

    Raises:
        HorovodInternalError: the ranks name different sets.
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
    """The set of all ranks is that of this world, and those given are known; none where there is no world."""
    global_process_set.ranks = None if world is None else list(world.all_ranks)
    for process_set in process_sets:
        process_set.process_set_id = None
        if world is not None:
            add_process_set(process_set)
