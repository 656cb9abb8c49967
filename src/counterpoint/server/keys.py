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
from counterpoint.fabric.coding import ALONE, decoded, encoded
from counterpoint.program.codes import find_code
from counterpoint.server.choices import Aggregate, Rule, Start
from counterpoint.server.job import Bsp, Job
from counterpoint.server.messages import DTYPES, Spec
from counterpoint.server.placement import Place, shard_of_row
from counterpoint.server.room import gathered, scatter
from counterpoint.server.sums import Sums, require_sums

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """What goes to one shard, or comes from it."""

    shard: int
    values: Tensor
    rows: Tensor | None = None
    sums: Sums | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of one shard: a range, rows with their places among all that were dealt out, or sums of rows."""

    shard: int
    rows: Tensor | None = None
    sums: Sums | None = None
    places: Tensor | None = None


@dataclass(frozen=True)
class Dense:
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
    places: tuple[Place, ...]

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that keep a part."""
        return tuple(place.shard for place in self.places)

    def specs(self, rule: Rule) -> Iterator[Spec]:
        """Yield what each shard is to keep."""
        for place in self.places:
            yield Spec(self.name, NAMES[self.dtype], place.low, place.high, 0, rule)

    def parts(self, values: Tensor, rows: Tensor | None, code: str = "", sums: Sums | None = None) -> list[Part]:
        """Return what to tell each shard; views, where the values are contiguous; bytes of a code."""
        if rows is not None or sums is not None:
            raise PlanError(f"{self.name} has no rows; push it as a whole, or make it with init_rows")
        require_look(self.name, values, self.shape, self.dtype)
        if code:
            require_alone(code)
        if code and not values.is_contiguous():
            raise PlanError(f"what is pushed to {self.name} in {code} becomes what was not sent; give it contiguous")
        flat = values.detach().reshape(-1)
        parts = [Part(place.shard, flat[place.low : place.high]) for place in self.places]
        return [Part(part.shard, written(code, part.values)) for part in parts] if code else parts

    def wanted(self, rows: Tensor | None, sums: Sums | None = None) -> list[Wanted]:
        """Return what to ask of each shard."""
        if rows is not None or sums is not None:
            raise PlanError(f"{self.name} has no rows; pull it as a whole, or make it with init_rows")
        return [Wanted(place.shard) for place in self.places]

    def joined(self, found: Sequence[Tensor], wanted: Sequence[Wanted], out: Tensor | None) -> Tensor:
        """Return the tensor, in ``out`` if given; what was found, if that is all of it."""
        del wanted
        if out is None and len(found) == 1:
            return found[0].view(self.shape)
        values = torch.empty(self.shape, dtype=self.dtype) if out is None else out
        flat = values.detach().view(-1)
        for place, part in zip(self.places, found, strict=True):
            flat[place.low : place.high].copy_(part)
        return values

    def require_out(self, out: Tensor, rows: Tensor | None, sums: Sums | None = None) -> None:
        """The answer fits there; a PlanError where it does not."""
        del rows, sums
        require_look(self.name, out, self.shape, self.dtype)
        if not out.is_contiguous():
            raise PlanError(f"{self.name} cannot be pulled into a tensor that is not contiguous; give another one")


@dataclass(frozen=True)
class Table:
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

    def specs(self, rule: Rule, start: Start) -> Iterator[Spec]:
        """Yield what each shard is to keep."""
        for _ in self.shards:
            yield Spec(self.name, NAMES[self.dtype], 0, self.num_rows, self.width, rule, start)

    def parts(self, values: Tensor, rows: Tensor | None, code: str = "", sums: Sums | None = None) -> list[Part]:
        """Return what to tell each shard."""
        if code:
            raise PlanError(f"rows of {self.name} in {code}; tables are pushed as they are, so leave the code out")
        rows = self._required(rows)
        self._require_sums(sums, rows, values)
        require_look(self.name, values, (len(rows if sums is None else values), self.width), self.dtype)
        values = values.detach()
        if self.num_shards == 1:
            return [Part(0, values, rows, sums)]
        if sums is not None:
            return [Part(shard, values, rows[own], only(sums, own)) for shard, own in self._dealt(rows)]
        return [Part(shard, gathered(values, own), rows[own]) for shard, own in self._dealt(rows)]

    def wanted(self, rows: Tensor | None, sums: Sums | None = None) -> list[Wanted]:
        """Return what to ask of each shard; the sums of its own rows."""
        rows = self._required(rows)
        self._require_sums(sums, rows)
        if self.num_shards == 1:
            return [Wanted(0, rows, sums)]
        return [
            Wanted(shard, rows[own], None if sums is None else among(sums, own, len(rows)), own)
            for shard, own in self._dealt(rows)
        ]

    def _require_sums(self, sums: Sums | None, rows: Tensor, values: Tensor | None = None) -> None:
        try:
            if sums is not None:
                require_sums(sums, self.name, rows, values)
        except ProtocolError as error:
            raise PlanError(str(error)) from error

    def joined(self, found: Sequence[Tensor], wanted: Sequence[Wanted], out: Tensor | None) -> Tensor:
        """Return the rows in their order, or the sums, in ``out`` if given; what was found, if that is all of it."""
        if self.num_shards == 1:
            return put_into(found[0], out)
        dealt = [one.places for one in wanted if one.places is not None and one.sums is None]
        if not dealt:
            return put_into(torch.stack(list(found)).sum(0), out)
        values = torch.empty((sum(map(len, dealt)), self.width), dtype=self.dtype) if out is None else out
        plain = values.detach()
        for own, part in zip(dealt, found, strict=True):
            if plain.is_contiguous() and part.is_contiguous():
                scatter(plain, own.numpy(), part)
            else:
                plain[own] = part
        return values

    def require_out(self, out: Tensor, rows: Tensor | None, sums: Sums | None = None) -> None:
        """The answer fits there; a PlanError where it does not."""
        count = len(self._required(rows)) if sums is None else len(sums.starts)
        require_look(self.name, out, (count, self.width), self.dtype)

    def _dealt(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield for each shard which of the rows it keeps, ascending."""
        owner = shard_of_row(rows.numpy(), self.num_shards).astype(np.min_scalar_type(self.num_shards))
        counts = np.bincount(owner, minlength=self.num_shards)
        order = torch.from_numpy(owner.argsort(kind="stable"))  # numbers that are this short are not compared
        yield from enumerate(torch.split(order, counts.tolist()))

    def _required(self, rows: Tensor | None) -> Tensor:
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


Key: TypeAlias = Dense | Table


def put_into(values: Tensor, out: Tensor | None) -> Tensor:
    """Return the values, in ``out`` if given."""
    if out is None:
        return values
    out.detach().copy_(values)
    return out


def only(sums: Sums, places: Tensor) -> Sums:
    """Return those of the sums that have these places."""
    ends = torch.cat([sums.starts[1:], sums.starts.new_tensor([len(sums.members)])])
    lengths = (ends - sums.starts)[places]
    starts = lengths.cumsum(0, dtype=torch.int32) - lengths
    steps = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return Sums(sums.members[sums.starts[places].repeat_interleave(lengths) + steps], starts)


def among(sums: Sums, places: Tensor, num_rows: int) -> Sums:
    """Return the sums of those rows alone that have these places, by their new places."""
    renamed = torch.full((num_rows,), -1, dtype=torch.int32)
    renamed[places] = torch.arange(len(places), dtype=torch.int32)
    members = renamed[sums.members]
    is_left = members >= 0
    num_left = torch.cat([torch.zeros(1, dtype=torch.int32), is_left.cumsum(0, dtype=torch.int32)])
    return Sums(members[is_left], num_left[sums.starts])


def require_value(name: str, value: Tensor) -> None:
    """A key can begin as this value.

    Raises:
        PlanError: servers keep no such numbers.
        DataError: they are not finite.
    """
    if value.dtype not in NAMES or value.device.type != "cpu":
        raise PlanError(f"{name} of {value.dtype} on {value.device}; one of {', '.join(NAMES.values())} can be kept")
    if not bool(value.isfinite().all()):
        raise DataError(f"{name} begins with numbers that are not finite; give others")


def written(text: str, values: Tensor) -> Tensor:
    """Return a range in a code; the values become what it leaves out."""
    code = find_code(text)
    found = encoded(code, values)
    values -= decoded(code, found, values)
    return found


def require_kept(job: Job, key: str, rule: Rule) -> None:
    """The servers of a job can keep a key that has this rule.

    Raises:
        PlanError: there are none, or they would need an optimizer.
    """
    require_servers(job, key)
    if isinstance(rule, Aggregate) and not isinstance(job.consistency, Bsp):
        mode = type(job.consistency).__name__.lower()
        raise PlanError(f"{key} without an optimizer on the server, which {mode} needs; give it a rule, as Sgd(0.1)")


def require_servers(job: Job, what: str) -> None:
    """The job has servers, which keep this.

    Raises:
        PlanError: it has none.
    """
    if not job.num_servers:
        raise PlanError(
            f"job {job.name} has no servers, so that nobody keeps {what}; its workers train by Elastic.train, or give "
            "it servers"
        )


def require_alone(text: str) -> None:
    """A push can be written in this code.

    Raises:
        PlanError: it cannot.
    """
    try:
        name = find_code(text).name
    except ProgramError as error:
        raise PlanError(str(error)) from error
    if name not in ALONE:
        raise PlanError(
            f"{text} sums gradients in a way of its own, but a server counts pushes one by one; give one of "
            f"{', '.join(ALONE)}"
        )


def require_look(name: str, values: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The tensor has this shape and dtype and is on the CPU; a PlanError where not."""
    if tuple(values.shape) != shape or values.dtype != dtype or values.device.type != "cpu":
        raise PlanError(
            f"{values.dtype} {tuple(values.shape)} on {values.device} does not fit {name}, which is {dtype} {shape} "
            "on the cpu; give it so"
        )
