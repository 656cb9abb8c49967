"""Proposals of the search: the ways in which one thing of a configuration can be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias, TypeVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.planner.search.configuration import SearchConfiguration
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.registry import SCHEDULES
from counterpoint.strategies.recomputation import RECOMPUTE_MODES
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero

_Any = TypeVar("_Any")

MAX_MICROBATCHES_PER_STAGE = 8
MAX_TRIES = 64
"""How often a proposal is redrawn that changes nothing or is impossible."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The configurations of a search.

    Args:
        model: the model in its finest blocks.
        num_ranks: every configuration uses all of them.
        batch_size: samples of one global batch.
        passes: other passes of every plan.
        dims: names of the dims that tensor parallelism may split; empty for none.
        codecs: compression of gradients between replicas; all but ``""`` are lossy.
    """

    model: ModelSpec
    num_ranks: int
    batch_size: int
    passes: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ("",)

    @staticmethod
    def for_model(model: ModelSpec, num_ranks: int, batch_size: int, passes: tuple[str, ...] = ()) -> SearchSpace:
        """Return the space of all lossless configurations: every dim of the model may be split.

        Tensor parallelism is excluded for a model that is partitioned differently with it.
        """
        layers = model.layers if model.variant_without_tp is None else ()
        dims = sorted({layer.tp.dim for layer in layers if layer.tp is not None})
        return SearchSpace(model.without_tp, num_ranks, batch_size, passes, tuple(dims))

    @property
    def dim_choices(self) -> tuple[tuple[str, ...], ...]:
        """Dims that may be split together: each alone, and all of them in the default order of :class:`Tensor`."""
        ordered = tuple(sorted(self.dims, key=lambda dim: (dim not in Tensor(1).dims, dim)))
        all_dims = Tensor(1).dims if set(ordered) == set(Tensor(1).dims) else ordered
        single_dims = tuple((dim,) for dim in self.dims)
        return (*single_dims, all_dims) if len(self.dims) > 1 else single_dims


Proposal: TypeAlias = Callable[[SearchConfiguration, SearchSpace, Random], SearchConfiguration]
"""Returns the configuration with one thing changed, or unchanged if that is impossible."""


def propose(
    current: SearchConfiguration, space: SearchSpace, rng: Random, *, saves_memory: bool = True
) -> SearchConfiguration:
    """Return a configuration that differs in one random thing, and in what that forces to change.

    It uses all ranks, and its microbatches divide the batch; whether it can be compiled is not checked. A change and
    its inverse need not be equally likely.

    Args:
        current: the present configuration.
        space: the configurations of the search.
        rng: source of randomness.
        saves_memory: whether to propose recomputation, which by itself makes no step faster.
    """
    weights = PROPOSALS | MEMORY_PROPOSALS if saves_memory else PROPOSALS
    for _ in range(MAX_TRIES):
        (proposal,) = rng.choices([*weights], [*weights.values()])
        try:
            proposed = _fit_microbatches(proposal(current, space, rng), space)
            if proposed is not None and proposed.plan(space.model, space.passes) != current.plan(
                space.model, space.passes
            ):
                return proposed
        except PlanError:
            continue
    return current


def move_boundary(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Let a chunk of a stage start some blocks earlier or later."""
    if current.pipeline.degree == 1:
        return current
    counts = list(current.blocks_per_chunk(space.model))
    chunk = rng.randrange(len(counts) - 1)
    shift = rng.choice((-2, -1, -1, 1, 1, 2))
    counts[chunk] += shift
    counts[chunk + 1] -= shift
    return current.with_balance(counts) if min(counts) > 0 else current


def clear_balance(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Let the pipeline choose its default partition, which may split blocks."""
    return current.with_balance(())


def change_stages(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Change the number of stages, and fill the ranks with replicas."""
    num_available = space.num_ranks // current.tensor.degree
    degree = _choose_other([*_divisors(num_available)], current.pipeline.degree, rng)
    return _fill_ranks(replace(current, pipeline=_resize_pipeline(current.pipeline, degree)), space)


def move_replica(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Move a replica from one stage to another; equal replicas become replicas of the whole pipeline."""
    pipeline = current.pipeline
    if pipeline.degree == 1 or pipeline.chunks_per_stage > 1:
        return current
    ranks = [*pipeline.stage_ranks]
    if len(set(ranks)) == 1:  # replicas of the whole pipeline become replicas of stages
        ranks = [space.num_ranks // (current.tensor.degree * pipeline.degree)] * pipeline.degree
        current = replace(current, zero=replace(current.zero, degree=1), data=replace(current.data, degree=1))
    donor, recipient = rng.sample(range(pipeline.degree), 2)
    ranks[donor] -= 1
    ranks[recipient] += 1
    if len(set(ranks)) == 1:
        return _fill_ranks(replace(current, pipeline=replace(pipeline, replicas=())), space)
    return replace(current, pipeline=replace(pipeline, replicas=tuple(ranks)))


def keep_block(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Stop recomputing a block, or all stages."""
    if not current.recomputed:
        return replace(current, pipeline=replace(current.pipeline, recompute="never"))
    return replace(current, recomputed=current.recomputed - {rng.choice(sorted(current.recomputed))})


def recompute_block(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Recompute the forward of one more block."""
    candidates = [block for block in range(space.model.num_blocks) if block not in current.recomputed]
    added = {rng.choice(candidates)} if candidates else set()
    return replace(
        current, pipeline=replace(current.pipeline, recompute="never"), recomputed=current.recomputed | added
    )


def recompute_stage(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Recompute the forwards of all blocks of a stage, at once or block by block, or of none."""
    if rng.random() < 1 / 2 or current.pipeline.degree == 1:
        everything = frozenset(range(space.model.num_blocks))
        return replace(
            current,
            pipeline=replace(current.pipeline, recompute="never"),
            recomputed=frozenset() if current.recomputed else everything,
        )
    mode = _choose_other(RECOMPUTE_MODES, current.pipeline.recompute, rng)
    return replace(current, pipeline=replace(current.pipeline, recompute=mode), recomputed=frozenset())


def change_tensor(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Change the degree or the dims of tensor parallelism."""
    if not space.dims:
        return current
    num_available = space.num_ranks // sum(current.pipeline.stage_ranks)
    choices = [Tensor(degree, dims) for degree in _divisors(num_available) if degree > 1 for dims in space.dim_choices]
    return _fill_ranks(
        current.with_tensor(_choose_other([Tensor(1), *choices], current.tensor, rng), space.model), space
    )


def change_zero(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Change the degree of ZeRO among the replicas, or its level, or whether level 3 gathers weights once in a step."""
    num_replicas = current.zero.degree * current.data.degree
    variants = (Zero(1, level=1), Zero(1, level=2), Zero(1, level=3), Zero(1, level=3, reshard_after_forward="off"))
    choices = [replace(zero, degree=degree) for degree in _divisors(num_replicas) if degree > 1 for zero in variants]
    zero = _choose_other([Zero(1), *choices], current.zero, rng)
    return replace(current, zero=zero, data=replace(current.data, degree=num_replicas // zero.degree))


def change_microbatches(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Change the number of microbatches."""
    choices = [*_allowed_microbatches(current, space)]
    return replace(current, num_microbatches=_choose_other(choices, current.num_microbatches, rng))


def change_schedule(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Change the schedule, with its chunks per stage."""
    pipeline = current.pipeline
    if pipeline.degree == 1:
        return current
    choices = [(schedule.name, schedule.min_chunks) for schedule in SCHEDULES]
    schedule, chunks_per_stage = _choose_other(choices, (pipeline.schedule_name, pipeline.chunks_per_stage), rng)
    if chunks_per_stage == pipeline.chunks_per_stage:
        return replace(current, pipeline=replace(pipeline, schedule=schedule))
    return _fill_ranks(
        replace(current, pipeline=Pipeline(pipeline.degree, schedule, chunks_per_stage=chunks_per_stage)), space
    )


def change_codec(current: SearchConfiguration, space: SearchSpace, rng: Random) -> SearchConfiguration:
    """Change the compression of gradients."""
    return replace(
        current, data=replace(current.data, compress=_choose_other(space.codecs, current.data.compress, rng))
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
"""Each proposal with its weight: changes of single blocks are about as likely as changes of everything."""
MEMORY_PROPOSALS: dict[Proposal, int] = {recompute_block: 4, recompute_stage: 1}
"""Proposals that only save memory."""


def _divisors(number: int) -> Iterator[int]:
    return (divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _choose_other(choices: Sequence[_Any], now: _Any, rng: Random) -> _Any:
    """Return one of the choices that is not the present one, or the present one if there is none."""
    others = [choice for choice in choices if choice != now]
    return rng.choice(others) if others else now


def _resize_pipeline(pipeline: Pipeline, degree: int) -> Pipeline:
    """Return the pipeline with another number of stages, with default partition and replicas."""
    if degree == 1:
        return Pipeline(1)
    return Pipeline(degree, pipeline.schedule, chunks_per_stage=pipeline.chunks_per_stage, recompute=pipeline.recompute)


def _fill_ranks(current: SearchConfiguration, space: SearchSpace) -> SearchConfiguration:
    """Return the configuration with as many replicas as fill the ranks, with the same degree of ZeRO if possible."""
    num_replicas, remainder = divmod(space.num_ranks, current.tensor.degree * sum(current.pipeline.stage_ranks))
    if remainder or not num_replicas:
        return replace(current, pipeline=Pipeline(1)) if current.pipeline.replicas else current
    zero_degree = current.zero.degree if num_replicas % current.zero.degree == 0 else num_replicas
    return replace(
        current,
        zero=replace(current.zero, degree=zero_degree),
        data=replace(current.data, degree=num_replicas // zero_degree),
    )


def _allowed_microbatches(current: SearchConfiguration, space: SearchSpace) -> Iterator[int]:
    """Yield the numbers of microbatches that the batch and the replicas allow."""
    samples, remainder = divmod(space.batch_size, current.zero.degree * current.data.degree)
    max_count = MAX_MICROBATCHES_PER_STAGE * current.pipeline.degree
    if not remainder:
        counts = (count for count in range(1, min(samples, max_count) + 1) if samples % count == 0)
        yield from (count for count in counts if current.pipeline.usable_microbatches(count) == count)


def _fit_microbatches(proposed: SearchConfiguration, space: SearchSpace) -> SearchConfiguration | None:
    """Return the configuration with the nearest possible number of microbatches; None if it does not use all ranks."""
    if proposed.plan(space.model).num_ranks != space.num_ranks:
        return None
    present_count = proposed.num_microbatches
    counts = sorted(_allowed_microbatches(proposed, space), key=lambda count: (abs(count - present_count), count))
    return replace(proposed, num_microbatches=counts[0]) if counts else None
