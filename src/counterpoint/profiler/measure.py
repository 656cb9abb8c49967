"""Seconds and bytes of every piece of a model, measured on real tensors as the runtime runs them.

Pieces are timed one by one, in the order in which a step comes to them, each in a call of its own. A stage runs its
blocks in one call; so the cost of a call is taken off, and what is left is brought to what all pieces take in one call.
The model as it is, which plans that cut nothing run, is timed in whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from statistics import fmean, median

import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.cutting.choose import cut_model
from counterpoint.model.spec import Unit
from counterpoint.model.timing import Fixed, Machine, PieceTime, Point, Timing, known_pieces, known_weights
from counterpoint.profiler.kept import kept_bytes
from counterpoint.profiler.subject import Bench, Subject, set_up
from counterpoint.profiler.watch import Clock, Repetition, as_in_training, clock_of, medians
from counterpoint.program.instruction import Backward, Forward, Instruction, Update
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.shares import Shares

LAYERS, WIDTH = 8, 4
"""The model that shows what calls cost: so small that it takes nothing else."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step on one rank: a microbatch forward, the first backward, what later ones take more, the rest.

    The update is one call, and so are a forward and a backward.
    """

    forward_s: float
    backward_s: float
    added_s: float
    update_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of each piece in a call of its own: forward, backward, a second one, and the two parts of a backward."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    again_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]


def measure(subject: Subject, device: str, *, samples: Sequence[int], threads: int, effort: Repetition) -> Timing:
    """Return how long the pieces of a model take; the model stays as it is.

    Args:
        subject: what is timed.
        device: its name.
        samples: sizes of microbatches.
        threads: to compute with.
        effort: for each size, how often.

    Cost:
        For each size eleven microbatches forward and backward times the repetitions, two more where batch norm keeps
        statistics, and memory for two more copies of its parameters.
    """
    sizes = sorted(set(samples))
    with as_in_training(threads):
        bench, clock = set_up(subject, sizes[0]), clock_of(subject.device)
        calls = call_costs(subject.device, effort)
        found = [_at(bench, subject, size, calls, effort) for size in sizes]
        split_s, whole_s = _updates(bench, subject.feed(sizes[0]), clock, effort)
        add_s = _adding(list(bench.pieces.store.params.values()), clock, effort)
    update_s = median(step.update_s for _, step, _ in found)
    fixed_s = max(0.0, min(sum(split_s) - whole_s, *split_s, update_s)) if len(split_s) > 1 else 0.0
    weights = known_weights(subject.spec)
    return Timing(
        model=type(subject.model).__name__,
        pieces=known_pieces(subject.spec),
        weights=weights,
        machine=Machine(device, threads, subject.face.kind.__name__),
        points=tuple(point for point, _, _ in found),
        update_s_per_byte=(update_s - fixed_s) / sum(size for _, size in weights),
        add_s_per_byte=add_s / sum(size for _, size in weights),
        fixed=Fixed(
            calls.forward_s,
            calls.backward_s,
            fixed_s,
            median(step.rest_s for _, step, _ in found),
            median(alone.rest_s for _, _, alone in found),
        ),
    )


def call_costs(device: torch.device, effort: Repetition) -> Fixed:
    """Return what a call costs beside its work: what many layers take in a call each more than in one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    face = Face(partial(optim.SGD, lr=0.0), dict(model.named_parameters()))
    inputs, targets = torch.zeros(1, WIDTH, device=device), torch.zeros(1, WIDTH, device=device)
    cut = cut_model(model, (inputs,), need="chain")
    tiny = Subject(model, cut, cut.spec, F.mse_loss, face, (inputs, targets))
    bench, feed, clock = set_up(tiny, 1), tiny.feed(1), clock_of(device)
    rows = effort.repeat(lambda: (take_step(bench.pieces, feed, clock), take_lap(bench, feed, clock)))
    forward_s = median(sum(lap.forward_s) - step.forward_s for step, lap in rows)
    backward_s = median(sum(lap.backward_s) - step.backward_s for step, lap in rows)
    return Fixed(max(forward_s, 0.0) / (LAYERS - 1), max(backward_s, 0.0) / (LAYERS - 1))


def _at(bench: Bench, subject: Subject, samples: int, calls: Fixed, effort: Repetition) -> tuple[Point, Step, Step]:
    """Return what microbatches of one size take, and steps of the model as it is, of several and of one."""
    feed, clock = subject.feed(samples), clock_of(subject.device)
    one = subject.feed(samples, 1)

    def turn() -> tuple[Step, Step, Step, Lap]:
        whole = take_again(bench.whole, feed, clock)
        alone = whole if bench.alone is bench.whole else take_again(bench.alone, one, clock)
        return whole, alone, take_again(bench.pieces, feed, clock), take_lap(bench, feed, clock)

    rows = effort.repeat(turn)
    wholes, singles, cuts, laps = zip(*rows, strict=True)
    whole, alone, cut = _median_step(wholes), _median_step(singles), _median_step(cuts)
    forward_s, _ = brought_to([lap.forward_s for lap in laps], calls.forward_s, cut.forward_s)
    backward_s, factor = brought_to([lap.backward_s for lap in laps], calls.backward_s, cut.backward_s)
    input_s = [factor * max(each - calls.backward_s, 0.0) for each in medians([lap.input_s for lap in laps])]
    weight_s = [factor * each for each in medians([lap.weight_s for lap in laps])]
    both = zip(medians([lap.again_s for lap in laps]), medians([lap.backward_s for lap in laps]), strict=True)
    added_s = [factor * (again - first) for again, first in both]
    sizes = [float(samples * piece.output_bytes) for piece in subject.spec.pieces]
    kept = map(float, kept_bytes(bench.apart, feed))
    pieces = tuple(map(PieceTime, forward_s, backward_s, input_s, weight_s, sizes, kept, added_s))
    share = sum(input_s) / (sum(input_s) + sum(weight_s) or 1.0)
    (kept_whole,) = kept_bytes(bench.whole.compute, feed)

    def total(step: Step) -> PieceTime:
        forward, backward = max(step.forward_s - calls.forward_s, 0.0), max(step.backward_s - calls.backward_s, 0.0)
        parts = share * backward, (1 - share) * backward
        return PieceTime(forward, backward, *parts, sizes[-1], float(kept_whole), step.added_s)

    return Point(samples, pieces, total(whole), total(alone)), whole, alone


def brought_to(laps: Sequence[Sequence[float]], call_s: float, whole_s: float) -> tuple[list[float], float]:
    """Return the seconds of pieces, medians without the call of each, that add up to what one call takes, and a factor.

    Args:
        laps: of each piece, in a call of its own.
        call_s: what a call costs.
        whole_s: all pieces in one call.

    Example:
        >>> brought_to([[3.0, 5.0]], 1.0, 10.0)
        ([3.0, 6.0], 1.5)
    """
    own = [max(each - call_s, 0.0) for each in medians(laps)]
    factor = max(whole_s - call_s, 0.0) / (sum(own) or 1.0)
    return [factor * each for each in own], factor


def take_step(interpreter: Interpreter, feed: Feed, clock: Clock) -> Step:
    """Take a step and return its seconds."""
    interpreter.clock = clock
    began = clock()
    interpreter.step(0, feed, next(reversed(interpreter.scripts)))
    total = clock() - began
    taken: dict[type[Instruction], list[float]] = {Forward: [], Backward: [], Update: []}
    for note in interpreter.state.notes:
        kind = type(interpreter.script.words[note.start])
        if kind in taken:
            taken[kind].append(note.stop_s - note.start_s)
    first_s, *later_s = taken[Backward]
    added_s = fmean(later_s) - first_s if later_s else 0.0
    return Step(fmean(taken[Forward]), first_s, added_s, sum(taken[Update]), total - sum(map(sum, taken.values())))


def take_again(interpreter: Interpreter, feed: Feed, clock: Clock) -> Step:
    """Take two steps and return the seconds of the second, which finds in the caches what the first has left there."""
    take_step(interpreter, feed, clock)
    return take_step(interpreter, feed, clock)


def take_lap(bench: Bench, feed: Feed, clock: Clock) -> Lap:
    """Run all pieces with backwards in two parts, then two microbatches forward and backward; each in its own call."""
    apart, parts = bench.apart, bench.parts
    order = sorted(apart.by_first)
    _forwards(bench, parts, feed, clock)
    input_s = [_took(clock, partial(parts.backward_input, block, block, 0)) for block in reversed(order)]
    weight_s = [_took(clock, partial(parts.backward_weight, block, block, 0)) for block in reversed(order)]
    forward_s = _forwards(bench, apart, feed, clock)
    backward_s = [_took(clock, partial(apart.backward, block, block, 0)) for block in reversed(order)]
    for block in order:
        apart.forward(block, block, 1)
    again_s = [_took(clock, partial(apart.backward, block, block, 1)) for block in reversed(order)]
    bench.pieces.store.clear()
    return Lap(forward_s, backward_s[::-1], again_s[::-1], input_s[::-1], weight_s[::-1])


def _forwards(bench: Bench, compute: Compute, feed: Feed, clock: Clock) -> list[float]:
    """Begin a step and run all pieces forward; return the seconds of each."""
    bench.pieces.store.clear()
    bench.pieces.store.begin()
    compute.begin(feed, Shares(dict.fromkeys(range(len(feed.sizes)), 1.0)))
    return [_took(clock, partial(compute.forward, block, block, 0)) for block in sorted(compute.by_first)]


def _updates(bench: Bench, feed: Feed, clock: Clock, effort: Repetition) -> tuple[list[float], float]:
    """Return the seconds of updates in two calls, if there is something for each, and of all in one."""
    interpreter = bench.pieces
    units = tuple(interpreter.store.units)
    halves = [half for half in (units[: len(units) // 2], units[len(units) // 2 :]) if half]

    def update(groups: Sequence[tuple[Unit, ...]]) -> list[float]:
        _forwards(bench, bench.apart, feed, clock)
        for block in reversed(range(bench.num_pieces)):
            bench.apart.backward(block, block, 0)
        for unit in interpreter.computed:
            interpreter.store.units[unit].fill()
        return [_took(clock, partial(interpreter.update, group)) for group in groups]

    rows = effort.repeat(lambda: (*update(halves), *update([units])))
    *split_s, whole_s = medians(rows)
    return split_s, whole_s


def _adding(params: Sequence[nn.Parameter], clock: Clock, effort: Repetition) -> float:
    """Return the seconds in which a gradient of all parameters is added to another one."""
    held, fresh = ([torch.zeros_like(param) for param in params if param.requires_grad] for _ in range(2))

    def add() -> None:
        for into, more in zip(held, fresh, strict=True):
            into.add_(more)

    return median(effort.repeat(partial(_took, clock, add)))


def _took(clock: Clock, work: Callable[[], object]) -> float:
    began = clock()
    work()
    return clock() - began


def _median_step(steps: Sequence[Step]) -> Step:
    return Step(*medians([astuple(one) for one in steps]))
