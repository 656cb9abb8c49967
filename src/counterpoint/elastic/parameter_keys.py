"""How a model's parameters are grouped into keys, and the agreement of all workers on that grouping.

Grouping is the first worker's choice; a worker that joins a running job, or restarts from a snapshot, has to use the
same keys. Otherwise its weights would be stored under other names and start from their initial values unnoticed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor, nn

from counterpoint.elastic.remote_parameters import NamedParameter
from counterpoint.elastic.row_ids import validate_table_module
from counterpoint.errors import PlanError, ProtocolError
from counterpoint.json_reader import parse_json_file
from counterpoint.partitioning.batch_statistics import modules_with_running_stats
from counterpoint.ps.session import InitialRows, Session
from counterpoint.ps.update_rules import ConstantInit, Sgd, UpdateRule

FROZEN_RULE = Sgd(0.0)
"""Update rule of keys that are never pushed."""
OWN_KEY_BYTES = 1 << 20
MAX_ZERO_COPY_KEYS = 2


@dataclass(slots=True)
class ParameterKey:
    """A dense key, and the modules that own its parameters.

    Attributes:
        key: its name, made of the parameters' names.
        parameters: in order.
        rule: update rule.
        is_trained: whether it is ever pushed.
        module_paths: modules that own one of the parameters.
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
    """Return one key per module for all parameters except the excluded ones.

    Args:
        model: whose.
        rules: update rules of the trained parameters, by name.
        excluded: names of parameters to skip.
        own_key_bytes: parameters from this size on get a key of their own, which saves copying their gradients.

    Raises:
        PlanError: a parameter is not on the CPU.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> rules = dict.fromkeys([name for name, _ in model.named_parameters()], Sgd(0.1))
        >>> [key.key for key in dense_keys(model, rules, excluded=())]
        ['0.weight+bias', '2.weight']
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    excluded_parameters = {model.get_parameter(name) for name in excluded}
    key_of_parameter: dict[nn.Parameter, ParameterKey] = {}
    keys: list[ParameterKey] = []
    for path, module in model.named_modules():
        key_of_group: dict[tuple[UpdateRule, bool, torch.dtype, str], ParameterKey] = {}
        for parameter in module.parameters(recurse=False):
            if parameter in excluded_parameters:
                continue
            if parameter in key_of_parameter:
                key_of_parameter[parameter].module_paths.add(path)
                continue
            check_on_cpu(names[parameter], parameter)
            rule = rules.get(names[parameter], FROZEN_RULE)
            is_trained = names[parameter] in rules and parameter.requires_grad
            own_name = names[parameter] if parameter.nbytes >= own_key_bytes else ""
            group = rule, is_trained, parameter.dtype, own_name
            key = key_of_group.setdefault(group, ParameterKey("", [], rule, is_trained, {path}))
            key.parameters.append(NamedParameter(names[parameter], parameter))
            key_of_parameter[parameter] = key
        keys += key_of_group.values()
    for key in keys:
        first, *rest = [part.name for part in key.parameters]
        key.key = "+".join([first, *(name.rpartition(".")[2] for name in rest)])
    return keys


def coalesce_small_keys(keys: Iterable[ParameterKey], key_bytes: int) -> list[ParameterKey]:
    """Merge adjacent small keys of the same kind, since each key costs two messages per step.

    Args:
        keys: in model order.
        key_bytes: largest merged key.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> rules = dict.fromkeys([name for name, _ in model.named_parameters()], Sgd(0.1))
        >>> [key.key for key in coalesce_small_keys(dense_keys(model, rules, excluded=()), 1 << 16)]
        ['0.weight+bias to 2.weight']
    """
    open_runs: dict[tuple[UpdateRule, bool, torch.dtype], list[ParameterKey]] = {}
    runs: list[list[ParameterKey]] = []
    for key in keys:
        if key.num_bytes > key_bytes:
            runs.append([key])
            continue
        group = key.rule, key.is_trained, key.parameters[0].parameter.dtype
        run = open_runs.get(group)
        if run is None or sum(member.num_bytes for member in run) + key.num_bytes > key_bytes:
            run = open_runs[group] = []
            runs.append(run)
        run.append(key)
    return [run[0] if len(run) == 1 else _concatenate_keys(run) for run in runs]


def _concatenate_keys(run: list[ParameterKey]) -> ParameterKey:
    first, last = run[0], run[-1]
    parameters = [part for key in run for part in key.parameters]
    owners = {owner for key in run for owner in key.module_paths}
    return ParameterKey(f"{first.key} to {last.key}", parameters, first.rule, first.is_trained, owners)


def zero_copy_keys(keys: Iterable[ParameterKey]) -> set[str]:
    """Return the few largest keys whose parameters may use the memory in which a pull arrives.

    A connection has two shared buffers per size: one in use and one for the next pull. So such a key must be the only
    one of its size; others are copied.
    """
    keys_by_size: dict[int, list[ParameterKey]] = {}
    for key in keys:
        keys_by_size.setdefault((key.num_bytes - 1).bit_length(), []).append(key)
    only_of_size = [
        same_size[0] for size, same_size in sorted(keys_by_size.items(), reverse=True) if len(same_size) == 1
    ]
    return {key.key for key in only_of_size[:MAX_ZERO_COPY_KEYS]}


def check_on_cpu(name: str, parameter: nn.Parameter) -> None:
    """Raise PlanError unless a parameter is on the CPU."""
    if parameter.device.type != "cpu":
        raise PlanError(
            f"{name} is on {parameter.device}, but workers of parameter servers compute on the CPU; move it there"
        )


def find_table_modules(model: nn.Module, tables: Iterable[str]) -> dict[str, list[nn.Module]]:
    """Return the modules that look up each table.

    Args:
        model: whose.
        tables: names of embedding weights.

    Raises:
        PlanError: there is no such weight, another module uses it, or a module with sparse gradients is not among the
            tables.
    """
    table_names = list(tables)
    parameters = dict(model.named_parameters())
    for name in table_names:
        if name not in parameters:
            suggestions = [
                modules_of_table for modules_of_table in parameters if modules_of_table.startswith(name)
            ] or list(parameters)
            raise PlanError(f"there is no weight {name!r}; the model has {', '.join(suggestions[:5])}")
    modules_of_table: dict[str, list[nn.Module]] = {name: [] for name in table_names}
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            names = [name for name in table_names if parameters[name] is parameter]
            if names:
                validate_table_module(names[0], module)
                modules_of_table[names[0]].append(module)
            elif getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                name = f"{path}.{parameter_name}" if path else parameter_name
                raise PlanError(
                    f"{name} has sparse gradients, so its rows belong on servers; give their initial values, such as "
                    f"tables={{'{name}': NormalInit(0, 1)}}, or set sparse=False to keep the whole weight on every "
                    "worker"
                )
    return modules_of_table


def check_no_running_stats(model: nn.Module) -> None:
    """Raise PlanError if a module has running statistics, which servers do not hold."""
    for path in modules_with_running_stats(model):
        raise PlanError(
            f"{path} has running statistics, which servers do not hold: each worker would have its own; give "
            "buffers='own' to allow that, or use track_running_stats=False or GroupNorm"
        )


KeyLayout: TypeAlias = dict[str, list[str]]
"""Names of the parameters of each key."""

LAYOUT_KEY: Final = "which parameters are one key"
BYTES_PER_ROW: Final = 256
MAX_LAYOUT_ROWS: Final = 1 << 12
MAX_LAYOUT_CHARACTERS: Final = 1 << 24
LENGTH_BYTES: Final = 4
MAX_NAMES_SHOWN: Final = 3


def agree_on_keys(session: Session, keys: Sequence[ParameterKey], codec: str = "") -> list[ParameterKey]:
    """Return the job's keys for a model: the given ones, if this worker is the first.

    Args:
        session: of the worker.
        keys: that this worker would create.
        codec: compression codec of its pushes.

    Raises:
        PlanError: the job has another model, other update rules, or keys of several modules although a codec is given.
    """
    own_layout = {key.key: [part.name for part in key.parameters] for key in keys}
    job_layout = agree_on_layout(session, own_layout)
    if job_layout == own_layout:
        return list(keys)
    job_names, own_names = (
        {name for names in layout.values() for name in names} for layout in (job_layout, own_layout)
    )
    if job_names != own_names:
        raise PlanError(
            f"job {session.job.name} has the weights of another model: only there "
            f"{_format_names(job_names - own_names)}, "
            f"only here {_format_names(own_names - job_names)}; use the model that the job was started with, or start "
            "another job"
        )
    mixed_keys = [key for key, names in job_layout.items() if len({name.rpartition(".")[0] for name in names}) > 1]
    if codec and mixed_keys:
        raise PlanError(
            f"job {session.job.name} has several modules in one key, {mixed_keys[0]!r}, but compress={codec!r} "
            "compresses each module separately; omit it, or start another job"
        )
    key_of_parameter = {part.name: unit_key for unit_key in keys for part in unit_key.parameters}
    return [_merge_key(session, key, names, key_of_parameter) for key, names in job_layout.items()]


def _merge_key(
    session: Session, key: str, names: Sequence[str], key_of_parameter: dict[str, ParameterKey]
) -> ParameterKey:
    """Return the key of these parameters; raise PlanError unless they have the same rule and dtype."""
    first, *rest = [key_of_parameter[name] for name in names]
    for name, other in zip(names[1:], rest, strict=True):
        if _key_kind(other) != _key_kind(first):
            raise PlanError(
                f"job {session.job.name} has {names[0]} and {name} in one key, but here their rules or dtypes differ, "
                "or only "
                "one of them is trained; use the model and optimizer that the job was started with, or start another "
                "job"
            )
    parameters = {part.name: part for other in (first, *rest) for part in other.parameters}
    module_paths = {path for other in (first, *rest) for path in other.module_paths}
    return ParameterKey(key, [parameters[name] for name in names], first.rule, first.is_trained, module_paths)


def _key_kind(key: ParameterKey) -> tuple[object, bool, torch.dtype]:
    return key.rule, key.is_trained, key.parameters[0].parameter.dtype


def agree_on_layout(session: Session, own_layout: KeyLayout) -> KeyLayout:
    """Return the layout of the job's first worker, which is the given one if this worker is the first.

    All rows are on one shard, so that they are written by one worker.

    Raises:
        ProtocolError: what the first worker has written is not a layout.
        PlanError: the given one is too long.
    """
    rows = text_to_rows(json.dumps(own_layout))
    step = session.job.num_shards
    row_ids = torch.arange(MAX_LAYOUT_ROWS) * step
    initial_rows = InitialRows(row_ids[: len(rows)], rows, ConstantInit(0.0))
    session.init_rows(LAYOUT_KEY, MAX_LAYOUT_ROWS * step, BYTES_PER_ROW, torch.float16, FROZEN_RULE, initial_rows)
    values = session.pull(LAYOUT_KEY, rows=row_ids[:1]).wait().values
    num_rows = _num_rows(_num_bytes(values))
    if num_rows > 1:
        values = session.pull(LAYOUT_KEY, rows=row_ids[:num_rows]).wait().values
    return parse_layout(rows_to_text(values))


def parse_layout(text: str) -> KeyLayout:
    """Return the layout that another worker has written.

    Raises:
        ProtocolError: it is not a layout.
    """
    try:
        layout = parse_json_file(text.encode())
    except ValueError as error:
        raise malformed_layout_error(str(error)) from error
    is_layout = isinstance(layout, dict) and all(
        isinstance(names, list) and names and all(isinstance(name, str) for name in names) for names in layout.values()
    )
    if not is_layout:
        raise malformed_layout_error("a key has no list of names")
    return cast("KeyLayout", layout)


def malformed_layout_error(reason: str) -> ProtocolError:
    """Return the error for a layout that cannot be read."""
    return ProtocolError(
        f"the first worker of the job has named its keys in a form that cannot be read: {reason}; use one version of "
        "counterpoint in the whole job"
    )


def text_to_rows(text: str) -> Tensor:
    """Return an ASCII text as rows of bytes; raise PlanError if it needs too many.

    Example:
        >>> rows_to_text(text_to_rows("[]"))
        '[]'
    """
    packed = zlib.compress(text.encode("ascii"))
    num_rows = _num_rows(len(packed))
    if num_rows > MAX_LAYOUT_ROWS or len(text) > MAX_LAYOUT_CHARACTERS:
        raise PlanError(
            f"the names of the model's parameters have {len(text)} characters; give its modules shorter names"
        )
    padded = (len(packed).to_bytes(LENGTH_BYTES, "big") + packed).ljust(num_rows * BYTES_PER_ROW, b"\0")
    return torch.tensor(list(padded), dtype=torch.float16).view(num_rows, BYTES_PER_ROW)


def rows_to_text(rows: Tensor) -> str:
    """Return the text that rows of bytes encode.

    Raises:
        ProtocolError: they encode none, or a longer one than any model needs.
    """
    padded = bytes(rows.reshape(-1).to(torch.uint8).tolist())
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(padded[LENGTH_BYTES : LENGTH_BYTES + _num_bytes(rows)], MAX_LAYOUT_CHARACTERS)
        if not stream.eof:
            raise malformed_layout_error(f"it ends early, or has more than {MAX_LAYOUT_CHARACTERS} characters")
        return text.decode("ascii")
    except (zlib.error, UnicodeDecodeError) as error:
        raise malformed_layout_error(str(error)) from error


def _num_bytes(rows: Tensor) -> int:
    return int.from_bytes(bytes(rows[0, :LENGTH_BYTES].to(torch.uint8).tolist()), "big")


def _num_rows(num_bytes: int) -> int:
    return -(-(num_bytes + LENGTH_BYTES) // BYTES_PER_ROW)


def _format_names(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_NAMES_SHOWN]) or "none"
    return f"{shown} and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else shown
