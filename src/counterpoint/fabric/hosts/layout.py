"""Where the members of a group are: what each host adds up for itself, and who answers for it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from counterpoint.fabric.collectives.algorithms import group_by_host
from counterpoint.fabric.fabric import Group


@dataclass(frozen=True, slots=True)
class HostLayout:
    """A group over several hosts, seen from one of its members.

    Args:
        group: the members.
        hosts: those of each host, hosts in the order of their first member.
        home: the own host, by its number in ``hosts``.
        place: the own place among the members of the own host.
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
        """Into how many parts a value is cut for its way between hosts: as many as the smallest host has members."""
        return min(map(len, self.hosts))

    @property
    def is_uniform(self) -> bool:
        """Whether all hosts have equally many members."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def part_owners(self) -> Group:
        """The members that hold the own part, one of each host in the order of hosts; empty where the own has none."""
        return tuple(host[self.local_index] for host in self.hosts) if self.local_index < self.num_parts else ()

    def part_bounds(self, length: int) -> list[int]:
        """Return where the part of each member here begins, and the end; members beyond the parts have none.

        Example:
            >>> Layout((0, 1, 2, 3, 4), ((0, 1, 2), (3, 4)), home=0, place=0).part_edges(7)
            [0, 3, 7, 7]
        """
        edges = [length * part // self.num_parts for part in range(self.num_parts + 1)]
        return edges + [length] * (len(self.local_members) - self.num_parts)

    def host_major(self, bounds: Sequence[int]) -> HostMajorLayout:
        """Return an order of the members' ranges in which those of equal places lie together; hosts are even."""
        order = [self.group.index(host[place]) for place in range(self.num_parts) for host in self.hosts]
        sizes = [bounds[index + 1] - bounds[index] for index in order]
        return HostMajorLayout(
            tuple((bounds[i], bounds[i + 1]) for i in order), (0, *accumulate(sizes)), len(self.hosts)
        )


@dataclass(frozen=True, slots=True)
class HostMajorLayout:
    """The ranges of a flat tensor in another order: one slab per place within a host, one range per host in it.

    Args:
        ranges: where each range is in the tensor.
        edges: where each begins in the new order, and the end.
        num_hosts: ranges per slab.
    """

    ranges: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    num_hosts: int

    @property
    def bounds(self) -> list[int]:
        """Where each slab begins, and the end."""
        return list(self.offsets[:: self.num_hosts])

    def slab_ranges(self, local_index: int) -> list[tuple[int, int]]:
        """Return where in the new order the ranges of one slab are, by host."""
        first = local_index * self.num_hosts
        return list(pairwise(self.offsets[first : first + self.num_hosts + 1]))


def host_layout(group: Group, hosts: Sequence[int], rank: int) -> HostLayout:
    """Return where the members are, seen from one.

    Args:
        group: the members.
        hosts: the host of each rank of the world.
        rank: the one.

    Example:
        >>> layout_of((0, 1, 2, 4), (7, 3, 7, 3, 3), 2)
        Layout(group=(0, 1, 2, 4), hosts=((0, 2), (1, 4)), home=0, place=1)
    """
    members = tuple(
        tuple(group[index] for index in here) for here in group_by_host([hosts[member] for member in group])
    )
    home = next(number for number, here in enumerate(members) if rank in here)
    return HostLayout(group, members, home, members[home].index(rank))
