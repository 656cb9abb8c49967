"""Predict how long messages and collectives occupy links, from where their ranks are.

A collective is modelled as :mod:`counterpoint.fabric` implements it. On a cluster without levels it is a ring of all
members. Inside a host each member reduces one part of the value in shared memory. Over several hosts it has stages:
each host reduce-scatters among its members, the holders of each part complete it in a ring of hosts, and each host
all-gathers; so ``2 (h-1)/h`` of the value crosses the uplink of a host once, however many of its ranks are members. A
reduce-scatter with a codec is an all-to-all without stages; so is the first half of an exchange of momenta.

Over shared memory (:attr:`counterpoint.world.cluster.Link.is_shared_memory`) no link is occupied while a rank
computes: copying is CPU work of the ranks themselves. A member of a collective then makes as many passes over memory
as :mod:`counterpoint.fabric.shm` does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.compression import encodes_shards, exchanges_momentum, find_codec
from counterpoint.program.instruction import UNIT_SIZES, Collective, Commit, Group, Pull, Push, Recv, Send, TensorRef
from counterpoint.simulator.memory_traffic import COPY_PASSES, DECODE_PASSES, ENCODE_PASSES, READ_PASSES
from counterpoint.world.cluster import Cluster, Link


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
    """Predict how long the root takes to send a value to all other members, one after the other.

    Returns:
        Seconds: ``(n-1) (latency + value_bytes / bandwidth)``.

    Source:
        Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005, section 4.
    """
    return (num_ranks - 1) * link.seconds(float(value_bytes))


def shm_reduce_scatter_s(value_bytes: Fraction | float, num_ranks: int, link: Link) -> float:
    """Predict how long a reduce-scatter or an all-gather through the shared memory of one host takes.

    Args:
        value_bytes: size of the whole value.
        num_ranks: members on the host; 1 means nothing to do and costs 0.
        link: latency and bandwidth at which one rank reads what others have written.

    Returns:
        Seconds: ``latency + (n-1)/n value_bytes / bandwidth``.
    """
    return link.seconds(float(value_bytes) * (num_ranks - 1) / num_ranks) if num_ranks > 1 else 0.0


def half_collectives(instruction: Collective, value_bytes: Fraction | float) -> tuple[int, Fraction | float]:
    """Return how many reduce-scatters or all-gathers a collective consists of, and the bytes of each.

    Args:
        instruction: any collective but a broadcast.
        value_bytes: as for :func:`ring_collective_s`.
    """
    reduction = find_codec(instruction.codec).spec.reduction if instruction.codec else "reduce"
    match instruction.op:
        case "all_reduce" if reduction == "gather":
            return 1, len(instruction.group) * value_bytes
        case "all_reduce" if reduction == "reduce twice":
            return 4, value_bytes / 2
        case "all_reduce" | "all_reduce_mean":
            return 2, value_bytes
        case "reduce_scatter" | "all_gather" | "broadcast":
            return 1, value_bytes


def ring_collective_s(instruction: Collective, value_bytes: Fraction | float, link: Link) -> float:
    """Predict how long a collective in a ring of its members occupies their links.

    Args:
        instruction: the collective.
        value_bytes: size of the whole value: of the input of a reduce-scatter, of the output of an all-gather; the
            compressed size where an all-reduce has a codec.
        link: the link of each member.
    """
    if instruction.op == "broadcast":
        return linear_broadcast_s(value_bytes, len(instruction.group), link)
    times, half_bytes = half_collectives(instruction, value_bytes)
    return times * ring_reduce_scatter_s(half_bytes, len(instruction.group), link)


PIPE_CAPACITY_BYTES = 1 << 20
"""Capacity of the shared-memory pipe between two ranks; both ends of a larger message are busy together."""

CACHE_SIZE = 4096
"""Groups of ranks whose links and hosts are cached; a program uses each of its groups many times."""

P2PInstruction: TypeAlias = Send | Push | Recv | Pull
"""An instruction that sends or receives one message."""

CommInstruction: TypeAlias = P2PInstruction | Collective | Commit
"""An instruction that communicates with other ranks."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Seconds for which an instruction occupies links.

    Args:
        private_s: without contention: latencies, memory, links that only its own ranks use.
        shared_s: on links that several ranks share, if no other rank uses them at the same time.
    """

    private_s: float
    shared_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration without contention."""
        return self.private_s + self.shared_s


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """Link and CPU time of communication on a cluster.

    Args:
        cluster: the hosts, levels and links.
        size_of: bytes of a whole tensor on one rank.
    """

    cluster: Cluster
    size_of: SizeFn

    def link_load(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> LinkLoad:
        """Return the link time of an instruction of a rank that communicates ``fraction`` of its tensor.

        A commit is modelled as one trip up and one down a tree of its members.
        """
        if self.is_copied(instruction, rank):
            return LinkLoad(0.0)
        match instruction:
            case Send(tensor, peer, codec) | Push(tensor, peer, codec):
                return self._transfer((rank, peer), 1, self.size_of(tensor, codec))
            case Collective(tensor=tensor, codec=codec) if codec:
                return self._collective(instruction, self.size_of(tensor, codec))
            case Collective(tensor=tensor):
                return self._collective(instruction, self.size_of(tensor) * fraction)
            case Commit(group):
                return LinkLoad(2 * math.ceil(math.log2(len(group))) * self.cluster.link_among(group).latency_s)

    def is_copied(self, instruction: CommInstruction, rank: int) -> bool:
        """Return whether an instruction of a rank communicates only through memory that its members share."""
        ranks = (rank, instruction.peer) if isinstance(instruction, P2PInstruction) else instruction.group
        return self.cluster.link_among(ranks).is_shared_memory

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return for how long an instruction keeps the processor of its rank busy.

        Args:
            instruction: the instruction.
            fraction: of its tensor that is communicated.
            rank: the rank that executes it.
            shares_memory: whether parameters and gradients of its members are the same memory.
        """
        coding_s = self._coding_s(instruction) * float(fraction)
        if not self.is_copied(instruction, rank):
            return coding_s
        match instruction:
            case Pull(tensor) if self.size_of(tensor) > PIPE_CAPACITY_BYTES:
                return 0.0  # the worker reads it while the server writes it
            case Send(tensor, peer) | Push(tensor, peer) | Recv(tensor, peer) | Pull(tensor, peer):
                message_bytes = self.size_of(tensor, "" if isinstance(instruction, Pull) else instruction.codec)
                seconds = self.cluster.link_among((rank, peer)).seconds(message_bytes)
                if self.cluster.time_slicing is not None:
                    seconds = max(
                        seconds, self.cluster.time_slicing.message_s + self._copy_s((rank, peer), message_bytes)
                    )
                return seconds / (1 if message_bytes > PIPE_CAPACITY_BYTES else 2)
            case Collective(tensor=tensor, group=group):
                is_encoded = encodes_shards(instruction.op, instruction.codec)
                moved_bytes = (
                    self.size_of(tensor, instruction.codec if is_encoded else "")
                    * float(fraction)
                    * collective_memory_passes(
                        instruction, shares_memory=shares_memory and not self._casts_reductions(tensor)
                    )
                )
                return (
                    self.cluster.link_among(group).latency_s / 2
                    + moved_bytes / self.cluster.device.reached_bytes_per_s
                    + coding_s
                )
            case Commit(group):
                return self.cluster.link_among(group).latency_s

    def _coding_s(self, instruction: CommInstruction) -> float:
        """Return how long a member of a collective encodes its shard or gradient, and decodes what it gets."""
        if not isinstance(instruction, Collective) or not encodes_shards(instruction.op, instruction.codec):
            return 0.0
        name = find_codec(instruction.codec).name
        encoded = Fraction(1, len(instruction.group) if instruction.op == "all_gather" else 1)
        passes = encoded * ENCODE_PASSES[name] + DECODE_PASSES[name]
        return self.size_of(instruction.tensor) * float(passes) / self.cluster.device.reached_bytes_per_s

    def _casts_reductions(self, tensor: TensorRef) -> bool:
        """Return whether ranks sum casts of a unit's gradient, which they do not share in memory."""
        return tensor.name in UNIT_SIZES and self.size_of(TensorRef("reduced_grad", tensor.blocks)) < self.size_of(
            TensorRef("grad", tensor.blocks)
        )

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return whether a message is larger than the shared-memory pipe that it goes through."""
        size = self.size_of(instruction.tensor, "" if isinstance(instruction, Pull) else instruction.codec)
        return size > PIPE_CAPACITY_BYTES and self.is_copied(instruction, rank)

    def _copy_s(self, ranks: Group, num_bytes: float) -> float:
        return num_bytes / self.cluster.link_among(ranks).bytes_per_s

    def _transfer(self, ranks: Group, rounds: int, num_bytes: float) -> LinkLoad:
        """Return the load of sending a total number of bytes between these ranks, in a number of rounds."""
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
        if instruction.op == "all_reduce" and exchanges_momentum(instruction.codec):
            summed, gathered = (
                self._collective(half, value_bytes)
                for half in (replace(instruction, op="reduce_scatter"), replace(instruction, op="all_gather"))
            )
            return LinkLoad(summed.private_s + gathered.private_s, summed.shared_s + gathered.shared_s)
        times, half_bytes = half_collectives(instruction, value_bytes)
        if len(members) == 1:
            return LinkLoad(times * shm_reduce_scatter_s(half_bytes, len(group), memory))
        if instruction.op == "reduce_scatter" and instruction.codec:
            return self._all_to_all(group, value_bytes, members)
        if self._needs_flat_ring(instruction, members):
            return _scale(self._flat_ring(group, half_bytes), times)
        num_hosts, num_parts = len(members), min(members.values())
        out_bytes = float(half_bytes) * (num_hosts - 1) / num_hosts
        if not _link_and_sharing(self.cluster, group)[1]:
            out_bytes /= num_parts  # each holder of a part has its own link
        between = self._transfer(group, num_hosts - 1, out_bytes)
        inside_s = shm_reduce_scatter_s(half_bytes, max(members.values()), memory)
        return _scale(LinkLoad(inside_s + between.private_s, between.shared_s), times)

    def _broadcast(self, instruction: Collective, value_bytes: float, members: Counter[int]) -> LinkLoad:
        """Return the load of a broadcast: memory of the root's host, a tree of hosts, memory of each other host."""
        root = self.cluster.host(instruction.group[0])
        memory_s = self.cluster.link_at(0, instruction.group).seconds(value_bytes)
        inside_s = memory_s * ((members[root] > 1) + any(members[host] > 1 for host in members if host != root))
        rounds = math.ceil(math.log2(len(members)))
        between = self._transfer(instruction.group, rounds, rounds * value_bytes)
        return LinkLoad(inside_s + between.private_s, between.shared_s)

    def _all_to_all(self, group: Group, value_bytes: Fraction | float, members: Counter[int]) -> LinkLoad:
        """Return the load of each member's sending every other one a part: nothing is added up within a host before."""
        is_shared = bool(self.cluster.shared_levels(group))
        leaving = max((on_host if is_shared else 1) * (len(group) - on_host) for on_host in members.values())
        return self._transfer(group, len(group) - 1, leaving * float(value_bytes) / len(group))

    def _flat_ring(self, group: Group, half_bytes: Fraction | float) -> LinkLoad:
        """Return the load of a ring of all members, which may leave the same host more than once."""
        hosts = [self.cluster.host(rank) for rank in group]
        leaving = Counter(host for host, other in zip(hosts, hosts[1:] + hosts[:1], strict=True) if host != other)
        edges = max(leaving.values()) if self.cluster.shared_levels(group) else 1
        return self._transfer(group, len(group) - 1, edges * float(half_bytes) * (len(group) - 1) / len(group))

    @staticmethod
    def _needs_flat_ring(instruction: Collective, members: Counter[int]) -> bool:
        """Return whether hosts have different numbers of members, so that no part has a holder on each host."""
        gathers = instruction.op in {"reduce_scatter", "all_gather"} or (
            instruction.codec and find_codec(instruction.codec).spec.reduction == "gather"
        )
        return bool(gathers) and len(set(members.values())) > 1


@lru_cache(maxsize=CACHE_SIZE)
def _link_and_sharing(cluster: Cluster, ranks: Group) -> tuple[Link, bool]:
    """Return the link between these ranks, and whether other ranks share it."""
    return cluster.link_among(ranks), bool(cluster.shared_levels(ranks))


@lru_cache(maxsize=CACHE_SIZE)
def _members_per_host(cluster: Cluster, group: Group) -> tuple[Link, Counter[int]]:
    """Return the memory link of a group's hosts, and the number of members on each host."""
    return cluster.link_at(0, group), Counter(map(cluster.host, group))


def _scale(load: LinkLoad, times: int) -> LinkLoad:
    return LinkLoad(times * load.private_s, times * load.shared_s)


def collective_memory_passes(instruction: Collective, *, shares_memory: bool) -> float:
    """Return how many passes over its tensor a member of a shared-memory collective makes.

    A reduce-scatter reads the member's part of every gradient and writes it; an all-reduce also writes it to all
    members. Activations and parameters are not in shared memory, so that they are copied in and out. Where members
    share their gradients, only those of other members are read, at the update, and the parameters need no gathering.

    Args:
        instruction: the collective.
        shares_memory: whether parameters and gradients of its members are the same memory.

    Example:
        >>> from counterpoint.program.instruction import TensorRef
        >>> collective = Collective("reduce_scatter", TensorRef("grad", (0,)), (0, 1))
        >>> collective_memory_passes(collective, shares_memory=False)
        2.0
    """
    num_ranks = len(instruction.group)
    if shares_memory:
        return READ_PASSES * (num_ranks - 1) / num_ranks if instruction.op == "reduce_scatter" else 0.0
    if instruction.op == "reduce_scatter":
        return 1 + (COPY_PASSES - 1) / num_ranks
    return COPY_PASSES if instruction.tensor.micro is None else 6.0  # copy in and out
