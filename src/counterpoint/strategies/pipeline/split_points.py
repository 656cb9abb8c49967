"""Where the chunks of a pipeline begin, by the names of modules, and which stage is told to run them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A chunk begins with a module.

    Args:
        module: its path in the model.
        stage: which stage runs the chunk; None for the next one.
    """

    module: str
    stage: int | None = None


def parse_split_points(texts: Sequence[str], owner: str) -> tuple[SplitPoint, ...]:
    """Return the marks that are written as ``blocks.2``, or as ``blocks.2:1`` where a stage is told.

    Args:
        cuts: as they are written.
        owner: whose they are, for errors.

    Raises:
        PlanError: a module is named twice, stages are told of some only, or one is no number.

    Example:
        >>> parse_split_points(("embed:0", "blocks:1"), "pipeline(2)")
        (SplitPoint(module='embed', stage=0), SplitPoint(module='blocks', stage=1))
    """
    marks = []
    for cut in texts:
        module, colon, stage = cut.partition(":")
        if not module or (colon and not stage.isdecimal()):
            raise PlanError(
                f"split_points of {owner} has {cut!r}; write the path of a module, or module:stage with the stage that runs it"
            )
        marks.append(SplitPoint(module, int(stage) if colon else None))
    modules = [mark.module for mark in marks]
    for module in modules:
        if modules.count(module) > 1:
            raise PlanError(
                f"split_points of {owner} names {module!r} {modules.count(module)} times; a module begins one chunk"
            )
    told = [mark for mark in marks if mark.stage is not None]
    if told and len(told) < len(marks):
        open_ones = ", ".join(mark.module for mark in marks if mark.stage is None)
        raise PlanError(
            f"split_points of {owner} says which stage runs {told[0].module}, but not which runs {open_ones}; tell the stage "
            "of all modules, the first one of the model among them, or of none"
        )
    return tuple(marks)


def has_explicit_stages(points: Sequence[SplitPoint]) -> bool:
    """Whether marks say which stage runs what."""
    return bool(points) and points[0].stage is not None


def check_split_points(points: Sequence[SplitPoint], owner: str, *, num_stages: int, num_chunks: int) -> None:
    """Check that there is a mark for each chunk but the first, or stages that are all told of something.

    Raises:
        PlanError: there are more or fewer, or a stage that is told of nothing, or there is no such stage.
    """
    if not points:
        return
    if not has_explicit_stages(points):
        if len(points) != num_chunks - 1:
            of = "stage" if num_chunks == num_stages else "chunk"
            raise PlanError(
                f"split_points of {owner} names {_pluralize(len(points), 'module')} with which a {of} begins, but {num_chunks} {of}s "
                f"need {num_chunks - 1}, one for each but the first; give as many, or {len(points) + 1} {of}s"
            )
        return
    stages = {mark.stage for mark in points}
    for mark in points:
        if mark.stage is not None and mark.stage >= num_stages:
            raise PlanError(
                f"split_points of {owner} has {mark.module} on stage {mark.stage}, but the stages are 0 to {num_stages - 1}; "
                f"give one of these, or {mark.stage + 1} stages"
            )
    idle = [stage for stage in range(num_stages) if stage not in stages]
    if idle:
        last = len(stages) - 1
        fewer = f"give {_pluralize(last + 1, 'stage')}"
        if idle[0] <= last:
            fewer += f" and put the modules on {f'stages 0 to {last}' if last else 'stage 0'}"
        raise PlanError(
            f"split_points of {owner} has no module on stage {idle[0]}; every stage needs work: put a module there, or {fewer}"
        )


def merge_adjacent(points: Sequence[SplitPoint]) -> tuple[SplitPoint, ...]:
    """Return the marks without those whose module lies on the stage of the one before it: they are one chunk."""
    if not has_explicit_stages(points):
        return tuple(points)
    return tuple(next(group) for _, group in groupby(points, key=lambda mark: mark.stage))


def count_blocks_per_chunk(points: Sequence[SplitPoint], model: ModelSpec, owner: str) -> tuple[int, ...]:
    """Return how many blocks each chunk has.

    Raises:
        PlanError: no block begins with a module, modules are out of order, or a chunk has no work or no parameters.
    """
    places = {"": 0, **_module_starts(model)}
    names = [*([] if has_explicit_stages(points) else [""]), *(mark.module for mark in points)]
    heads = [places.get(names[0], 0), *(_find_start(name, places, owner) for name in names[1:])]
    if heads[0]:
        raise PlanError(
            f"split_points of {owner} begins with {names[0]!r}, but the model begins with {_first_module(places)!r}, which lies on no "
            f"stage then; tell its stage, too: split_points={_first_module(places)}:0+..."
        )
    _check_order(names, heads, owner)
    stops = [*heads[1:], model.num_blocks]
    for name, start, stop in zip(names, heads, stops, strict=True):
        if not any(block.params for block in model.blocks[start:stop]):
            until = f" up to {names[heads.index(stop)]!r}" if stop in heads else ""
            raise PlanError(
                f"split_points of {owner} leaves no parameters between {name or _first_module(places)!r}{until}; every stage trains "
                "some: leave out one of the two cuts, or begin with another module"
            )
    return tuple(stop - start for start, stop in zip(heads, stops, strict=True))


def _check_order(names: Sequence[str], starts: Sequence[int], owner: str) -> None:
    for (before, start), (behind, stop) in pairwise(zip(names, starts, strict=True)):
        if start == stop:
            what = (
                f"{before!r} and {behind!r} begin at the same place" if before else f"the model begins with {behind!r}"
            )
            raise PlanError(
                f"split_points of {owner}: {what}, so that a stage would have no work; leave out {behind!r}, or name a module "
                "further on"
            )
        if start > stop:
            right = "+".join(name for _, name in sorted(zip(starts, names, strict=True)) if name)
            raise PlanError(
                f"split_points of {owner} are out of order: {behind!r} runs before {before!r}; write split_points={right}"
            )


def _module_starts(model: ModelSpec) -> Mapping[str, int]:
    """Return at which block each module begins that a block begins with."""
    places: dict[str, int] = {}
    for index, block in enumerate(model.blocks):
        for name in (*block.layers[0].modules_started, block.layers[0].name):
            places.setdefault(name, index)
    return places


def _find_start(name: str, starts: Mapping[str, int], owner: str) -> int:
    if name in starts:
        return starts[name]
    near = difflib.get_close_matches(name, [place for place in starts if place], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(_outermost_modules(starts))
    raise PlanError(
        f"split_points of {owner} names {name!r}, with which no block begins; {hint}blocks begin with {known}"
    )


def _outermost_modules(starts: Mapping[str, int]) -> list[str]:
    """Return for each block the outermost module that it begins with."""
    heads: dict[int, str] = {}
    for name, at in starts.items():
        if name:
            heads.setdefault(at, name)
    return [heads[at] for at in sorted(heads)]


def _first_module(starts: Mapping[str, int]) -> str:
    return next(name for name, at in starts.items() if name and not at)


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")
