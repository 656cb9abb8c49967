"""The samples of a rank's partition, and of all ranks for plans that need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.tensor_bytes import as_bytes
from counterpoint.training.distributed_world import DistributedWorld, open_world
from counterpoint.value_codec import decode_value


class SampleShard:
    """Samples of the partition that Spark gave to this rank.

    Args:
        fields: one tensor per column, the samples along the first dim; none if there is no row.
        environment: which rank this is; detected from the launcher's variables by default.
        timeout_s: the longest that a rank waits for another.

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
        """Return the number of samples in the partition."""
        return len(self.fields[0]) if self.fields else 0

    @property
    def local_samples(self) -> TensorDataset:
        """The samples of this partition, possibly none, for ``parallelize(..., batches="per_rank")``."""
        return TensorDataset(*self.fields)

    def all_samples(self) -> TensorDataset:
        """Return the samples of all ranks, in partition order, for ``Trainer``; all ranks must call it.

        Every rank then stores all samples, and a trainer's global batches are those of one rank with all the data.

        Raises:
            DataError: partitions have samples of different shapes or dtypes, or there is no sample.
        """
        if self.environment is None or self.environment.world_size == 1:
            return TensorDataset(*self.fields)
        world = open_world(self.environment, self.environment.world_size, self.timeout_s)
        assert isinstance(world, DistributedWorld)
        return TensorDataset(*world.run(self._all_gather)[0])

    def _all_gather(self, fabric: Fabric) -> tuple[Tensor, ...]:
        all_ranks = tuple(range(fabric.num_ranks))
        local_fields: list[Json] = [
            [len(field), str(field.dtype).removeprefix("torch."), list(field.shape[1:])] for field in self.fields
        ]
        fields_by_rank: list[Any] = fabric.gather_values(
            "fields of samples", local_fields if len(self) else [], all_ranks
        )
        field_types = check_same_fields([[field[1:] for field in fields] for fields in fields_by_rank])
        counts = [fields[0][0] if fields else 0 for fields in fields_by_rank]
        return tuple(
            all_gather_field(fabric, counts, getattr(torch, dtype), shape, self.fields[index] if len(self) else None)
            for index, (dtype, shape) in enumerate(field_types)
        )


def all_gather_field(
    fabric: Fabric, counts: list[int], dtype: torch.dtype, shape: list[int], local: Tensor | None
) -> Tensor:
    """Return one field of all ranks' samples.

    Args:
        fabric: of this rank.
        counts: number of samples of each rank.
        dtype: of the field.
        shape: of the field of one sample.
        local: this rank's; None without samples.
    """
    size = torch.empty(shape, device="meta").numel() * dtype.itemsize
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    whole = torch.empty(starts[-1] * size, dtype=torch.uint8)
    if local is not None:
        low, high = (starts[fabric.rank + more] * size for more in (0, 1))
        whole[low:high] = as_bytes(local)
    fabric.all_gather("samples", whole, [start * size for start in starts], tuple(range(len(counts)))).wait()
    return whole.view(dtype).view(starts[-1], *shape)


def check_same_fields(fields_by_rank: list[Any]) -> list[Any]:
    """Return dtype and shape of each field, which must be equal in all partitions that have samples.

    Args:
        fields_by_rank: of every rank; empty for one without samples.

    Raises:
        DataError: they differ, or no partition has a sample.

    Example:
        >>> check_same_fields([[], [["float32", [64]], ["int64", []]]])
        [['float32', [64]], ['int64', []]]
    """
    nonempty = {rank: fields for rank, fields in enumerate(fields_by_rank) if fields}
    if not nonempty:
        raise DataError(
            f"there is no sample in {len(fields_by_rank)} partitions; check the path and the filters of the data"
        )
    first_rank = next(iter(nonempty))
    for rank, fields in nonempty.items():
        if fields != nonempty[first_rank]:
            raise DataError(
                f"samples are {format_fields(nonempty[first_rank])} in partition {first_rank}, "
                f"but {format_fields(fields)} in partition {rank}; all samples must have the same fields, shapes and "
                "dtypes"
            )
    return list(nonempty[first_rank])


def format_fields(fields: list[Any]) -> str:
    """Return the fields as text."""
    return ", ".join(f"{dtype}{shape}" for dtype, shape in fields)


def read_shard(path: Path) -> SampleShard:
    """Return the samples that a task has written to a file, and delete the file."""
    shard = SampleShard(tuple(map(torch.as_tensor, decode_value(path.read_bytes()))))
    path.unlink()
    return shard
