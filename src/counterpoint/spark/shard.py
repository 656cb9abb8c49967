"""The samples of a rank's own partition, and those of all ranks where a plan needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.training.distributed_world import DistributedWorld, open_world


class SampleShard:
    """What Spark has given this rank: the samples of one partition.

    Args:
        fields: one tensor for each column, the samples along the first dim; none where there is no row.
        environment: which rank this is; what its launcher has said when left out.
        deadline_s: the longest that a rank waits for another.

    Example:
        >>> shard = SampleShard((torch.ones(3, 2), torch.zeros(3)))
        >>> len(shard), len(shard.local_samples), len(shard.all_samples())
        (3, 3, 3)
    """

    def __init__(
        self, fields: tuple[Tensor, ...], environment: RankEnvironment | None = None, timeout_s: float = 60.0
    ) -> None:
        self.fields, self.timeout_s = fields, timeout_s
        self.environment = environment if environment is not None else detect()

    def __len__(self) -> int:
        """Return how many samples the partition has."""
        return len(self.fields[0]) if self.fields else 0

    @property
    def local_samples(self) -> TensorDataset:
        """The samples of this partition, for ``parallelize(..., batches="per_rank")``, under which they stay here.

        They may be none.
        """
        return TensorDataset(*self.fields)

    def all_samples(self) -> TensorDataset:
        """Return the samples of all ranks, in the order of their partitions, for ``Trainer``; all ranks call it.

        Every rank then has all of them, and a trainer's global batches are those of one rank with all the data.

        Raises:
            DataError: partitions have samples of different shapes or dtypes, or there is no sample at all.
        """
        if self.environment is None or self.environment.world_size == 1:
            return TensorDataset(*self.fields)
        world = open_world(self.environment, self.environment.world_size, self.timeout_s)
        assert isinstance(world, DistributedWorld)
        return TensorDataset(*world.run(self._all_gather)[0])

    def _all_gather(self, fabric: Fabric) -> tuple[Tensor, ...]:
        everyone = tuple(range(fabric.num_ranks))
        mine: list[Json] = [
            [len(field), str(field.dtype).removeprefix("torch."), list(field.shape[1:])] for field in self.fields
        ]
        told: list[Any] = fabric.gather_values("fields of samples", mine if len(self) else [], everyone)
        kinds = check_same_fields([[field[1:] for field in fields] for fields in told])
        counts = [fields[0][0] if fields else 0 for fields in told]
        return tuple(
            all_gather_field(fabric, counts, getattr(torch, dtype), shape, self.fields[at] if len(self) else None)
            for at, (dtype, shape) in enumerate(kinds)
        )


def all_gather_field(
    fabric: Fabric, counts: list[int], dtype: torch.dtype, shape: list[int], local: Tensor | None
) -> Tensor:
    """Return one field of all ranks' samples.

    Args:
        fabric: the way to the others.
        counts: how many samples each rank has.
        dtype: of the field.
        shape: of the field of one sample.
        own: this rank's; None where it has no sample.
    """
    size = torch.empty(shape, device="meta").numel() * dtype.itemsize
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    whole = torch.empty(starts[-1] * size, dtype=torch.uint8)
    if local is not None:
        low, high = (starts[fabric.rank + more] * size for more in (0, 1))
        whole[low:high] = local.contiguous().reshape(-1).view(torch.uint8)
    fabric.all_gather("samples", whole, [start * size for start in starts], tuple(range(len(counts)))).wait()
    return whole.view(dtype).view(starts[-1], *shape)


def check_same_fields(fields_by_rank: list[Any]) -> list[Any]:
    """Return dtype and shape of each field, which are the same in all partitions that have samples.

    Args:
        told: of every rank; empty where it has none.

    Raises:
        DataError: they are not, or no partition has any.

    Example:
        >>> check_same_fields([[], [["float32", [64]], ["int64", []]]])
        [['float32', [64]], ['int64', []]]
    """
    filled = {rank: fields for rank, fields in enumerate(fields_by_rank) if fields}
    if not filled:
        raise DataError(
            f"there is no sample in {len(fields_by_rank)} partitions; check the path or the filter of the data"
        )
    first = next(iter(filled))
    for rank, fields in filled.items():
        if fields != filled[first]:
            raise DataError(
                f"samples are {format_fields(filled[first])} in partition {first}, but {format_fields(fields)} in partition "
                f"{rank}; all samples have the same fields, shapes and dtypes"
            )
    return list(filled[first])


def format_fields(fields: list[Any]) -> str:
    """Return what is said of fields."""
    return ", ".join(f"{dtype}{shape}" for dtype, shape in fields)


def read_shard(path: Path) -> SampleShard:
    """Return the samples that a task has laid down, which are taken from there."""
    found = SampleShard(tuple(value.clone() for _, value in sorted(load_file(path).items())))
    path.unlink()
    return found
