"""Which parameters are one key: the job keeps what its first worker said, and every later worker does the same.

How parameters are put together is a worker's choice; but whoever goes on from a cut, or joins a job that runs, has to
find the keys that are there. Otherwise what was learnt would lie under other names, and the weights would begin anew
without a word.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import PlanError
from counterpoint.server.choices import Constant
from counterpoint.server.session import Given, Session
from counterpoint.server.working.units import FROZEN, Unit

Layout: TypeAlias = dict[str, list[str]]
"""The names of the parameters of each key."""

KEY: Final = "which parameters are one key"
WIDTH: Final = 256
MOST_ROWS: Final = 1 << 12
HEAD_BYTES: Final = 4
SHOWN: Final = 3


def kept(session: Session, units: Sequence[Unit], code: str = "") -> list[Unit]:
    """Return the keys of a model as the job has them: these, if this worker is the first.

    Args:
        session: of the worker.
        units: the keys that this worker would make.
        code: in which it pushes.

    Raises:
        PlanError: the job has keys of another model, of one whose parameters were optimized otherwise, or of several
            modules where a code looks at one at a time.
    """
    wanted = {unit.key: [part.name for part in unit.parts] for unit in units}
    found = agreed(session, wanted)
    if found == wanted:
        return list(units)
    theirs, ours = ({name for names in layout.values() for name in names} for layout in (found, wanted))
    if theirs != ours:
        raise PlanError(
            f"job {session.job.name} keeps the weights of another model: {_listed(theirs - ours)} there alone, "
            f"{_listed(ours - theirs)} here alone; give the model with which it was begun, or begin another job"
        )
    mixed = [key for key, names in found.items() if len({name.rpartition(".")[0] for name in names}) > 1]
    if code and mixed:
        raise PlanError(
            f"job {session.job.name} was begun with several modules in one key, {mixed[0]!r}, and code={code!r} looks "
            "at one at a time; leave the code out, or begin another job"
        )
    homes = {part.name: unit for unit in units for part in unit.parts}
    return [_joined(session, key, names, homes) for key, names in found.items()]


def _joined(session: Session, key: str, names: Sequence[str], homes: dict[str, Unit]) -> Unit:
    """Return the key of these parameters; a PlanError where not the same is done to all of them."""
    first, *others = [homes[name] for name in names]
    for name, unit in zip(names[1:], others, strict=True):
        if _kind(unit) != _kind(first):
            raise PlanError(
                f"job {session.job.name} keeps {names[0]} and {name} in one key, but here they have not the same rule "
                "and dtype, or only one of them is trained; give the model and the optimizer with which the job was "
                "begun, or begin another job"
            )
    parts = {part.name: part for unit in (first, *others) for part in unit.parts}
    owners = {owner for unit in (first, *others) for owner in unit.owners}
    return Unit(key, [parts[name] for name in names], first.rule, first.is_trained, owners)


def _kind(unit: Unit) -> tuple[object, bool, torch.dtype]:
    return unit.rule, unit.is_trained, unit.parts[0].parameter.dtype


def agreed(session: Session, wanted: Layout) -> Layout:
    """Return what the first worker of the job said, which is what this one says if it is that worker.

    All rows lie on one shard, so that they are one worker's.
    """
    given = rows_of(json.dumps(wanted))
    step = session.job.num_shards
    numbers = torch.arange(MOST_ROWS) * step
    start = Given(numbers[: len(given)], given, Constant(0.0))
    session.init_rows(KEY, MOST_ROWS * step, WIDTH, torch.float16, FROZEN, start)
    values = session.pull(KEY, rows=numbers[:1]).wait().values
    num_rows = _num_rows(_num_bytes(values))
    if num_rows > 1:
        values = session.pull(KEY, rows=numbers[:num_rows]).wait().values
    found: Layout = json.loads(text_of(values))
    return found


def rows_of(text: str) -> Tensor:
    """Return a text in ASCII as rows of bytes; a PlanError where they are too many.

    Example:
        >>> text_of(rows_of("[]"))
        '[]'
    """
    packed = zlib.compress(text.encode("ascii"))
    num_rows = _num_rows(len(packed))
    if num_rows > MOST_ROWS:
        raise PlanError(f"the names of the model's parameters have {len(text)} letters; give its modules shorter ones")
    whole = (len(packed).to_bytes(HEAD_BYTES, "big") + packed).ljust(num_rows * WIDTH, b"\0")
    return torch.tensor(list(whole), dtype=torch.float16).view(num_rows, WIDTH)


def text_of(rows: Tensor) -> str:
    """Return the text that rows of bytes say."""
    whole = bytes(rows.reshape(-1).to(torch.uint8).tolist())
    return zlib.decompress(whole[HEAD_BYTES : HEAD_BYTES + _num_bytes(rows)]).decode("ascii")


def _num_bytes(rows: Tensor) -> int:
    return int.from_bytes(bytes(rows[0, :HEAD_BYTES].to(torch.uint8).tolist()), "big")


def _num_rows(num_bytes: int) -> int:
    return -(-(num_bytes + HEAD_BYTES) // WIDTH)


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN]) or "none"
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
