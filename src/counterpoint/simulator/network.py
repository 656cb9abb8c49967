"""How long collectives take on a ring, from their size, their members and the link between them.

How long messages and collectives are on their way, by where their ranks are: in memory, or between hosts.

A collective does what :mod:`counterpoint.fabric` does. Without levels it is a ring of all members. Inside a host each
member adds up one part of what all have in memory. Over hosts it has stages: each host shares its sum among its
members, the holders of each part complete it in a ring of hosts, each host gathers; so what crosses the way out of a
host is ``2 (h-1)/h`` of the value once, however many of its ranks are members.

Over memory that is copied (:attr:`counterpoint.world.cluster.Link.is_shared_memory`) nothing is on its way while its rank
computes: all of it is work of the ranks' own processors. A member of a collective goes through memory as often as
:mod:`counterpoint.fabric.shm` does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.compression import find_codec
from counterpoint.program.instruction import Collective, Commit, Group, Pull, Push, Recv, Send
from counterpoint.simulator.memory_traffic import COPY_PASSES, READ_PASSES
from counterpoint.world.cluster import Cluster, Link


def ring_all_reduce_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long a ring all-reduce occupies every link of the ring.

    Args:
        value_bytes: size of the value on one rank.
        num_ranks: members of the ring; 1 means nothing to do and costs 0.
        link: the slowest link of the ring.

    Returns:
        Seconds: ``2 (n-1) (latency + value_bytes / n / bandwidth)``.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
    """
    return 2 * ring_reduce_scatter_s(value_bytes, num_ranks, link)


def ring_reduce_scatter_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long a ring reduce-scatter, or a ring all-gather, occupies every link of the ring.

    Args:
        value_bytes: size of the whole value.
        num_ranks: members of the ring; 1 means nothing to do and costs 0.
        link: the slowest link of the ring.

    Returns:
        Seconds: ``(n-1) (latency + value_bytes / n / bandwidth)``.

    Source:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009, section 3.
    """
    return (num_ranks - 1) * link.seconds(float(value_bytes) / num_ranks)


def linear_broadcast_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long the first member takes to send a value to all others, one after the other.

    Returns:
        Seconds: ``(n-1) (latency + value_bytes / bandwidth)``.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, section 4.
    """
    return (num_ranks - 1) * link.seconds(float(value_bytes))


def shm_reduce_scatter_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long the ranks of a host take to add up one part each in memory, or to gather all parts.

    Args:
        value_bytes: size of the whole value.
        num_ranks: how many they are; 1 means nothing to do and costs 0.
        link: what one rank moves of what others have.

    Returns:
        Seconds: ``latency + (n-1)/n value_bytes / bandwidth``.
    """
    return link.seconds(float(value_bytes) * (num_ranks - 1) / num_ranks) if num_ranks > 1 else 0.0


def half_collectives(instruction: Collective, value_bytes: Fraction | float) -> tuple[int, Fraction | float]:
    """Return how many reduce-scatters or all-gathers a collective is, and of a value of how many bytes.

    Args:
        word: what is called, but for a copy.
        value_bytes: as for :func:`ring_collective_s`.
    """
    way = find_codec(instruction.codec).spec.reduction if instruction.codec else "reduce"
    match instruction.op:
        case "all_reduce" if way == "gather":
            return 1, len(instruction.group) * value_bytes
        case "all_reduce" if way == "reduce twice":
            return 4, value_bytes / 2
        case "all_reduce" | "all_reduce_mean":
            return 2, value_bytes
        case "reduce_scatter" | "all_gather" | "broadcast":
            return 1, value_bytes


def ring_collective_s(instruction: Collective, value_bytes: Fraction | float, link: Link) -> float:
    """Predict how long a collective in a ring of its members occupies their links.

    Args:
        word: what is called.
        value_bytes: size of what each member brings (before a share) or has in the end (after a join); encoded for a
            sum with a code.
        link: the link of each member.
    """
    if instruction.op == "broadcast":
        return linear_broadcast_s(value_bytes, len(instruction.group), link)
    times, half_bytes = half_collectives(instruction, value_bytes)
    return times * ring_reduce_scatter_s(half_bytes, len(instruction.group), link)


PIPE_CAPACITY_BYTES = 1 << 20
"""So much is under way at most between two ranks of a host; of a larger message both ends are busy at one time."""

CACHE_SIZE = 4096
"""Of so many groups of ranks it is remembered where they are; a program calls each of its groups many times."""

P2PInstruction: TypeAlias = Send | Push | Recv | Pull
"""What one rank says to another, or hears from it."""

CommInstruction: TypeAlias = P2PInstruction | Collective | Commit
"""What a rank says to others, or hears from them."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a word asks of links.

    Args:
        apart_s: seconds in which it is in nobody's way: latencies, memory, links of its own ranks.
        crossing_s: seconds on links that ranks share, if nobody else crosses them.
    """

    private_s: float
    shared_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it takes if nobody is in its way."""
        return self.private_s + self.shared_s


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """What words ask of the links of a cluster.

    Args:
        cluster: where the ranks are.
        size_of: bytes of a whole value on one rank.
    """

    cluster: Cluster
    size_of: SizeFn

    def link_load(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> LinkLoad:
        """Return what a word of a rank asks; ``part`` of the value is at hand.

        A commit goes up and down a tree of its members.
        """
        if self.is_copied(instruction, rank):
            return LinkLoad(0.0)
        match instruction:
            case Send(value, peer, code) | Push(value, peer, code):
                return self._transfer((rank, peer), 1, self.size_of(value, code))
            case Collective(tensor=value, codec=code) if code:
                return self._collective(instruction, self.size_of(value, code))
            case Collective(tensor=value):
                return self._collective(instruction, self.size_of(value) * fraction)
            case Commit(group):
                return LinkLoad(2 * math.ceil(math.log2(len(group))) * self.cluster.link_among(group).latency_s)

    def is_copied(self, instruction: CommInstruction, rank: int) -> bool:
        """Tell whether all that a word of a rank is about goes through memory that its members see."""
        ranks = (rank, instruction.peer) if isinstance(instruction, P2PInstruction) else instruction.group
        return self.cluster.link_among(ranks).is_shared_memory

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return for how long a word of a rank keeps its own processor busy.

        Args:
            word: what it says or hears.
            part: of the value that is at hand.
            rank: whose word it is.
            has_one_copy: whether weights and gradients of its members are one and the same memory.
        """
        if not self.is_copied(instruction, rank):
            return 0.0
        match instruction:
            case Pull(value) if self.size_of(value) > PIPE_CAPACITY_BYTES:
                return 0.0  # taken out while its server puts it in
            case Send(value, peer) | Push(value, peer) | Recv(value, peer) | Pull(value, peer):
                size = self.size_of(value, "" if isinstance(instruction, Pull) else instruction.codec)
                seconds = self.cluster.link_among((rank, peer)).seconds(size)
                if self.cluster.time_slicing is not None:
                    seconds = max(seconds, self.cluster.time_slicing.message_s + self._copy_s((rank, peer), size))
                return seconds / (1 if size > PIPE_CAPACITY_BYTES else 2)
            case Collective(tensor=value, group=group):
                moved = (
                    self.size_of(value)
                    * float(fraction)
                    * collective_memory_passes(instruction, shares_memory=shares_memory)
                )
                return self.cluster.link_among(group).latency_s / 2 + moved / self.cluster.device.memory_bytes_per_s
            case Commit(group):
                return self.cluster.link_among(group).latency_s

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell whether a message of a rank is larger than the pipe that it goes through."""
        size = self.size_of(instruction.tensor, "" if isinstance(instruction, Pull) else instruction.codec)
        return size > PIPE_CAPACITY_BYTES and self.is_copied(instruction, rank)

    def _copy_s(self, ranks: Group, num_bytes: float) -> float:
        return num_bytes / self.cluster.link_among(ranks).bytes_per_s

    def _transfer(self, ranks: Group, rounds: int, num_bytes: float) -> LinkLoad:
        """Return what it takes to get so many bytes from group to group of these ranks, in so many rounds."""
        link, is_shared = _link_and_sharing(self.cluster, ranks)
        if is_shared:
            return LinkLoad(rounds * link.latency_s, num_bytes / link.bytes_per_s)
        return LinkLoad(rounds * link.latency_s + num_bytes / link.bytes_per_s)

    def _collective(self, instruction: Collective, value_bytes: Fraction | float) -> LinkLoad:
        group = instruction.group
        if not self.cluster.levels:
            return LinkLoad(ring_collective_s(instruction, value_bytes, self.cluster.link_among(group)))
        memory, members = _members_per_host(self.cluster, group)
        if instruction.op == "broadcast":
            return self._broadcast(instruction, float(value_bytes), members)
        times, half_bytes = half_collectives(instruction, value_bytes)
        if len(members) == 1:
            return LinkLoad(times * shm_reduce_scatter_s(half_bytes, len(group), memory))
        if self._needs_flat_ring(instruction, members):
            return _scale(self._flat_ring(group, half_bytes), times)
        num_hosts, num_parts = len(members), min(members.values())
        out_bytes = float(half_bytes) * (num_hosts - 1) / num_hosts
        if not _link_and_sharing(self.cluster, group)[1]:
            out_bytes /= num_parts  # each holder of a part has a link of its own
        between = self._transfer(group, num_hosts - 1, out_bytes)
        inside_s = shm_reduce_scatter_s(half_bytes, max(members.values()), memory)
        return _scale(LinkLoad(inside_s + between.private_s, between.shared_s), times)

    def _broadcast(self, instruction: Collective, value_bytes: float, members: Counter[int]) -> LinkLoad:
        """Through the memory of the first member's host, up a tree of hosts, through the memory of each of these."""
        root = self.cluster.host(instruction.group[0])
        memory_s = self.cluster.link_at(0, instruction.group).seconds(value_bytes)
        inside_s = memory_s * ((members[root] > 1) + any(members[host] > 1 for host in members if host != root))
        rounds = math.ceil(math.log2(len(members)))
        between = self._transfer(instruction.group, rounds, rounds * value_bytes)
        return LinkLoad(inside_s + between.private_s, between.shared_s)

    def _flat_ring(self, group: Group, half_bytes: Fraction | float) -> LinkLoad:
        """Return what a ring of all members asks, whose edges may leave a host more than once."""
        hosts = [self.cluster.host(rank) for rank in group]
        leaving = Counter(host for host, other in zip(hosts, hosts[1:] + hosts[:1], strict=True) if host != other)
        edges = max(leaving.values()) if self.cluster.shared_levels(group) else 1
        return self._transfer(group, len(group) - 1, edges * float(half_bytes) * (len(group) - 1) / len(group))

    @staticmethod
    def _needs_flat_ring(instruction: Collective, members: Counter[int]) -> bool:
        """Tell whether no member's range has a holder on every host, so that all members talk to each other."""
        gathers = instruction.op in {"reduce_scatter", "all_gather"} or (
            instruction.codec and find_codec(instruction.codec).spec.reduction == "gather"
        )
        return bool(gathers) and len(set(members.values())) > 1


@lru_cache(maxsize=CACHE_SIZE)
def _link_and_sharing(cluster: Cluster, ranks: Group) -> tuple[Link, bool]:
    """Return what a message between any of these ranks finds, and whether others may cross it."""
    return cluster.link_among(ranks), bool(cluster.shared_levels(ranks))


@lru_cache(maxsize=CACHE_SIZE)
def _members_per_host(cluster: Cluster, group: Group) -> tuple[Link, Counter[int]]:
    """Return the memory of a group's hosts, and how many members each has."""
    return cluster.link_at(0, group), Counter(map(cluster.host, group))


def _scale(load: LinkLoad, times: int) -> LinkLoad:
    return LinkLoad(times * load.private_s, times * load.shared_s)


def collective_memory_passes(instruction: Collective, *, shares_memory: bool) -> float:
    """Return how many times its size a member of a share or a sum reads and writes where all see each other's memory.

    To share, it reads its part of everybody's gradient, and writes it; to sum, it writes it to everybody. Activations
    and weights, which do not lie where others see them, are copied there and back. Of gradients in common memory only
    those of the others are read, where weights are updated, and the weights are there.

    Args:
        word: what is called.
        has_one_copy: whether weights and gradients of its members are one and the same memory.

    Example:
        >>> from counterpoint.program.instruction import Value
        >>> passes(Collective("reduce_scatter", Value("grad", (0,)), (0, 1)), has_one_copy=False)
        2.0
    """
    num_ranks = len(instruction.group)
    if shares_memory:
        return READ_PASSES * (num_ranks - 1) / num_ranks if instruction.op == "reduce_scatter" else 0.0
    if instruction.op == "reduce_scatter":
        return 1 + (COPY_PASSES - 1) / num_ranks
    return COPY_PASSES if instruction.tensor.micro is None else 6.0  # a join's part in, and the others' out
