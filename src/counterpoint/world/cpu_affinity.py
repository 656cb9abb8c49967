"""On which cores the ranks of one host compute, and with how many threads: a function of the topology alone."""

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
    """Where one rank computes.

    Args:
        threads: how many it computes with.
        cpus: the only hyperthreads that it may use; empty where it may use all.
    """

    threads: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """Where the ranks of one host compute.

    Args:
        places: one for each rank.
        note: what the user should know about it; empty where all is well.
    """

    ranks: tuple[RankPlacement, ...]
    note: str = ""


def place_ranks(
    topology: Topology, ranks: int, *, threads: int | None = None, bind: Binding = DEFAULT_BINDING
) -> HostPlacement:
    """Return where the ranks compute; ranks x threads is the number of cores, or a little less where it is no divisor.

    ``none`` binds nothing. Under ``core`` each rank has as many cores of its own as threads, evenly over the NUMA
    nodes and neighbouring ranks on one node; ``compact`` fills one node after the other instead, and ``spread``
    deals ranks to the nodes in turn. A rank's cores are on one node wherever enough are left on one. Under ``numa`` a
    rank may use all cores of its node, and with as many ranks as nodes a node is a replica. Ranks that outnumber the
    cores take turns, with one thread each and unbound.

    Args:
        topology: of the host.
        ranks: how many run on it.
        threads: of each; what divides the cores by default.
        bind: the rule.

    Raises:
        PlanError: there is no such rule, or no rank or thread.

    Source:
        NUMA-Caffe (Roy et al., TACO 2018): one replica for each NUMA node, its memory near; Intel-Caffe: as many
        threads as cores, each on a core.

    Example:
        >>> cores = tuple(Core((number,), node=number // 2) for number in range(4))
        >>> [found.cpus for found in place(Topology(cores), 2, bind="core").places]
        [(0, 1), (2, 3)]
    """
    if bind not in BINDINGS:
        raise PlanError(f"there is no binding {bind!r}; the bindings are {', '.join(BINDINGS)}; give one of them")
    if ranks < 1 or (threads is not None and threads < 1):
        raise PlanError(f"{ranks} ranks x {threads} threads cannot be placed; give at least 1 of each")
    usable = topology.num_usable
    if ranks > usable:
        return HostPlacement((RankPlacement(1),) * ranks, _oversubscribed_note(ranks, threads or usable, usable))
    share = usable // ranks
    width = share if threads is None else threads
    note = "" if ranks * width <= usable else _too_many_threads_note(ranks, width, usable)
    nodes = [list(cores) for cores in topology.nodes.values()]
    if bind == "none":
        blocks: list[list[Core]] = [[] for _ in range(ranks)]
    elif bind == "numa":
        blocks = _assign_whole_nodes(nodes, ranks)
    else:
        blocks = _assign_cores(
            nodes, _assign_nodes([len(node) // min(width, share) for node in nodes], ranks, bind), min(width, share)
        )
    cpus = [tuple(sorted(cpu for core in block for cpu in core.cpus)) for block in blocks]
    return HostPlacement(tuple(RankPlacement(width, found) for found in cpus), note)


def _assign_nodes(capacities: Sequence[int], ranks: int, bind: Binding) -> list[int | None]:
    """Return the node of each rank by the rooms that nodes have; None where no node has room for it in one piece."""
    if bind == "compact":
        found = [node for node, capacity in enumerate(capacities) for _ in range(capacity)]
    else:
        turns = range(max(capacities))
        found = [node for turn in turns for node, capacity in enumerate(capacities) if turn < capacity]
    chosen = found[:ranks]
    return [*(sorted(chosen) if bind == "core" else chosen), *([None] * (ranks - len(chosen)))]


def _assign_cores(nodes: Sequence[list[Core]], assigned: Sequence[int | None], width: int) -> list[list[Core]]:
    """Return the cores of each rank; those without a node take what the others left."""
    rest = [iter(node) for node in nodes]
    own = [[] if node is None else list(islice(rest[node], width)) for node in assigned]
    left = iter([core for node in rest for core in node])
    return [block or list(islice(left, width)) for block in own]


def _assign_whole_nodes(nodes: Sequence[list[Core]], ranks: int) -> list[list[Core]]:
    """Return one node for each rank, shared where there are more ranks, several nodes where there are fewer."""
    if ranks >= len(nodes):
        return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]
    bounds = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
    return [[core for node in nodes[bounds[r] : bounds[r + 1]] for core in node] for r in range(ranks)]


def _oversubscribed_note(ranks: int, threads: int, cores: int) -> str:
    return (
        f"{format_count(ranks, 'rank')} x {format_count(threads, 'thread')} on {format_count(cores, 'core')}; setting 1 thread each, "
        f"and ranks take turns: no more than {format_count(cores, 'rank')} can compute here at once"
    )


def _too_many_threads_note(ranks: int, threads: int, cores: int) -> str:
    return (
        f"{format_count(ranks, 'rank')} x {format_count(threads, 'thread')} on {format_count(cores, 'core')}: threads take turns, as "
        f"asked for; leave --threads and OMP_NUM_THREADS away for {cores // ranks} each"
    )
