"""Split points of a pipeline given by the user: the modules with which chunks begin, optionally with their stages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.optim.validation import parse_digits


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A chunk begins with a module.

    Args:
        module: its path in the model.
        stage: the stage of the chunk; None for the next one.
    """

    module: str
    stage: int | None = None


def parse_split_points(texts: Sequence[str], owner: str, chunk: str = "chunk") -> tuple[SplitPoint, ...]:
    """Parse split points such as ``blocks.2``, or ``blocks.2:1`` with an explicit stage.

    Args:
        texts: one for each split point.
        owner: the strategy, for errors.
        chunk: what begins with a module, for errors.

    Raises:
        PlanError: a module is named twice, only some have stages, or a stage is not a number.

    Example:
        >>> parse_split_points(("embed:0", "blocks:1"), "pipeline(2)")
        (SplitPoint(module='embed', stage=0), SplitPoint(module='blocks', stage=1))
    """
    points = []
    for text in texts:
        module, colon, stage = text.partition(":")
        if not module or (colon and not re.fullmatch(r"[0-9]+", stage)):
            raise PlanError(
                f"split_points of {owner} has {text!r}; write the path of a module, or module:stage with its stage"
            )
        points.append(SplitPoint(module, parse_digits(stage, f"the stage of {module}") if colon else None))
    modules = [point.module for point in points]
    for module in modules:
        if modules.count(module) > 1:
            raise PlanError(
                f"split_points of {owner} names {module!r} {modules.count(module)} times; a module begins one {chunk}"
            )
    explicit = [point for point in points if point.stage is not None]
    if explicit and len(explicit) < len(points):
        others = ", ".join(point.module for point in points if point.stage is None)
        raise PlanError(
            f"split_points of {owner} gives the stage of {explicit[0].module}, but not of {others}; give the stages of "
            "all modules, including the first one of the model, or of none"
        )
    return tuple(points)


def has_explicit_stages(points: Sequence[SplitPoint]) -> bool:
    """Tell whether split points give their stages."""
    return bool(points) and points[0].stage is not None


def check_split_points(points: Sequence[SplitPoint], owner: str, *, num_stages: int, num_chunks: int) -> None:
    """Check that there is a split point for each chunk but the first, or a module for every explicit stage.

    Raises:
        PlanError: there are more or fewer, a stage has no module, or does not exist.
    """
    if not points:
        return
    if not has_explicit_stages(points):
        if len(points) != num_chunks - 1:
            kind = "stage" if num_chunks == num_stages else "chunk"
            raise PlanError(
                f"split_points of {owner} names {_pluralize(len(points), 'module')} with which a {kind} begins, but "
                f"{num_chunks} {kind}s need {num_chunks - 1}, one for each but the first; give as many, or "
                f"{len(points) + 1} {kind}s"
            )
        return
    for point in points:
        if point.stage is not None and point.stage >= num_stages:
            raise PlanError(
                f"split_points of {owner} has {point.module} on stage {point.stage}, but the stages are 0 to "
                f"{num_stages - 1}; give one of these, or {point.stage + 1} stages"
            )
    used = {point.stage for point in points}
    idle = [stage for stage in range(num_stages) if stage not in used]
    if idle:
        last = len(used) - 1
        fewer = f"give {_pluralize(last + 1, 'stage')}"
        if idle[0] <= last:
            fewer += f" and put the modules on {f'stages 0 to {last}' if last else 'stage 0'}"
        raise PlanError(
            f"split_points of {owner} has no module on stage {idle[0]}; every stage needs work: put a module there, or "
            f"{fewer}"
        )


def merge_adjacent(points: Sequence[SplitPoint]) -> tuple[SplitPoint, ...]:
    """Return the split points without those on the stage of the previous one: they are one chunk."""
    if not has_explicit_stages(points):
        return tuple(points)
    return tuple(next(group) for _, group in groupby(points, key=lambda point: point.stage))


def count_blocks_per_chunk(points: Sequence[SplitPoint], model: ModelSpec, owner: str) -> tuple[int, ...]:
    """Return the number of blocks of each chunk.

    Raises:
        PlanError: no block begins with a module, modules are out of order, or a chunk has no blocks or parameters.
    """
    block_of = {"": 0, **model.module_starts}
    names = [*([] if has_explicit_stages(points) else [""]), *(point.module for point in points)]
    starts = [block_of.get(names[0], 0), *(find_start(name, block_of, owner) for name in names[1:])]
    if starts[0]:
        first = _first_module(block_of)
        raise PlanError(
            f"split_points of {owner} begins with {names[0]!r}, but the model begins with {first!r}, which has no "
            f"stage; give its stage, too: split_points={first}:0+..."
        )
    _check_order(names, starts, owner)
    stops = [*starts[1:], model.num_blocks]
    for name, start, stop in zip(names, starts, stops, strict=True):
        if not any(block.params for block in model.blocks[start:stop]):
            until = f" up to {names[starts.index(stop)]!r}" if stop in starts else ""
            raise PlanError(
                f"split_points of {owner} leaves no parameters between {name or _first_module(block_of)!r}{until}; "
                "every stage trains some: drop one of the two split points, or begin with another module"
            )
    return tuple(stop - start for start, stop in zip(starts, stops, strict=True))


def _check_order(names: Sequence[str], starts: Sequence[int], owner: str) -> None:
    for (name, start), (next_name, next_start) in pairwise(zip(names, starts, strict=True)):
        if start == next_start:
            fact = (
                f"{name!r} and {next_name!r} begin with the same block"
                if name
                else f"the model begins with {next_name!r}"
            )
            raise PlanError(
                f"split_points of {owner}: {fact}, so that a stage would have no work; drop {next_name!r}, or name a "
                "later module"
            )
        if start > next_start:
            ordered = "+".join(name for _, name in sorted(zip(starts, names, strict=True)) if name)
            raise PlanError(
                f"split_points of {owner} are out of order: {next_name!r} runs before {name!r}; write "
                f"split_points={ordered}"
            )


def find_start(name: str, starts: Mapping[str, int], owner: str) -> int:
    """Return the index of the block that begins with a module.

    Args:
        name: the path of the module.
        starts: as :attr:`ModelSpec.module_starts <counterpoint.model.spec.ModelSpec.module_starts>`.
        owner: the strategy, for the error.

    Raises:
        PlanError: no block begins with it.
    """
    if name in starts:
        return starts[name]
    near = difflib.get_close_matches(name, [module for module in starts if module], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(_outermost_modules(starts))
    raise PlanError(
        f"split_points of {owner} names {name!r}, with which no block begins; {hint}blocks begin with {known}"
    )


def _outermost_modules(starts: Mapping[str, int]) -> list[str]:
    """Return for each block the outermost module that it begins with."""
    outermost: dict[int, str] = {}
    for name, index in starts.items():
        if name:
            outermost.setdefault(index, name)
    return [outermost[index] for index in sorted(outermost)]


def _first_module(starts: Mapping[str, int]) -> str:
    return next(name for name, index in starts.items() if name and not index)


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")
