"""Placement of a group's members on hosts: which parts each host reduces, and which member owns them between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

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
    def rank(self) -> int:
        """This member."""
        return self.local_members[self.local_index]

    @property
    def part(self) -> int:
        """The part that this member owns; for members beyond the smallest host one that others own."""
        return self.local_index % self.num_parts

    @property
    def neighbors(self) -> Group:
        """The members with the same :attr:`part`, host by host: the owner first, who sends the host's values to others.

        Example:
            >>> HostLayout((0, 1, 2, 3, 4), ((0, 1, 2), (3, 4)), host_index=1, local_index=0).neighbors
            (0, 2, 3)
        """
        return tuple(member for host in self.hosts for member in host[self.part :: self.num_parts])

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

    def slab_members(self, place: int) -> Group:
        """Return those whose ranges the local member of this index exchanges with other hosts, and itself."""
        own = (self.local_members[place],)
        if place >= self.num_parts:
            return own
        parts = [host[place :: self.num_parts] for host in self.hosts]
        return tuple(chain(*parts[: self.host_index], own, *parts[self.host_index + 1 :]))

    def slabs(self, bounds: Sequence[int]) -> SlabLayout:
        """Return an order of the members' ranges in which those of each of :meth:`slab_members` are adjacent."""
        slabs = list(map(self.slab_members, range(len(self.local_members))))
        members = tuple(chain(*slabs))
        ranges = tuple((bounds[index], bounds[index + 1]) for index in map(self.group.index, members))
        offsets = (0, *accumulate(stop - start for start, stop in ranges))
        edges = (0, *accumulate(map(len, slabs)))
        return SlabLayout(members, ranges, offsets, tuple(offsets[edge] for edge in edges))


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The ranges of a flat tensor, reordered on one host: one slab for each of its members.

    A slab has the member's own range, and those of the members of other hosts that it exchanges values with, on behalf
    of its host. Every range is in one slab, but those of the other local members are in theirs only::

        hosts            slabs of the first host         slabs of the second host
        0 1   | 2 3      r0 r2     r1 r3                 r0 r2        r1 r3
        0 1 2 | 3 4      r0 r3     r1 r4     r2          r0 r2 r3     r1 r4

    Args:
        members: whose range stands at each place.
        ranges: its start and end in the tensor.
        offsets: where it starts in the new order, and the end.
        bounds: where each slab starts in the new order, and the end.
    """

    members: Group
    ranges: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    def place_of(self, member: int) -> tuple[int, int]:
        """Return the start and end of a member's range in the new order."""
        place = self.members.index(member)
        return self.offsets[place], self.offsets[place + 1]


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
