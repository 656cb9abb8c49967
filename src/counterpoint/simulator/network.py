"""How long messages and collectives are on their way, by where their ranks are: in memory, or between hosts.

A collective does what :mod:`counterpoint.fabric` does. Without levels it is a ring of all members. Inside a host each
member adds up one part of what all have in memory. Over hosts it has stages: each host shares its sum among its
members, the holders of each part complete it in a ring of hosts, each host gathers; so what crosses the way out of a
host is ``2 (h-1)/h`` of the value once, however many of its ranks are members.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from counterpoint.program.codes import find_code
from counterpoint.program.instruction import Collective, Commit, Group, Push, Send
from counterpoint.program.traffic import Sizes
from counterpoint.simulator.rings import collective_s, halves, memory_half_s
from counterpoint.world.cluster import Cluster


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
        match word:
            case Send(value, peer) | Push(value, peer):
                return self._on_way((rank, peer), 1, self.size_of(value))
            case Collective(value=value, code=code) if code:
                return self._collective(word, self.size_of(value, code))
            case Collective(value=value):
                return self._collective(word, self.size_of(value) * part)
            case Commit(group):
                return Load(2 * math.ceil(math.log2(len(group))) * self.cluster.link_among(group).latency_s)

    def _on_way(self, ranks: Group, rounds: int, num_bytes: float) -> Load:
        """Return what it takes to get so many bytes from group to group of these ranks, in so many rounds."""
        link = self.cluster.link_among(ranks)
        if self.cluster.shared_levels(ranks):
            return Load(rounds * link.latency_s, num_bytes / link.bytes_per_s)
        return Load(rounds * link.latency_s + num_bytes / link.bytes_per_s)

    def _collective(self, word: Collective, value_bytes: Fraction | float) -> Load:
        group = word.group
        if not self.cluster.levels:
            return Load(collective_s(word, value_bytes, self.cluster.link_among(group)))
        memory = self.cluster.link_at(0, group)
        members = Counter(map(self.cluster.host, group))
        if word.verb == "copy":
            return self._copy(word, float(value_bytes), members)
        times, half_bytes = halves(word, value_bytes)
        if len(members) == 1:
            return Load(times * memory_half_s(half_bytes, len(group), memory))
        if self._takes_sockets(word, members):
            return _repeated(self._flat_ring(group, half_bytes), times)
        num_hosts, num_parts = len(members), min(members.values())
        out_bytes = float(half_bytes) * (num_hosts - 1) / num_hosts
        if not self.cluster.shared_levels(group):
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
        gathers = word.verb in {"share", "join"} or (word.code and find_code(word.code).kind.way == "gather")
        return bool(gathers) and len(set(members.values())) > 1


def _repeated(load: Load, times: int) -> Load:
    return Load(times * load.apart_s, times * load.crossing_s)
