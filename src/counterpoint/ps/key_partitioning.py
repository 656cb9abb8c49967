"""What a worker knows of a key: which shards keep parts of it, how a tensor is divided over them, and put together."""

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
from counterpoint.ps.job_config import Bsp, JobConfig
from counterpoint.ps.messages import DTYPES, KeySpec
from counterpoint.ps.placement import KeyRange, shard_of_row
from counterpoint.ps.row_pooling import RowPooling, validate_pooling
from counterpoint.ps.storage.row_storage import gather_rows, scatter_rows
from counterpoint.ps.update_rules import Assign, Initializer, UpdateRule

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """What goes to one shard, or comes from it."""

    shard: int
    values: Tensor
    rows: Tensor | None = None
    pooling: RowPooling | None = None


@dataclass(frozen=True, slots=True)
class ShardRead:
    """What is asked of one shard: a range, rows with their places among all that were dealt out, or sums of rows."""

    shard: int
    rows: Tensor | None = None
    pooling: RowPooling | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class DenseKey:
    """A tensor, of which shards keep ranges.

    Args:
        name: of the key.
        shape: of the tensor.
        dtype: of its numbers.
        places: which shard keeps which range.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[KeyRange, ...]

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that keep a part."""
        return tuple(place.shard for place in self.ranges)

    def specs(self, rule: UpdateRule) -> Iterator[KeySpec]:
        """Yield what each shard is to keep."""
        for place in self.ranges:
            yield KeySpec(self.name, DTYPE_NAMES[self.dtype], place.low, place.high, 0, rule)

    def split_push(
        self, values: Tensor, rows: Tensor | None, codec: str = "", pooling: RowPooling | None = None
    ) -> list[ShardWrite]:
        """Return what to tell each shard; views, where the values are contiguous; bytes of a code."""
        if rows is not None or pooling is not None:
            raise PlanError(f"{self.name} has no rows; push it as a whole, or make it with init_rows")
        validate_tensor(self.name, values, self.shape, self.dtype)
        if codec:
            validate_codec(codec)
        if codec and not values.is_contiguous():
            raise PlanError(f"what is pushed to {self.name} in {codec} becomes what was not sent; give it contiguous")
        flat = values.detach().reshape(-1)
        parts = [ShardWrite(place.shard, flat[place.low : place.high]) for place in self.ranges]
        return [ShardWrite(part.shard, encode_with_residual(codec, part.values)) for part in parts] if codec else parts

    def split_pull(self, rows: Tensor | None, pooling: RowPooling | None = None) -> list[ShardRead]:
        """Return what to ask of each shard."""
        if rows is not None or pooling is not None:
            raise PlanError(f"{self.name} has no rows; pull it as a whole, or make it with init_rows")
        return [ShardRead(place.shard) for place in self.ranges]

    def assemble(self, parts: Sequence[Tensor], reads: Sequence[ShardRead], out: Tensor | None) -> Tensor:
        """Return the tensor, in ``out`` if given; what was found, if that is all of it."""
        del reads
        if out is None and len(parts) == 1:
            return parts[0].view(self.shape)
        values = torch.empty(self.shape, dtype=self.dtype) if out is None else out
        flat = values.detach().view(-1)
        for place, part in zip(self.ranges, parts, strict=True):
            flat[place.low : place.high].copy_(part)
        return values

    def validate_out(self, out: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """The answer fits there; a PlanError where it does not."""
        del rows, pooling
        validate_tensor(self.name, out, self.shape, self.dtype)
        if not out.is_contiguous():
            raise PlanError(f"{self.name} cannot be pulled into a tensor that is not contiguous; give another one")


@dataclass(frozen=True)
class TableKey:
    """Rows, which are dealt out to all shards.

    Args:
        name: of the key.
        num_rows: how many there may be.
        width: numbers of one.
        dtype: of these.
        num_shards: of the job.
    """

    name: str
    num_rows: int
    width: int
    dtype: torch.dtype
    num_shards: int

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The shards that keep a part."""
        return tuple(range(self.num_shards))

    def specs(self, rule: UpdateRule, initializer: Initializer) -> Iterator[KeySpec]:
        """Yield what each shard is to keep."""
        for _ in self.shards:
            yield KeySpec(self.name, DTYPE_NAMES[self.dtype], 0, self.num_rows, self.width, rule, initializer)

    def split_push(
        self, values: Tensor, rows: Tensor | None, codec: str = "", pooling: RowPooling | None = None
    ) -> list[ShardWrite]:
        """Return what to tell each shard."""
        if codec:
            raise PlanError(f"rows of {self.name} in {codec}; tables are pushed as they are, so leave the code out")
        rows = self._validate_rows(rows)
        self._validate_pooling(pooling, rows, values)
        validate_tensor(self.name, values, (len(rows if pooling is None else values), self.width), self.dtype)
        values = values.detach()
        if self.num_shards == 1:
            return [ShardWrite(0, values, rows, pooling)]
        if pooling is not None:
            return [
                ShardWrite(shard, values, rows[own], select_pools(pooling, own))
                for shard, own in self._rows_by_shard(rows)
            ]
        return [ShardWrite(shard, gather_rows(values, own), rows[own]) for shard, own in self._rows_by_shard(rows)]

    def split_pull(self, rows: Tensor | None, pooling: RowPooling | None = None) -> list[ShardRead]:
        """Return what to ask of each shard; the sums of its own rows."""
        rows = self._validate_rows(rows)
        self._validate_pooling(pooling, rows)
        if self.num_shards == 1:
            return [ShardRead(0, rows, pooling)]
        return [
            ShardRead(shard, rows[own], None if pooling is None else restrict_pools(pooling, own, len(rows)), own)
            for shard, own in self._rows_by_shard(rows)
        ]

    def _validate_pooling(self, pooling: RowPooling | None, rows: Tensor, values: Tensor | None = None) -> None:
        try:
            if pooling is not None:
                validate_pooling(pooling, self.name, rows, values)
        except ProtocolError as error:
            raise PlanError(str(error)) from error

    def assemble(self, parts: Sequence[Tensor], reads: Sequence[ShardRead], out: Tensor | None) -> Tensor:
        """Return the rows in their order, or the sums, in ``out`` if given; what was found, if that is all of it."""
        if self.num_shards == 1:
            return copy_into(parts[0], out)
        dealt = [one.positions for one in reads if one.positions is not None and one.pooling is None]
        if not dealt:
            return copy_into(torch.stack(list(parts)).sum(0), out)
        values = torch.empty((sum(map(len, dealt)), self.width), dtype=self.dtype) if out is None else out
        plain = values.detach()
        for own, part in zip(dealt, parts, strict=True):
            if plain.is_contiguous() and part.is_contiguous():
                scatter_rows(plain, own.numpy(), part)
            else:
                plain[own] = part
        return values

    def validate_out(self, out: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """The answer fits there; a PlanError where it does not."""
        count = len(self._validate_rows(rows)) if pooling is None else len(pooling.offsets)
        validate_tensor(self.name, out, (count, self.width), self.dtype)

    def _rows_by_shard(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield for each shard which of the rows it keeps, ascending."""
        owner = shard_of_row(rows.numpy(), self.num_shards).astype(np.min_scalar_type(self.num_shards))
        counts = np.bincount(owner, minlength=self.num_shards)
        order = torch.from_numpy(owner.argsort(kind="stable"))  # numbers that are this short are not compared
        yield from enumerate(torch.split(order, counts.tolist()))

    def _validate_rows(self, rows: Tensor | None) -> Tensor:
        """Return the rows; a PlanError where they are not rows of this table, in order and each once."""
        if rows is None:
            raise PlanError(f"{self.name} is a table of {self.num_rows} rows; name those that are meant")
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise PlanError(f"rows of {self.name} as {rows.dtype} with {rows.dim()} dims; give int64 with one dim")
        numbers = rows.numpy()
        if len(rows) > 1 and not (numbers[1:] > numbers[:-1]).all():
            raise PlanError(f"rows of {self.name} that do not ascend, each once; give rows.unique(), or coalesce()")
        if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < self.num_rows):
            raise PlanError(f"rows {int(rows[0])} to {int(rows[-1])} of {self.name}, which has {self.num_rows}")
        return rows


PartitionedKey: TypeAlias = DenseKey | TableKey


def copy_into(values: Tensor, out: Tensor | None) -> Tensor:
    """Return the values, in ``out`` if given."""
    if out is None:
        return values
    out.detach().copy_(values)
    return out


def select_pools(pooling: RowPooling, positions: Tensor) -> RowPooling:
    """Return those of the sums that have these places."""
    ends = torch.cat([pooling.offsets[1:], pooling.offsets.new_tensor([len(pooling.indices)])])
    lengths = (ends - pooling.offsets)[positions]
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    steps = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return RowPooling(pooling.indices[pooling.offsets[positions].repeat_interleave(lengths) + steps], starts)


def restrict_pools(pooling: RowPooling, positions: Tensor, num_rows: int) -> RowPooling:
    """Return the sums of those rows alone that have these places, by their new places."""
    renamed = torch.full((num_rows,), -1, dtype=torch.int32)
    renamed[positions] = torch.arange(len(positions), dtype=torch.int32)
    members = renamed[pooling.indices]
    is_left = members >= 0
    num_left = torch.cat([torch.zeros(1, dtype=torch.int32), is_left.cumsum(0, dtype=torch.int32)])
    return RowPooling(members[is_left], num_left[pooling.offsets])


def validate_value(name: str, value: Tensor) -> None:
    """A key can begin as this value.

    Raises:
        PlanError: servers keep no such numbers.
        DataError: they are not finite.
    """
    if value.dtype not in DTYPE_NAMES or value.device.type != "cpu":
        raise PlanError(
            f"{name} of {value.dtype} on {value.device}; one of {', '.join(DTYPE_NAMES.values())} can be kept"
        )
    if not bool(value.isfinite().all()):
        raise DataError(f"{name} begins with numbers that are not finite; give others")


def encode_with_residual(codec_text: str, values: Tensor) -> Tensor:
    """Return a range in a code; the values become what it leaves out."""
    code = find_codec(codec_text)
    found = compress(code, values)
    values -= decompress(code, found, values)
    return found


def validate_rule(job: JobConfig, key: str, rule: UpdateRule) -> None:
    """The servers of a job can keep a key that has this rule.

    Raises:
        PlanError: there are none, or they would need an optimizer.
    """
    check_has_servers(job, key)
    if isinstance(rule, Assign) and not isinstance(job.consistency, Bsp):
        mode = type(job.consistency).__name__.lower()
        raise PlanError(f"{key} without an optimizer on the server, which {mode} needs; give it a rule, as Sgd(0.1)")


def check_has_servers(job: JobConfig, what: str) -> None:
    """The job has servers, which keep this.

    Raises:
        PlanError: it has none.
    """
    if not job.num_servers:
        raise PlanError(
            f"job {job.name} has no servers, so that nobody keeps {what}; its workers train by Elastic.train, or give "
            "it servers"
        )


def validate_codec(codec_text: str) -> None:
    """A push can be written in this code.

    Raises:
        PlanError: it cannot.
    """
    try:
        name = find_codec(codec_text).name
    except ProgramError as error:
        raise PlanError(str(error)) from error
    if name not in POINT_TO_POINT_CODECS:
        raise PlanError(
            f"{codec_text} sums gradients in a way of its own, but a server counts pushes one by one; give one of "
            f"{', '.join(POINT_TO_POINT_CODECS)}"
        )


def validate_tensor(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The tensor has this shape and dtype and is on the CPU; a PlanError where not."""
    if tuple(values.shape) != shape or values.dtype != dtype or values.device.type != "cpu":
        raise PlanError(
            f"{values.dtype} {tuple(values.shape)} on {values.device} does not fit {name}, which is {dtype} {shape} "
            "on the cpu; give it so"
        )
