"""Which keys a module has: one for each module that has parameters of its own, one for each table.

Which parameters are one key: the job keeps what its first worker said, and every later worker does the same.

How parameters are put together is a worker's choice; but whoever goes on from a cut, or joins a job that runs, has to
find the keys that are there. Otherwise what was learnt would lie under other names, and the weights would begin anew
without a word.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.elastic.remote_parameters import NamedParameter
from counterpoint.elastic.row_ids import validate_table_module
from counterpoint.errors import PlanError
from counterpoint.partitioning.sample_independence import modules_with_running_stats
from counterpoint.ps.session import InitialRows, Session
from counterpoint.ps.update_rules import ConstantInit, Sgd, UpdateRule

FROZEN_RULE = Sgd(0.0)
"""The rule of what is never pushed."""
OWN_KEY_BYTES = 1 << 20
MAX_ZERO_COPY_KEYS = 2


@dataclass(slots=True)
class ParameterKey:
    """A key, and which modules have its parameters.

    Attributes:
        key: names of its parameters.
        parts: these, in order.
        rule: what a push does to them.
        is_trained: whether there are any.
        owners: paths of the modules that have one of them.
    """

    key: str
    parameters: list[NamedParameter]
    rule: UpdateRule
    is_trained: bool
    module_paths: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Memory of its parameters."""
        return sum(part.parameter.nbytes for part in self.parameters)


def dense_keys(
    model: nn.Module, rules: Mapping[str, UpdateRule], *, excluded: Iterable[str], own_key_bytes: int = OWN_KEY_BYTES
) -> list[ParameterKey]:
    """Return the keys of all parameters but some.

    Args:
        model: whose.
        rules: of the parameters that are trained, by name.
        leave: names of those that are kept otherwise.
        alone_bytes: from which on a parameter is a key by itself, for its gradient need not be put beside another.

    Raises:
        PlanError: a parameter is not on the CPU.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> rules = dict.fromkeys([name for name, _ in model.named_parameters()], Sgd(0.1))
        >>> [unit.key for unit in dense_units(model, rules, leave=())]
        ['0.weight+bias', '2.weight']
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    left = {model.get_parameter(name) for name in excluded}
    found: dict[nn.Parameter, ParameterKey] = {}
    units: list[ParameterKey] = []
    for path, module in model.named_modules():
        groups: dict[tuple[UpdateRule, bool, torch.dtype, str], ParameterKey] = {}
        for parameter in module.parameters(recurse=False):
            if parameter in left:
                continue
            if parameter in found:
                found[parameter].module_paths.add(path)
                continue
            check_on_cpu(names[parameter], parameter)
            rule = rules.get(names[parameter], FROZEN_RULE)
            is_trained = names[parameter] in rules and parameter.requires_grad
            alone = names[parameter] if parameter.nbytes >= own_key_bytes else ""
            kind = rule, is_trained, parameter.dtype, alone
            unit = groups.setdefault(kind, ParameterKey("", [], rule, is_trained, {path}))
            unit.parameters.append(NamedParameter(names[parameter], parameter))
            found[parameter] = unit
        units += groups.values()
    for unit in units:
        first, *others = [part.name for part in unit.parameters]
        unit.key = "+".join([first, *(name.rpartition(".")[2] for name in others)])
    return units


def coalesce_small_keys(keys: Iterable[ParameterKey], key_bytes: int) -> list[ParameterKey]:
    """Return the keys with neighbours put together, where they are alike and small: each key costs two messages a step.

    Args:
        units: one for each module, in the order of the model.
        key_bytes: up to which keys are put together.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> rules = dict.fromkeys([name for name, _ in model.named_parameters()], Sgd(0.1))
        >>> [unit.key for unit in gathered(dense_units(model, rules, leave=()), 1 << 16)]
        ['0.weight+bias to 2.weight']
    """
    open_units: dict[tuple[UpdateRule, bool, torch.dtype], list[ParameterKey]] = {}
    runs: list[list[ParameterKey]] = []
    for unit in keys:
        if unit.num_bytes > key_bytes:
            runs.append([unit])
            continue
        kind = unit.rule, unit.is_trained, unit.parameters[0].parameter.dtype
        run = open_units.get(kind)
        if run is None or sum(one.num_bytes for one in run) + unit.num_bytes > key_bytes:
            run = open_units[kind] = []
            runs.append(run)
        run.append(unit)
    return [run[0] if len(run) == 1 else _concatenate_keys(run) for run in runs]


def _concatenate_keys(run: list[ParameterKey]) -> ParameterKey:
    first, last = run[0], run[-1]
    parts = [part for unit in run for part in unit.parameters]
    owners = {owner for unit in run for owner in unit.module_paths}
    return ParameterKey(f"{first.key} to {last.key}", parts, first.rule, first.is_trained, owners)


def zero_copy_keys(keys: Iterable[ParameterKey]) -> set[str]:
    """Return the keys that are computed with where they come in, in memory that a connection lends: the largest few.

    A connection lends memory for two letters of a size, the one that is held and the one that comes next. So a key that
    is held has to be the only one of its size; others are copied.
    """
    sizes: dict[int, list[ParameterKey]] = {}
    for unit in keys:
        sizes.setdefault((unit.num_bytes - 1).bit_length(), []).append(unit)
    alone = [found[0] for size, found in sorted(sizes.items(), reverse=True) if len(found) == 1]
    return {unit.key for unit in alone[:MAX_ZERO_COPY_KEYS]}


def check_on_cpu(name: str, parameter: nn.Parameter) -> None:
    """Check that a parameter has memory that servers can fill.

    Raises:
        PlanError: it has not.
    """
    if parameter.device.type != "cpu":
        raise PlanError(f"{name} is on {parameter.device}, but workers of servers compute on the CPU; move it there")


def find_table_modules(model: nn.Module, tables: Iterable[str]) -> dict[str, list[nn.Module]]:
    """Return the modules of each table.

    Args:
        model: whose.
        tables: names of weights.

    Raises:
        PlanError: there is no such weight, it is used by something else, or one that asks for sparse gradients is no
            table.
    """
    wanted = list(tables)
    known = dict(model.named_parameters())
    for name in wanted:
        if name not in known:
            near = [found for found in known if found.startswith(name)] or list(known)
            raise PlanError(f"there is no weight {name!r} to be a table; the model has {', '.join(near[:5])}")
    found: dict[str, list[nn.Module]] = {name: [] for name in wanted}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            names = [name for name in wanted if known[name] is parameter]
            if names:
                validate_table_module(names[0], module)
                found[names[0]].append(module)
            elif getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                name = f"{path}.{own}" if path else own
                raise PlanError(
                    f"{name} asks for sparse gradients, so its rows lie on the servers, where they begin when they are "
                    f"first looked up; say how, as tables={{'{name}': Normal(0, 1)}}, or take sparse=False to have the "
                    "whole weight on every worker"
                )
    return found


def check_no_running_stats(model: nn.Module) -> None:
    """Check that a module has nothing that is trained but is no parameter.

    Raises:
        PlanError: it has running statistics.
    """
    for path in modules_with_running_stats(model):
        raise PlanError(
            f"{path} keeps running statistics, which servers do not: each worker would have its own; say buffers='own' "
            "to have it so, or take track_running_stats=False, or a GroupNorm"
        )


KeyLayout: TypeAlias = dict[str, list[str]]
"""The names of the parameters of each key."""

LAYOUT_KEY: Final = "which parameters are one key"
BYTES_PER_ROW: Final = 256
MAX_LAYOUT_ROWS: Final = 1 << 12
LENGTH_BYTES: Final = 4
MAX_NAMES_SHOWN: Final = 3


def agree_on_keys(session: Session, keys: Sequence[ParameterKey], codec: str = "") -> list[ParameterKey]:
    """Return the keys of a model as the job has them: these, if this worker is the first.

    Args:
        session: of the worker.
        units: the keys that this worker would make.
        code: in which it pushes.

    Raises:
        PlanError: the job has keys of another model, of one whose parameters were optimized otherwise, or of several
            modules where a code looks at one at a time.
    """
    wanted = {unit.key: [part.name for part in unit.parameters] for unit in keys}
    found = agree_on_layout(session, wanted)
    if found == wanted:
        return list(keys)
    theirs, ours = ({name for names in layout.values() for name in names} for layout in (found, wanted))
    if theirs != ours:
        raise PlanError(
            f"job {session.job.name} keeps the weights of another model: {_format_names(theirs - ours)} there alone, "
            f"{_format_names(ours - theirs)} here alone; give the model with which it was begun, or begin another job"
        )
    mixed = [key for key, names in found.items() if len({name.rpartition(".")[0] for name in names}) > 1]
    if codec and mixed:
        raise PlanError(
            f"job {session.job.name} was begun with several modules in one key, {mixed[0]!r}, and code={codec!r} looks "
            "at one at a time; leave the code out, or begin another job"
        )
    homes = {part.name: unit for unit in keys for part in unit.parameters}
    return [_merge_key(session, key, names, homes) for key, names in found.items()]


def _merge_key(
    session: Session, key: str, names: Sequence[str], key_of_parameter: dict[str, ParameterKey]
) -> ParameterKey:
    """Return the key of these parameters; a PlanError where not the same is done to all of them."""
    first, *others = [key_of_parameter[name] for name in names]
    for name, unit in zip(names[1:], others, strict=True):
        if _key_kind(unit) != _key_kind(first):
            raise PlanError(
                f"job {session.job.name} keeps {names[0]} and {name} in one key, but here they have not the same rule "
                "and dtype, or only one of them is trained; give the model and the optimizer with which the job was "
                "begun, or begin another job"
            )
    parts = {part.name: part for unit in (first, *others) for part in unit.parameters}
    owners = {owner for unit in (first, *others) for owner in unit.module_paths}
    return ParameterKey(key, [parts[name] for name in names], first.rule, first.is_trained, owners)


def _key_kind(key: ParameterKey) -> tuple[object, bool, torch.dtype]:
    return key.rule, key.is_trained, key.parameters[0].parameter.dtype


def agree_on_layout(session: Session, wanted: KeyLayout) -> KeyLayout:
    """Return what the first worker of the job said, which is what this one says if it is that worker.

    All rows lie on one shard, so that they are one worker's.
    """
    given = text_to_rows(json.dumps(wanted))
    step = session.job.num_shards
    numbers = torch.arange(MAX_LAYOUT_ROWS) * step
    start = InitialRows(numbers[: len(given)], given, ConstantInit(0.0))
    session.init_rows(LAYOUT_KEY, MAX_LAYOUT_ROWS * step, BYTES_PER_ROW, torch.float16, FROZEN_RULE, start)
    values = session.pull(LAYOUT_KEY, rows=numbers[:1]).wait().values
    num_rows = _num_rows(_num_bytes(values))
    if num_rows > 1:
        values = session.pull(LAYOUT_KEY, rows=numbers[:num_rows]).wait().values
    found: KeyLayout = json.loads(rows_to_text(values))
    return found


def text_to_rows(text: str) -> Tensor:
    """Return a text in ASCII as rows of bytes; a PlanError where they are too many.

    Example:
        >>> text_of(rows_of("[]"))
        '[]'
    """
    packed = zlib.compress(text.encode("ascii"))
    num_rows = _num_rows(len(packed))
    if num_rows > MAX_LAYOUT_ROWS:
        raise PlanError(f"the names of the model's parameters have {len(text)} letters; give its modules shorter ones")
    whole = (len(packed).to_bytes(LENGTH_BYTES, "big") + packed).ljust(num_rows * BYTES_PER_ROW, b"\0")
    return torch.tensor(list(whole), dtype=torch.float16).view(num_rows, BYTES_PER_ROW)


def rows_to_text(rows: Tensor) -> str:
    """Return the text that rows of bytes say."""
    whole = bytes(rows.reshape(-1).to(torch.uint8).tolist())
    return zlib.decompress(whole[LENGTH_BYTES : LENGTH_BYTES + _num_bytes(rows)]).decode("ascii")


def _num_bytes(rows: Tensor) -> int:
    return int.from_bytes(bytes(rows[0, :LENGTH_BYTES].to(torch.uint8).tolist()), "big")


def _num_rows(num_bytes: int) -> int:
    return -(-(num_bytes + LENGTH_BYTES) // BYTES_PER_ROW)


def _format_names(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_NAMES_SHOWN]) or "none"
    return f"{shown} and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else shown
