"""The ranks of this process once they are built, and how to read what all ranks have together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from counterpoint.fabric.fabric import Fabric
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.runtime.state_dict import ShardMap
from counterpoint.training.distributed_world import FabricWorld, has_remote_ranks

T = TypeVar("T")
GatherFn: TypeAlias = Callable[[ShardMap, Collection[RankRuntime], Fabric | None], T]
"""From who owns which shard, the ranks of this process, and the fabric if other processes have ranks, too."""


@dataclass(frozen=True, slots=True)
class BuiltRanks:
    """The ranks of this process.

    Args:
        plan: that they execute, for errors.
        world: the fabric of each rank.
        ranks: the ranks.
        shard_map: which rank owns which shard.
        keeps_grads: whether ranks keep the gradients of a step until the next one.
    """

    plan: str
    world: FabricWorld
    ranks: Collection[RankRuntime]
    shard_map: ShardMap
    keeps_grads: bool

    @property
    def is_single_process(self) -> bool:
        """Whether all ranks are in this process."""
        return not has_remote_ranks(self.world)

    def gather(self, gather_fn: GatherFn[T]) -> T:
        """Return what a function puts together of all ranks; a collective call if other processes have some."""
        if self.is_single_process:
            return gather_fn(self.shard_map, self.ranks, None)
        return self.world.run(lambda fabric: gather_fn(self.shard_map, self.ranks, fabric))[0]
