"""Worker-side view of a key: which shards hold its parts, and how tensors are split and assembled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from counterpoint.errors import DataError, PlanError, ProgramError, ProtocolError
from counterpoint.fabric.compression import POINT_TO_POINT_CODECS, compress, decompress
from counterpoint.program.compression import find_codec
from counterpoint.ps.consistency import Bsp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import DTYPES, KeySpec
from counterpoint.ps.placement import KeyRange, shard_of_row
from counterpoint.ps.row_pooling import RowPooling, validate_pooling
from counterpoint.ps.storage.row_storage import gather_rows, scatter_rows
from counterpoint.ps.update_rules import Assign, Initializer, UpdateRule

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """The part of a push that goes to one shard."""

    shard: int
    values: Tensor
    rows: Tensor | None = None
    pooling: RowPooling | None = None


@dataclass(frozen=True, slots=True)
class ShardRead:
    """The part of a pull for one shard: its range, rows with their positions in the request, or pooled rows."""

    shard: int
    rows: Tensor | None = None
    pooling: RowPooling | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class DenseKey:
    """A tensor whose ranges are held by shards.

    Args:
        name: of the key.
        shape: of the tensor.
        dtype: of its elements.
        ranges: which shard holds which range.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[KeyRange, ...]

    @property
    def shards(self) -> tuple[int, ...]:
        """Shards that hold a part."""
        return tuple(key_range.shard for key_range in self.ranges)

    def specs(self, rule: UpdateRule) -> Iterator[KeySpec]:
        """Yield the definition for each shard."""
        for key_range in self.ranges:
            yield KeySpec(self.name, DTYPE_NAMES[self.dtype], key_range.low, key_range.high, 0, rule)

    def split_push(
        self, values: Tensor, rows: Tensor | None, codec: str = "", pooling: RowPooling | None = None
    ) -> list[ShardWrite]:
        """Return the part for each shard: views if the values are contiguous, or encoded bytes."""
        if rows is not None or pooling is not None:
            raise PlanError(f"{self.name} is a dense key; push it without rows, or create it with init_rows")
        validate_tensor(self.name, values, self.shape, self.dtype)
        if codec:
            validate_codec(codec)
        if codec and not values.is_contiguous():
            raise PlanError(
                f"{self.name} pushed with {codec} must be contiguous, since the residual replaces its values"
            )
        flat_values = values.detach().reshape(-1)
        parts = [ShardWrite(key_range.shard, flat_values[key_range.low : key_range.high]) for key_range in self.ranges]
        return [ShardWrite(part.shard, encode_with_residual(codec, part.values)) for part in parts] if codec else parts

    def split_pull(self, rows: Tensor | None, pooling: RowPooling | None = None) -> list[ShardRead]:
        """Return what to request from each shard."""
        if rows is not None or pooling is not None:
            raise PlanError(f"{self.name} is a dense key; pull it without rows, or create it with init_rows")
        return [ShardRead(key_range.shard) for key_range in self.ranges]

    def assemble(self, parts: Sequence[Tensor], reads: Sequence[ShardRead], out: Tensor | None) -> Tensor:
        """Return the tensor, in ``out`` if given; a single part is returned without a copy."""
        del reads
        if out is None and len(parts) == 1:
            return parts[0].view(self.shape)
        values = torch.empty(self.shape, dtype=self.dtype) if out is None else out
        flat = values.detach().view(-1)
        for key_range, part in zip(self.ranges, parts, strict=True):
            flat[key_range.low : key_range.high].copy_(part)
        return values

    def validate_out(self, out: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Raise PlanError unless the result fits ``out``."""
        del rows, pooling
        validate_tensor(self.name, out, self.shape, self.dtype)
        if not out.is_contiguous():
            raise PlanError(f"{self.name} cannot be pulled into a non-contiguous tensor")


@dataclass(frozen=True)
class TableKey:
    """A table whose rows are distributed over all shards.

    Args:
        name: of the key.
        num_rows: number of rows.
        width: elements per row.
        dtype: of the elements.
        num_shards: of the job.
    """

    name: str
    num_rows: int
    width: int
    dtype: torch.dtype
    num_shards: int

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """Shards that hold a part."""
        return tuple(range(self.num_shards))

    def specs(self, rule: UpdateRule, initializer: Initializer) -> Iterator[KeySpec]:
        """Yield the definition for each shard."""
        for _ in self.shards:
            yield KeySpec(self.name, DTYPE_NAMES[self.dtype], 0, self.num_rows, self.width, rule, initializer)

    def split_push(
        self, values: Tensor, rows: Tensor | None, codec: str = "", pooling: RowPooling | None = None
    ) -> list[ShardWrite]:
        """Return the part for each shard."""
        if codec:
            raise PlanError(f"rows of {self.name} with codec {codec}; tables are pushed uncompressed, so omit codec=")
        rows = self._validate_rows(rows)
        self._validate_pooling(pooling, rows, values)
        validate_tensor(self.name, values, (len(rows if pooling is None else values), self.width), self.dtype)
        values = values.detach()
        if self.num_shards == 1:
            return [ShardWrite(0, values, rows, pooling)]
        if pooling is not None:
            return [
                ShardWrite(shard, values, rows[positions], select_pools(pooling, positions))
                for shard, positions in self._rows_by_shard(rows)
            ]
        return [
            ShardWrite(shard, gather_rows(values, positions), rows[positions])
            for shard, positions in self._rows_by_shard(rows)
        ]

    def split_pull(self, rows: Tensor | None, pooling: RowPooling | None = None) -> list[ShardRead]:
        """Return the request to each shard; a shard pools only its own rows."""
        rows = self._validate_rows(rows)
        self._validate_pooling(pooling, rows)
        if self.num_shards == 1:
            return [ShardRead(0, rows, pooling)]
        return [
            ShardRead(
                shard,
                rows[positions],
                None if pooling is None else restrict_pools(pooling, positions, len(rows)),
                positions,
            )
            for shard, positions in self._rows_by_shard(rows)
        ]

    def _validate_pooling(self, pooling: RowPooling | None, rows: Tensor, values: Tensor | None = None) -> None:
        try:
            if pooling is not None:
                validate_pooling(pooling, self.name, rows, values)
        except ProtocolError as error:
            raise PlanError(str(error)) from error

    def assemble(self, parts: Sequence[Tensor], reads: Sequence[ShardRead], out: Tensor | None) -> Tensor:
        """Return the rows in request order, or the pooled sums, in ``out`` if given.

        A single part is returned without a copy.
        """
        if self.num_shards == 1:
            return copy_into(parts[0], out)
        positions_by_shard = [read.positions for read in reads if read.positions is not None and read.pooling is None]
        if not positions_by_shard:
            return copy_into(torch.stack(list(parts)).sum(0), out)
        values = torch.empty((sum(map(len, positions_by_shard)), self.width), dtype=self.dtype) if out is None else out
        flat_values = values.detach()
        for positions, part in zip(positions_by_shard, parts, strict=True):
            if flat_values.is_contiguous() and part.is_contiguous():
                scatter_rows(flat_values, positions.numpy(), part)
            else:
                flat_values[positions] = part
        return values

    def validate_out(self, out: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Raise PlanError unless the result fits ``out``."""
        count = len(self._validate_rows(rows)) if pooling is None else len(pooling.offsets)
        validate_tensor(self.name, out, (count, self.width), self.dtype)

    def _rows_by_shard(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield for each shard the positions of its rows, ascending."""
        owner = shard_of_row(rows.numpy(), self.num_shards).astype(np.min_scalar_type(self.num_shards))
        counts = np.bincount(owner, minlength=self.num_shards)
        order = torch.from_numpy(owner.argsort(kind="stable"))  # numbers that are this short are not compared
        yield from enumerate(torch.split(order, counts.tolist()))

    def _validate_rows(self, rows: Tensor | None) -> Tensor:
        """Return the row ids; raise PlanError unless they exist and ascend strictly."""
        if rows is None:
            raise PlanError(f"{self.name} is a table of {self.num_rows} rows; give the row ids")
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise PlanError(f"rows of {self.name} as {rows.dtype} with {rows.dim()} dims; give int64 with one dim")
        row_ids = rows.numpy()
        if len(rows) > 1 and not (row_ids[1:] > row_ids[:-1]).all():
            raise PlanError(f"rows of {self.name} that do not ascend strictly; give rows.unique(), or coalesce()")
        if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < self.num_rows):
            raise PlanError(f"rows {int(rows[0])} to {int(rows[-1])} of {self.name}, which has {self.num_rows}")
        return rows


PartitionedKey: TypeAlias = DenseKey | TableKey


def copy_into(values: Tensor, out: Tensor | None) -> Tensor:
    """Return the values, copied into ``out`` if given."""
    if out is None:
        return values
    out.detach().copy_(values)
    return out


def select_pools(pooling: RowPooling, positions: Tensor) -> RowPooling:
    """Return the pooled outputs at these positions."""
    ends = torch.cat([pooling.offsets[1:], pooling.offsets.new_tensor([len(pooling.indices)])])
    lengths = (ends - pooling.offsets)[positions]
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    steps = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return RowPooling(pooling.indices[pooling.offsets[positions].repeat_interleave(lengths) + steps], starts)


def restrict_pools(pooling: RowPooling, positions: Tensor, num_rows: int) -> RowPooling:
    """Return the pooling restricted to the rows at these positions, with indices renumbered."""
    new_index = torch.full((num_rows,), -1, dtype=torch.int32)
    new_index[positions] = torch.arange(len(positions), dtype=torch.int32)
    indices = new_index[pooling.indices]
    is_kept = indices >= 0
    num_kept = torch.cat([torch.zeros(1, dtype=torch.int32), is_kept.cumsum(0, dtype=torch.int32)])
    return RowPooling(indices[is_kept], num_kept[pooling.offsets])


def validate_value(name: str, value: Tensor) -> None:
    """Raise PlanError unless servers can store the value, DataError unless it is finite."""
    if value.dtype not in DTYPE_NAMES or value.device.type != "cpu":
        raise PlanError(
            f"{name} of {value.dtype} on {value.device}; one of {', '.join(DTYPE_NAMES.values())} can be kept"
        )
    if not bool(value.isfinite().all()):
        raise DataError(f"{name} is initialized with values that are not finite")


def encode_with_residual(codec_text: str, values: Tensor) -> Tensor:
    """Return the encoded values; replace the values by the residual."""
    codec = find_codec(codec_text)
    encoded_bytes = compress(codec, values)
    values -= decompress(codec, encoded_bytes, values)
    return encoded_bytes


def validate_rule(job: JobConfig, key: str, rule: UpdateRule) -> None:
    """Raise PlanError unless the job has servers, and the key an optimizer if the consistency needs one."""
    check_has_servers(job, key)
    if isinstance(rule, Assign) and not isinstance(job.consistency, Bsp):
        mode = type(job.consistency).__name__.lower()
        raise PlanError(
            f"{key} without an optimizer on the server, which {mode} needs; give it an update rule such as Sgd(0.1)"
        )


def check_has_servers(job: JobConfig, what: str) -> None:
    """Raise PlanError if the job has no servers to hold this."""
    if not job.num_servers:
        raise PlanError(
            f"job {job.name} has no servers to hold {what}; train it with ElasticTrainer.train, or give it servers"
        )


def validate_codec(codec_text: str) -> None:
    """Raise PlanError unless the codec can encode a single push."""
    try:
        name = find_codec(codec_text).name
    except ProgramError as error:
        raise PlanError(str(error)) from error
    if name not in POINT_TO_POINT_CODECS:
        raise PlanError(
            f"{codec_text} compresses an all-reduce, not a single push; give one of {', '.join(POINT_TO_POINT_CODECS)}"
        )


def validate_tensor(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise PlanError unless the tensor has this shape and dtype and is on the CPU."""
    if tuple(values.shape) != shape or values.dtype != dtype or values.device.type != "cpu":
        raise PlanError(
            f"{values.dtype} {tuple(values.shape)} on {values.device} does not match {name}, which is {dtype} {shape} "
            "on the cpu"
        )
