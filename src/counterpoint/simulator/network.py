"""How long messages and collectives are on their way, by where their ranks are: in memory, or between hosts.

A collective does what :mod:`counterpoint.fabric` does. Without levels it is a ring of all members. Inside a host each
member adds up one part of what all have in memory. Over hosts it has stages: each host shares its sum among its
members, the holders of each part complete it in a ring of hosts, each host gathers; so what crosses the way out of a
host is ``2 (h-1)/h`` of the value once, however many of its ranks are members.

Over memory that is copied (:attr:`counterpoint.world.cluster.Link.is_copied`) nothing is on its way while its rank
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

from counterpoint.program.codes import find_code
from counterpoint.program.instruction import Collective, Commit, Group, Pull, Push, Recv, Send
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.moves import COPY_PASSES, READ_PASSES
from counterpoint.simulator.rings import collective_s, halves, memory_half_s
from counterpoint.world.cluster import Cluster, Link

PIPE_BYTES = 1 << 20
"""So much is under way at most between two ranks of a host; of a larger message both ends are busy at one time."""

REMEMBERED = 4096
"""Of so many groups of ranks it is remembered where they are; a program calls each of its groups many times."""

Message: TypeAlias = Send | Push | Recv | Pull
"""What one rank says to another, or hears from it."""

Talk: TypeAlias = Message | Collective | Commit
"""What a rank says to others, or hears from them."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a word asks of links.

    Args:
        apart_s: seconds in which it is in nobody's way: latencies, memory, links of its own ranks.
        crossing_s: seconds on links that ranks share, if nobody else crosses them.
    """

    apart_s: float
    crossing_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it takes if nobody is in its way."""
        return self.apart_s + self.crossing_s


@dataclass(frozen=True, slots=True)
class Network:
    """What words ask of the links of a cluster.

    Args:
        cluster: where the ranks are.
        size_of: bytes of a whole value on one rank.
    """

    cluster: Cluster
    size_of: Sizes

    def load(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> Load:
        """Return what a word of a rank asks; ``part`` of the value is at hand.

        A commit goes up and down a tree of its members.
        """
        if self.is_copied(word, rank):
            return Load(0.0)
        match word:
            case Send(value, peer, code) | Push(value, peer, code):
                return self._on_way((rank, peer), 1, self.size_of(value, code))
            case Collective(value=value, code=code) if code:
                return self._collective(word, self.size_of(value, code))
            case Collective(value=value):
                return self._collective(word, self.size_of(value) * part)
            case Commit(group):
                return Load(2 * math.ceil(math.log2(len(group))) * self.cluster.link_among(group).latency_s)

    def is_copied(self, word: Talk, rank: int) -> bool:
        """Tell whether all that a word of a rank is about goes through memory that its members see."""
        ranks = (rank, word.peer) if isinstance(word, Message) else word.group
        return self.cluster.link_among(ranks).is_copied

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return for how long a word of a rank keeps its own processor busy.

        Args:
            word: what it says or hears.
            part: of the value that is at hand.
            rank: whose word it is.
            has_one_copy: whether weights and gradients of its members are one and the same memory.
        """
        if not self.is_copied(word, rank):
            return 0.0
        match word:
            case Pull(value) if self.size_of(value) > PIPE_BYTES:
                return 0.0  # taken out while its server puts it in
            case Send(value, peer) | Push(value, peer) | Recv(value, peer) | Pull(value, peer):
                size = self.size_of(value, "" if isinstance(word, Pull) else word.code)
                seconds = self.cluster.link_among((rank, peer)).seconds(size)
                if self.cluster.turns is not None:
                    seconds = max(seconds, self.cluster.turns.message_s + self._copied_s((rank, peer), size))
                return seconds / (1 if size > PIPE_BYTES else 2)
            case Collective(value=value, group=group):
                moved = self.size_of(value) * float(part) * passes(word, has_one_copy=has_one_copy)
                return self.cluster.link_among(group).latency_s / 2 + moved / self.cluster.device.memory_bytes_per_s
            case Commit(group):
                return self.cluster.link_among(group).latency_s

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell whether a message of a rank is larger than the pipe that it goes through."""
        size = self.size_of(word.value, "" if isinstance(word, Pull) else word.code)
        return size > PIPE_BYTES and self.is_copied(word, rank)

    def _copied_s(self, ranks: Group, num_bytes: float) -> float:
        return num_bytes / self.cluster.link_among(ranks).bytes_per_s

    def _on_way(self, ranks: Group, rounds: int, num_bytes: float) -> Load:
        """Return what it takes to get so many bytes from group to group of these ranks, in so many rounds."""
        link, is_shared = _way(self.cluster, ranks)
        if is_shared:
            return Load(rounds * link.latency_s, num_bytes / link.bytes_per_s)
        return Load(rounds * link.latency_s + num_bytes / link.bytes_per_s)

    def _collective(self, word: Collective, value_bytes: Fraction | float) -> Load:
        group = word.group
        if not self.cluster.levels:
            return Load(collective_s(word, value_bytes, self.cluster.link_among(group)))
        memory, members = _hosts(self.cluster, group)
        if word.verb == "broadcast":
            return self._copy(word, float(value_bytes), members)
        times, half_bytes = halves(word, value_bytes)
        if len(members) == 1:
            return Load(times * memory_half_s(half_bytes, len(group), memory))
        if self._takes_sockets(word, members):
            return _repeated(self._flat_ring(group, half_bytes), times)
        num_hosts, num_parts = len(members), min(members.values())
        out_bytes = float(half_bytes) * (num_hosts - 1) / num_hosts
        if not _way(self.cluster, group)[1]:
            out_bytes /= num_parts  # each holder of a part has a link of its own
        between = self._on_way(group, num_hosts - 1, out_bytes)
        inside_s = memory_half_s(half_bytes, max(members.values()), memory)
        return _repeated(Load(inside_s + between.apart_s, between.crossing_s), times)

    def _copy(self, word: Collective, value_bytes: float, members: Counter[int]) -> Load:
        """Through the memory of the first member's host, up a tree of hosts, through the memory of each of these."""
        root = self.cluster.host(word.group[0])
        memory_s = self.cluster.link_at(0, word.group).seconds(value_bytes)
        inside_s = memory_s * ((members[root] > 1) + any(members[host] > 1 for host in members if host != root))
        rounds = math.ceil(math.log2(len(members)))
        between = self._on_way(word.group, rounds, rounds * value_bytes)
        return Load(inside_s + between.apart_s, between.crossing_s)

    def _flat_ring(self, group: Group, half_bytes: Fraction | float) -> Load:
        """Return what a ring of all members asks, whose edges may leave a host more than once."""
        hosts = [self.cluster.host(rank) for rank in group]
        leaving = Counter(host for host, other in zip(hosts, hosts[1:] + hosts[:1], strict=True) if host != other)
        edges = max(leaving.values()) if self.cluster.shared_levels(group) else 1
        return self._on_way(group, len(group) - 1, edges * float(half_bytes) * (len(group) - 1) / len(group))

    @staticmethod
    def _takes_sockets(word: Collective, members: Counter[int]) -> bool:
        """Tell whether no member's range has a holder on every host, so that all members talk to each other."""
        gathers = word.verb in {"reduce_scatter", "all_gather"} or (
            word.code and find_code(word.code).kind.way == "gather"
        )
        return bool(gathers) and len(set(members.values())) > 1


@lru_cache(maxsize=REMEMBERED)
def _way(cluster: Cluster, ranks: Group) -> tuple[Link, bool]:
    """Return what a message between any of these ranks finds, and whether others may cross it."""
    return cluster.link_among(ranks), bool(cluster.shared_levels(ranks))


@lru_cache(maxsize=REMEMBERED)
def _hosts(cluster: Cluster, group: Group) -> tuple[Link, Counter[int]]:
    """Return the memory of a group's hosts, and how many members each has."""
    return cluster.link_at(0, group), Counter(map(cluster.host, group))


def _repeated(load: Load, times: int) -> Load:
    return Load(times * load.apart_s, times * load.crossing_s)


def passes(word: Collective, *, has_one_copy: bool) -> float:
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
    num_ranks = len(word.group)
    if has_one_copy:
        return READ_PASSES * (num_ranks - 1) / num_ranks if word.verb == "reduce_scatter" else 0.0
    if word.verb == "reduce_scatter":
        return 1 + (COPY_PASSES - 1) / num_ranks
    return COPY_PASSES if word.value.micro is None else 6.0  # a join's part in, and the others' out
