"""Which keys a module has: one for each module that has parameters of its own, one for each table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from counterpoint.cutting.mixing import keeping_statistics
from counterpoint.errors import PlanError
from counterpoint.server.choices import Rule, Sgd
from counterpoint.server.working.rows import require_plain
from counterpoint.server.working.weights import Named

FROZEN = Sgd(0.0)
"""The rule of what is never pushed."""
ALONE_BYTES = 1 << 20
MAX_HELD = 2


@dataclass(slots=True)
class Unit:
    """A key, and which modules have its parameters.

    Attributes:
        key: names of its parameters.
        parts: these, in order.
        rule: what a push does to them.
        is_trained: whether there are any.
        owners: paths of the modules that have one of them.
    """

    key: str
    parts: list[Named]
    rule: Rule
    is_trained: bool
    owners: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Memory of its parameters."""
        return sum(part.parameter.nbytes for part in self.parts)


def dense_units(
    model: nn.Module, rules: Mapping[str, Rule], *, leave: Iterable[str], alone_bytes: int = ALONE_BYTES
) -> list[Unit]:
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
    left = {model.get_parameter(name) for name in leave}
    found: dict[nn.Parameter, Unit] = {}
    units: list[Unit] = []
    for path, module in model.named_modules():
        groups: dict[tuple[Rule, bool, torch.dtype, str], Unit] = {}
        for parameter in module.parameters(recurse=False):
            if parameter in left:
                continue
            if parameter in found:
                found[parameter].owners.add(path)
                continue
            require_here(names[parameter], parameter)
            rule = rules.get(names[parameter], FROZEN)
            is_trained = names[parameter] in rules and parameter.requires_grad
            alone = names[parameter] if parameter.nbytes >= alone_bytes else ""
            kind = rule, is_trained, parameter.dtype, alone
            unit = groups.setdefault(kind, Unit("", [], rule, is_trained, {path}))
            unit.parts.append(Named(names[parameter], parameter))
            found[parameter] = unit
        units += groups.values()
    for unit in units:
        first, *others = [part.name for part in unit.parts]
        unit.key = "+".join([first, *(name.rpartition(".")[2] for name in others)])
    return units


def gathered(units: Iterable[Unit], key_bytes: int) -> list[Unit]:
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
    open_units: dict[tuple[Rule, bool, torch.dtype], list[Unit]] = {}
    runs: list[list[Unit]] = []
    for unit in units:
        if unit.num_bytes > key_bytes:
            runs.append([unit])
            continue
        kind = unit.rule, unit.is_trained, unit.parts[0].parameter.dtype
        run = open_units.get(kind)
        if run is None or sum(one.num_bytes for one in run) + unit.num_bytes > key_bytes:
            run = open_units[kind] = []
            runs.append(run)
        run.append(unit)
    return [run[0] if len(run) == 1 else _together(run) for run in runs]


def _together(run: list[Unit]) -> Unit:
    first, last = run[0], run[-1]
    parts = [part for unit in run for part in unit.parts]
    owners = {owner for unit in run for owner in unit.owners}
    return Unit(f"{first.key} to {last.key}", parts, first.rule, first.is_trained, owners)


def to_be_held(units: Iterable[Unit]) -> set[str]:
    """Return the keys that are computed with where they come in, in memory that a connection lends: the largest few.

    A connection lends memory for two letters of a size, the one that is held and the one that comes next. So a key that
    is held has to be the only one of its size; others are copied.
    """
    sizes: dict[int, list[Unit]] = {}
    for unit in units:
        sizes.setdefault((unit.num_bytes - 1).bit_length(), []).append(unit)
    alone = [found[0] for size, found in sorted(sizes.items(), reverse=True) if len(found) == 1]
    return {unit.key for unit in alone[:MAX_HELD]}


def require_here(name: str, parameter: nn.Parameter) -> None:
    """Check that a parameter has memory that servers can fill.

    Raises:
        PlanError: it has not.
    """
    if parameter.device.type != "cpu":
        raise PlanError(f"{name} is on {parameter.device}, but workers of servers compute on the CPU; move it there")


def modules_of_tables(model: nn.Module, tables: Iterable[str]) -> dict[str, list[nn.Module]]:
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
                require_plain(names[0], module)
                found[names[0]].append(module)
            elif getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
                name = f"{path}.{own}" if path else own
                raise PlanError(
                    f"{name} asks for sparse gradients, so its rows lie on the servers, where they begin when they are "
                    f"first looked up; say how, as tables={{'{name}': Normal(0, 1)}}, or take sparse=False to have the "
                    "whole weight on every worker"
                )
    return found


def require_kept_buffers(model: nn.Module) -> None:
    """Check that a module has nothing that is trained but is no parameter.

    Raises:
        PlanError: it has running statistics.
    """
    for path in keeping_statistics(model):
        raise PlanError(
            f"{path} keeps running statistics, which servers do not: each worker would have its own; say buffers='own' "
            "to have it so, or take track_running_stats=False, or a GroupNorm"
        )
