"""Placement of a group's members on hosts: which parts each host reduces, and which member owns them between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from counterpoint.fabric.collectives.algorithms import group_by_host
from counterpoint.fabric.fabric import Group


@dataclass(frozen=True, slots=True)
class HostLayout:
    """A group over several hosts, from the view of one of its members.

    Args:
        group: the members.
        hosts: the members of each host, hosts in the order of their first member.
        host_index: of the own host in ``hosts``.
        local_index: of this member on its host.
    """

    group: Group
    hosts: tuple[Group, ...]
    host_index: int
    local_index: int

    @property
    def local_members(self) -> Group:
        """The members of the own host."""
        return self.hosts[self.host_index]

    @property
    def num_parts(self) -> int:
        """Number of parts of a value between hosts: the number of members of the smallest host."""
        return min(map(len, self.hosts))

    @property
    def is_uniform(self) -> bool:
        """Whether all hosts have the same number of members."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def part_owners(self) -> Group:
        """The members that own the same part as this one, one per host; empty if it owns none."""
        return tuple(host[self.local_index] for host in self.hosts) if self.local_index < self.num_parts else ()

    def part_bounds(self, length: int) -> list[int]:
        """Return the offsets of the local members' parts, and the end; members beyond ``num_parts`` have empty parts.

        Example:
            >>> HostLayout((0, 1, 2, 3, 4), ((0, 1, 2), (3, 4)), host_index=0, local_index=0).part_bounds(7)
            [0, 3, 7, 7]
        """
        edges = [length * part // self.num_parts for part in range(self.num_parts + 1)]
        return edges + [length] * (len(self.local_members) - self.num_parts)

    def host_major(self, bounds: Sequence[int]) -> HostMajorLayout:
        """Return an order of the members' ranges in which those of equal local index are adjacent (uniform hosts)."""
        order = [self.group.index(host[place]) for place in range(self.num_parts) for host in self.hosts]
        sizes = [bounds[index + 1] - bounds[index] for index in order]
        return HostMajorLayout(
            tuple((bounds[i], bounds[i + 1]) for i in order), (0, *accumulate(sizes)), len(self.hosts)
        )


@dataclass(frozen=True, slots=True)
class HostMajorLayout:
    """The ranges of a flat tensor, reordered: one slab per local index, and in it one range per host.

    ::

        two hosts of two, ranks 0 1 | 2 3:   r0 r1 r2 r3   ->   slab 0: r0 r2   slab 1: r1 r3

    Args:
        ranges: start and end of each range in the tensor, in the new order.
        offsets: where each starts in the new order, and the end.
        num_hosts: ranges per slab.
    """

    ranges: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    num_hosts: int

    @property
    def bounds(self) -> list[int]:
        """Where each slab starts, and the end."""
        return list(self.offsets[:: self.num_hosts])

    def slab_ranges(self, local_index: int) -> list[tuple[int, int]]:
        """Return the ranges of one slab in the new order, by host."""
        first = local_index * self.num_hosts
        return list(pairwise(self.offsets[first : first + self.num_hosts + 1]))


def host_layout(group: Group, hosts: Sequence[int], rank: int) -> HostLayout:
    """Return the placement of the members from the view of one rank.

    Args:
        group: the members.
        hosts: the host of each rank of the world.
        rank: the one.

    Example:
        >>> host_layout((0, 1, 2, 4), (7, 3, 7, 3, 3), 2)
        HostLayout(group=(0, 1, 2, 4), hosts=((0, 2), (1, 4)), host_index=0, local_index=1)
    """
    members_by_host = tuple(
        tuple(group[index] for index in indices) for indices in group_by_host([hosts[member] for member in group])
    )
    host_index = next(number for number, indices in enumerate(members_by_host) if rank in indices)
    return HostLayout(group, members_by_host, host_index, members_by_host[host_index].index(rank))
