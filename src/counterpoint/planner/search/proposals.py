"""Proposals: the ways in which one thing of a configuration may be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias, TypeVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.planner.search.configuration import SearchConfiguration
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RECOMPUTE_MODES
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero

_Any = TypeVar("_Any")

SCHEDULES = (("one_f_one_b", 1), ("gpipe", 1), ("zero_bubble", 1), ("zero_bubble", 2), ("interleaved", 2))
"""The orders that are tried, each with so many chunks per stage; all of them keep the numbers."""
MAX_MICROBATCHES_PER_STAGE = 8
MAX_TRIES = 64
"""So often a proposal is drawn again that changes nothing or cannot be."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
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
    codecs: tuple[str, ...] = ("",)

    @staticmethod
    def for_model(model: ModelSpec, num_ranks: int, batch_size: int, passes: tuple[str, ...] = ()) -> SearchSpace:
        """Return all there is to choose from that keeps the numbers: every dim of the model may be sliced.

        Of a model that is cut otherwise where it is sliced, nothing is.
        """
        pieces = model.layers if model.variant_without_tp is None else ()
        dims = sorted({piece.tp.dim for piece in pieces if piece.tp is not None})
        return SearchSpace(model.without_tp, num_ranks, batch_size, passes, tuple(dims))

    @property
    def dim_choices(self) -> tuple[tuple[str, ...], ...]:
        """What may be sliced together: each dim alone, and all, written as :class:`Tensor` has them by default."""
        together = tuple(sorted(self.dims, key=lambda dim: (dim not in Tensor(1).dims, dim)))
        every = Tensor(1).dims if set(together) == set(Tensor(1).dims) else together
        alone = tuple((dim,) for dim in self.dims)
        return (*alone, every) if len(self.dims) > 1 else alone


Proposal: TypeAlias = Callable[[SearchConfiguration, SearchSpace, Random], SearchConfiguration]
"""Returns the configuration with one thing changed, or as it is where that cannot be."""


def propose(
    current: SearchConfiguration, space: SearchSpace, rng: Random, *, saves_memory: bool = True
) -> SearchConfiguration:
    """Return a configuration that differs in one thing, drawn at random, and in what that thing forces to change.

    It takes all ranks, and its microbatches divide the batch. That a program can be made of it is not proved. A change
    and its opposite need not be equally likely.

    Args:
        now: where the search stands.
        space: what there is to choose from.
        draw: where chance comes from.
        saves_memory: whether more may be computed again, which makes no step faster by itself.
    """
    weights = PROPOSALS | MEMORY_PROPOSALS if saves_memory else PROPOSALS
    for _ in range(MAX_TRIES):
        (move,) = rng.choices([*weights], [*weights.values()])
        try:
            found = _fit_microbatches(move(current, space, rng), space)
            if found is not None and found.plan(space.model, space.passes) != current.plan(space.model, space.passes):
                return found
        except PlanError:
            continue
    return current


def move_boundary(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Let a chunk of a stage begin some blocks earlier or later."""
    if current.pipeline.degree == 1:
        return current
    counts = list(current.blocks_per_chunk(space.model))
    at = rng.randrange(len(counts) - 1)
    by = rng.choice((-2, -1, -1, 1, 1, 2))
    counts[at] += by
    counts[at + 1] -= by
    return current.with_balance(counts) if min(counts) > 0 else current


def clear_balance(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Leave it to the pipeline where its stages begin, which may then be inside of blocks."""
    return current.with_balance(())


def change_stages(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Take more or fewer stages, and as many copies as then fill the ranks."""
    room = space.num_ranks // current.tensor.degree
    degree = _choose_other([*_divisors(room)], current.pipeline.degree, rng)
    return _fill_ranks(replace(current, stages=_resize_pipeline(current.pipeline, degree)), space)


def move_replica(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Give one stage a replica of another one, or of a copy of them all."""
    stages = current.pipeline
    if stages.degree == 1 or stages.chunks_per_stage > 1:
        return current
    ranks = [*stages.stage_ranks]
    if len(set(ranks)) == 1:  # all copies become replicas of stages
        ranks = [space.num_ranks // (current.tensor.degree * stages.degree)] * stages.degree
        current = replace(current, shards=replace(current.zero, degree=1), copies=replace(current.data, degree=1))
    give, take = rng.sample(range(stages.degree), 2)
    ranks[give] -= 1
    ranks[take] += 1
    if len(set(ranks)) == 1:
        return _fill_ranks(replace(current, stages=replace(stages, replicas=())), space)
    return replace(current, stages=replace(stages, replicas=tuple(ranks)))


def keep_block(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Keep what the backward of a block needs that has been computed again, or those of all stages."""
    if not current.recomputed:
        return replace(current, stages=replace(current.pipeline, recompute="never"))
    return replace(current, recomputed=current.recomputed - {rng.choice(sorted(current.recomputed))})


def recompute_block(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Compute the forward of a block again."""
    left = [block for block in range(space.model.num_blocks) if block not in current.recomputed]
    more = {rng.choice(left)} if left else set()
    return replace(current, stages=replace(current.pipeline, recompute="never"), recomputed=current.recomputed | more)


def recompute_stage(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Compute the forwards of all blocks of a stage again, at once or block by block, or of none."""
    if rng.random() < 1 / 2 or current.pipeline.degree == 1:
        everything = frozenset(range(space.model.num_blocks))
        return replace(
            current,
            stages=replace(current.pipeline, recompute="never"),
            recomputed=frozenset() if current.recomputed else everything,
        )
    when = _choose_other(RECOMPUTE_MODES, current.pipeline.recompute, rng)
    return replace(current, stages=replace(current.pipeline, recompute=when), recomputed=frozenset())


def change_tensor(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Slice layers into more or fewer, or along other dims."""
    if not space.dims:
        return current
    room = space.num_ranks // sum(current.pipeline.stage_ranks)
    choices = [Tensor(degree, dims) for degree in _divisors(room) if degree > 1 for dims in space.dim_choices]
    return _fill_ranks(
        current.with_tensor(_choose_other([Tensor(1), *choices], current.tensor, rng), space.model), space
    )


def change_zero(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Let more or fewer of the copies share out more or less of what they hold."""
    copies = current.zero.degree * current.data.degree
    choices = [Zero(degree, level) for degree in _divisors(copies) if degree > 1 for level in (1, 2, 3)]
    shards = _choose_other([Zero(1), *choices], current.zero, rng)
    return replace(current, shards=shards, copies=replace(current.data, degree=copies // shards.degree))


def change_microbatches(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Cut the batch of a copy into more or fewer microbatches."""
    choices = [*_allowed_microbatches(current, space)]
    return replace(current, num_microbatches=_choose_other(choices, current.num_microbatches, rng))


def change_schedule(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Take microbatches up in another sequence, on more or fewer chunks of each stage."""
    stages = current.pipeline
    if stages.degree == 1:
        return current
    order, virtual = _choose_other(SCHEDULES, (stages.schedule, stages.chunks_per_stage), rng)
    if virtual == stages.chunks_per_stage:
        return replace(current, stages=replace(stages, order=order))
    return _fill_ranks(replace(current, stages=Pipeline(stages.degree, order, chunks_per_stage=virtual)), space)


def change_codec(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Sum gradients between copies in another code."""
    return replace(
        current, copies=replace(current.data, compress=_choose_other(space.codecs, current.data.compress, rng))
    )


PROPOSALS: dict[Proposal, int] = {
    move_boundary: 5,
    keep_block: 2,
    clear_balance: 1,
    change_stages: 1,
    move_replica: 1,
    change_tensor: 1,
    change_zero: 1,
    change_microbatches: 1,
    change_schedule: 1,
    change_codec: 1,
}
"""Each kind of change with how likely it is beside the others: about as likely to be of single blocks as of all."""
MEMORY_PROPOSALS: dict[Proposal, int] = {recompute_block: 4, recompute_stage: 1}
"""What only saves memory."""


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _choose_other(choices: Sequence[_Any], now: _Any, rng: Random) -> _Any:
    """Return one of the choices that is not the present one, or that where there is none."""
    others = [choice for choice in choices if choice != now]
    return rng.choice(others) if others else now


def _resize_pipeline(stages: Pipeline, degree: int) -> Pipeline:
    """Return the pipeline with so many stages, cut and replicated anew."""
    if degree == 1:
        return Pipeline(1)
    return Pipeline(degree, stages.schedule, chunks_per_stage=stages.chunks_per_stage, recompute=stages.recompute)


def _fill_ranks(current: SearchConfiguration, space: SearchSpace) -> SearchConfiguration:
    """Return the configuration with as many copies as fill the ranks; as many of them share out as did, if they can."""
    copies, rest = divmod(space.num_ranks, current.tensor.degree * sum(current.pipeline.stage_ranks))
    if rest or not copies:
        return replace(current, stages=Pipeline(1)) if current.pipeline.replicas else current
    shards = current.zero.degree if copies % current.zero.degree == 0 else copies
    return replace(
        current, shards=replace(current.zero, degree=shards), copies=replace(current.data, degree=copies // shards)
    )


def _allowed_microbatches(current: SearchConfiguration, space: SearchSpace) -> Iterator[int]:
    """Yield the numbers of microbatches that the batch and the replicas allow."""
    samples, rest = divmod(space.batch_size, current.zero.degree * current.data.degree)
    most = MAX_MICROBATCHES_PER_STAGE * current.pipeline.degree
    if not rest:
        counts = (count for count in range(1, min(samples, most) + 1) if samples % count == 0)
        yield from (count for count in counts if current.pipeline.usable_microbatches(count) == count)


def _fit_microbatches(found: SearchConfiguration, space: SearchSpace) -> SearchConfiguration | None:
    """Return the configuration with the number of microbatches that is possible and next to its own; None for none.

    It must take all ranks.
    """
    if found.plan(space.model).num_ranks != space.num_ranks:
        return None
    own = found.num_microbatches
    counts = sorted(_allowed_microbatches(found, space), key=lambda count: (abs(count - own), count))
    return replace(found, num_microbatches=counts[0]) if counts else None
