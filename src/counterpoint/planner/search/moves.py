"""Proposals: the ways in which one thing of a configuration may be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias, TypeVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.planner.search.configuration import Configuration
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.recomputation import WHEN
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero

_Any = TypeVar("_Any")

ORDERS = (("one_f_one_b", 1), ("gpipe", 1), ("zero_bubble", 1), ("zero_bubble", 2), ("interleaved", 2))
"""The orders that are tried, each with so many chunks per stage; all of them keep the numbers."""
MOST_MICROBATCHES_PER_STAGE = 8
MOST_TRIES = 64
"""So often a proposal is drawn again that changes nothing or cannot be."""


@dataclass(frozen=True, slots=True)
class Space:
    """What there is to choose from.

    Args:
        model: the model in its finest blocks.
        num_ranks: ranks there are; every configuration takes all of them.
        batch_size: samples of one global batch.
        passes: what is done to every program besides.
        dims: names of the dims that may be sliced; empty for none.
        codes: in which gradients may be summed between copies; none but ``""`` keeps the numbers.
    """

    model: ModelSpec
    num_ranks: int
    batch_size: int
    passes: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    codes: tuple[str, ...] = ("",)

    @staticmethod
    def of(model: ModelSpec, num_ranks: int, batch_size: int, passes: tuple[str, ...] = ()) -> Space:
        """Return all there is to choose from that keeps the numbers: every dim of the model may be sliced.

        Of a model that is cut otherwise where it is sliced, nothing is.
        """
        pieces = model.pieces if model.chained is None else ()
        dims = sorted({piece.split.dim for piece in pieces if piece.split is not None})
        return Space(model.unsliced, num_ranks, batch_size, passes, tuple(dims))

    @property
    def rules(self) -> tuple[tuple[str, ...], ...]:
        """What may be sliced together: each dim alone, and all, written as :class:`Tensor` has them by default."""
        together = tuple(sorted(self.dims, key=lambda dim: (dim not in Tensor(1).dims, dim)))
        every = Tensor(1).dims if set(together) == set(Tensor(1).dims) else together
        alone = tuple((dim,) for dim in self.dims)
        return (*alone, every) if len(self.dims) > 1 else alone


Move: TypeAlias = Callable[[Configuration, Space, Random], Configuration]
"""Returns the configuration with one thing changed, or as it is where that cannot be."""


def propose(now: Configuration, space: Space, draw: Random, *, saves_memory: bool = True) -> Configuration:
    """Return a configuration that differs in one thing, drawn at random, and in what that thing forces to change.

    It takes all ranks, and its microbatches divide the batch. That a program can be made of it is not proved. A change
    and its opposite need not be equally likely.

    Args:
        now: where the search stands.
        space: what there is to choose from.
        draw: where chance comes from.
        saves_memory: whether more may be computed again, which makes no step faster by itself.
    """
    weights = MOVES | SAVING if saves_memory else MOVES
    for _ in range(MOST_TRIES):
        (move,) = draw.choices([*weights], [*weights.values()])
        try:
            found = _fitted(move(now, space, draw), space)
            if found is not None and found.plan(space.model, space.passes) != now.plan(space.model, space.passes):
                return found
        except PlanError:
            continue
    return now


def move_a_cut(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Let a chunk of a stage begin some blocks earlier or later."""
    if now.stages.degree == 1:
        return now
    counts = list(now.counts(space.model))
    at = draw.randrange(len(counts) - 1)
    by = draw.choice((-2, -1, -1, 1, 1, 2))
    counts[at] += by
    counts[at + 1] -= by
    return now.with_counts(counts) if min(counts) > 0 else now


def cut_evenly(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Leave it to the pipeline where its stages begin, which may then be inside of blocks."""
    return now.with_counts(())


def change_stages(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Take more or fewer stages, and as many copies as then fill the ranks."""
    room = space.num_ranks // now.slices.degree
    degree = _other([*_divisors(room)], now.stages.degree, draw)
    return _filled(replace(now, stages=_with_stages(now.stages, degree)), space)


def move_a_replica(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Give one stage a replica of another one, or of a copy of them all."""
    stages = now.stages
    if stages.degree == 1 or stages.virtual > 1:
        return now
    ranks = [*stages.stage_ranks]
    if len(set(ranks)) == 1:  # all copies become replicas of stages
        ranks = [space.num_ranks // (now.slices.degree * stages.degree)] * stages.degree
        now = replace(now, shards=replace(now.shards, degree=1), copies=replace(now.copies, degree=1))
    give, take = draw.sample(range(stages.degree), 2)
    ranks[give] -= 1
    ranks[take] += 1
    if len(set(ranks)) == 1:
        return _filled(replace(now, stages=replace(stages, replicas=())), space)
    return replace(now, stages=replace(stages, replicas=tuple(ranks)))


def keep_a_block(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Keep what the backward of a block needs that has been computed again, or those of all stages."""
    if not now.recomputed:
        return replace(now, stages=replace(now.stages, recompute="never"))
    return replace(now, recomputed=now.recomputed - {draw.choice(sorted(now.recomputed))})


def recompute_a_block(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Compute the forward of a block again."""
    left = [block for block in range(space.model.num_blocks) if block not in now.recomputed]
    more = {draw.choice(left)} if left else set()
    return replace(now, stages=replace(now.stages, recompute="never"), recomputed=now.recomputed | more)


def recompute_a_stage(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Compute the forwards of all blocks of a stage again, at once or block by block, or of none."""
    if draw.random() < 1 / 2 or now.stages.degree == 1:
        everything = frozenset(range(space.model.num_blocks))
        return replace(
            now,
            stages=replace(now.stages, recompute="never"),
            recomputed=frozenset() if now.recomputed else everything,
        )
    when = _other(WHEN, now.stages.recompute, draw)
    return replace(now, stages=replace(now.stages, recompute=when), recomputed=frozenset())


def change_slices(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Slice layers into more or fewer, or along other dims."""
    if not space.dims:
        return now
    room = space.num_ranks // sum(now.stages.stage_ranks)
    choices = [Tensor(degree, dims) for degree in _divisors(room) if degree > 1 for dims in space.rules]
    return _filled(now.recut(_other([Tensor(1), *choices], now.slices, draw), space.model), space)


def change_shards(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Let more or fewer of the copies share out more or less of what they hold."""
    copies = now.shards.degree * now.copies.degree
    choices = [Zero(degree, level) for degree in _divisors(copies) if degree > 1 for level in (1, 2, 3)]
    shards = _other([Zero(1), *choices], now.shards, draw)
    return replace(now, shards=shards, copies=replace(now.copies, degree=copies // shards.degree))


def change_microbatches(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Cut the batch of a copy into more or fewer microbatches."""
    choices = [*_microbatches(now, space)]
    return replace(now, num_microbatches=_other(choices, now.num_microbatches, draw))


def change_order(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Take microbatches up in another sequence, on more or fewer chunks of each stage."""
    stages = now.stages
    if stages.degree == 1:
        return now
    order, virtual = _other(ORDERS, (stages.order, stages.virtual), draw)
    if virtual == stages.virtual:
        return replace(now, stages=replace(stages, order=order))
    return _filled(replace(now, stages=Pipeline(stages.degree, order, virtual=virtual)), space)


def change_code(now: Configuration, space: Space, draw: Random) -> Configuration:
    """Sum gradients between copies in another code."""
    return replace(now, copies=replace(now.copies, compress=_other(space.codes, now.copies.compress, draw)))


MOVES: dict[Move, int] = {
    move_a_cut: 5,
    keep_a_block: 2,
    cut_evenly: 1,
    change_stages: 1,
    move_a_replica: 1,
    change_slices: 1,
    change_shards: 1,
    change_microbatches: 1,
    change_order: 1,
    change_code: 1,
}
"""Each kind of change with how likely it is beside the others: about as likely to be of single blocks as of all."""
SAVING: dict[Move, int] = {recompute_a_block: 4, recompute_a_stage: 1}
"""What only saves memory."""


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _other(choices: Sequence[_Any], now: _Any, draw: Random) -> _Any:
    """Return one of the choices that is not the present one, or that where there is none."""
    others = [choice for choice in choices if choice != now]
    return draw.choice(others) if others else now


def _with_stages(stages: Pipeline, degree: int) -> Pipeline:
    """Return the pipeline with so many stages, cut and replicated anew."""
    if degree == 1:
        return Pipeline(1)
    return Pipeline(degree, stages.order, virtual=stages.virtual, recompute=stages.recompute)


def _filled(now: Configuration, space: Space) -> Configuration:
    """Return the configuration with as many copies as fill the ranks; as many of them share out as did, if they can."""
    copies, rest = divmod(space.num_ranks, now.slices.degree * sum(now.stages.stage_ranks))
    if rest or not copies:
        return replace(now, stages=Pipeline(1)) if now.stages.replicas else now
    shards = now.shards.degree if copies % now.shards.degree == 0 else copies
    return replace(now, shards=replace(now.shards, degree=shards), copies=replace(now.copies, degree=copies // shards))


def _microbatches(now: Configuration, space: Space) -> Iterator[int]:
    """Yield the numbers of microbatches that the batch and the replicas allow."""
    samples, rest = divmod(space.batch_size, now.shards.degree * now.copies.degree)
    most = MOST_MICROBATCHES_PER_STAGE * now.stages.degree
    if not rest:
        counts = (count for count in range(1, min(samples, most) + 1) if samples % count == 0)
        yield from (count for count in counts if now.stages.microbatches(count) == count)


def _fitted(found: Configuration, space: Space) -> Configuration | None:
    """Return the configuration with the number of microbatches that is possible and next to its own; None for none.

    It must take all ranks.
    """
    if found.plan(space.model).num_ranks != space.num_ranks:
        return None
    own = found.num_microbatches
    counts = sorted(_microbatches(found, space), key=lambda count: (abs(count - own), count))
    return replace(found, num_microbatches=counts[0]) if counts else None
