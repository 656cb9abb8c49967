"""CPU affinity: on which cores the ranks of one host run and with how many threads, computed from the topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.world.topology import Core, Topology, format_count

Binding: TypeAlias = Literal["none", "core", "numa", "compact", "spread"]
BINDINGS: tuple[Binding, ...] = get_args(Binding)
DEFAULT_BINDING: Binding = "none"


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one rank runs.

    Args:
        threads: number of its threads.
        cpus: the only hyperthreads that it may use; empty if it may use all.
    """

    threads: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """Where the ranks of one host run.

    Args:
        ranks: one placement per rank.
        note: a warning for the user; empty if there is none.
    """

    ranks: tuple[RankPlacement, ...]
    note: str = ""


def place_ranks(
    topology: Topology, ranks: int, *, threads: int | None = None, bind: Binding = DEFAULT_BINDING
) -> HostPlacement:
    """Return where the ranks of a host run; by default ranks x threads fills the cores as far as they divide.

    ``none`` does not bind ranks. With ``core`` each rank gets as many cores as threads, evenly over the NUMA nodes and
    adjacent ranks on one node; ``compact`` fills one node after the other instead, and ``spread`` deals ranks to the
    nodes round-robin. The cores of a rank are on one node if there are enough. With ``numa`` a rank may use all cores
    of its node: with as many ranks as nodes, each node is a replica. Ranks that outnumber the cores share them, with
    one thread each and unbound.

    Args:
        topology: the host.
        ranks: number of ranks on it.
        threads: threads of each rank; by default cores // ranks.
        bind: the binding.

    Raises:
        PlanError: there is no such binding, or fewer than one rank or thread.

    Source:
        NUMA-Caffe (Roy et al., TACO 2018): one replica per NUMA node, with local memory; Intel-Caffe: as many threads
        as cores, each bound to a core.

    Example:
        >>> cores = tuple(Core((number,), node=number // 2) for number in range(4))
        >>> [rank.cpus for rank in place_ranks(Topology(cores), 2, bind="core").ranks]
        [(0, 1), (2, 3)]
    """
    if bind not in BINDINGS:
        raise PlanError(f"there is no binding {bind!r}; the bindings are {', '.join(BINDINGS)}; give one of them")
    if ranks < 1 or (threads is not None and threads < 1):
        raise PlanError(f"{ranks} ranks x {threads} threads cannot be placed; give at least 1 of each")
    num_usable = topology.num_usable
    if ranks > num_usable:
        return HostPlacement(
            (RankPlacement(1),) * ranks, _oversubscribed_note(ranks, threads or num_usable, num_usable)
        )
    cores_per_rank = num_usable // ranks
    num_threads = cores_per_rank if threads is None else threads
    note = "" if ranks * num_threads <= num_usable else _too_many_threads_note(ranks, num_threads, num_usable)
    nodes = [list(cores) for cores in topology.nodes.values()]
    if bind == "none":
        blocks: list[list[Core]] = [[] for _ in range(ranks)]
    elif bind == "numa":
        blocks = _assign_whole_nodes(nodes, ranks)
    else:
        blocks = _assign_cores(
            nodes,
            _assign_nodes([len(node) // min(num_threads, cores_per_rank) for node in nodes], ranks, bind),
            min(num_threads, cores_per_rank),
        )
    cpus = [tuple(sorted(cpu for core in block for cpu in core.cpus)) for block in blocks]
    return HostPlacement(tuple(RankPlacement(num_threads, rank_cpus) for rank_cpus in cpus), note)


def _assign_nodes(capacities: Sequence[int], ranks: int, bind: Binding) -> list[int | None]:
    """Return the node of each rank, given how many ranks fit on each node; None for ranks that fit on no node."""
    if bind == "compact":
        chosen_nodes = [node for node, capacity in enumerate(capacities) for _ in range(capacity)]
    else:
        rounds = range(max(capacities))
        chosen_nodes = [node for index in rounds for node, capacity in enumerate(capacities) if index < capacity]
    chosen = chosen_nodes[:ranks]
    return [*(sorted(chosen) if bind == "core" else chosen), *([None] * (ranks - len(chosen)))]


def _assign_cores(nodes: Sequence[list[Core]], assigned: Sequence[int | None], num_threads: int) -> list[list[Core]]:
    """Return the cores of each rank; ranks without a node take the remaining ones."""
    remaining = [iter(node) for node in nodes]
    own_cores = [[] if node is None else list(islice(remaining[node], num_threads)) for node in assigned]
    leftover = iter([core for node in remaining for core in node])
    return [block or list(islice(leftover, num_threads)) for block in own_cores]


def _assign_whole_nodes(nodes: Sequence[list[Core]], ranks: int) -> list[list[Core]]:
    """Return one node per rank, shared if there are more ranks than nodes; several nodes if there are fewer ranks."""
    if ranks >= len(nodes):
        return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]
    bounds = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
    return [[core for node in nodes[bounds[r] : bounds[r + 1]] for core in node] for r in range(ranks)]


def _oversubscribed_note(ranks: int, threads: int, cores: int) -> str:
    return (
        f"{format_count(ranks, 'rank')} x {format_count(threads, 'thread')} on {format_count(cores, 'core')}; "
        "setting 1 thread each, "
        f"and ranks share cores: at most {format_count(cores, 'rank')} can compute at the same time"
    )


def _too_many_threads_note(ranks: int, threads: int, cores: int) -> str:
    return (
        f"{format_count(ranks, 'rank')} x {format_count(threads, 'thread')} on {format_count(cores, 'core')}: "
        "threads share cores, as "
        f"requested; omit --threads and OMP_NUM_THREADS for {cores // ranks} each"
    )
