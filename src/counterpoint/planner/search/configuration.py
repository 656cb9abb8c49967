"""Configurations of the search: stages of blocks, recomputation, tensor parallelism, ZeRO and data parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise, takewhile

from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import PATTERN_SEPARATOR, RECOMPUTE_PASS, Recomputation
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class SearchConfiguration:
    """A plan as the search sees it: each part can be changed separately; parts of degree 1 are not in the plan.

    FlexFlow's dimensions of parallelism in brackets.

    Args:
        tensor: degree and dims of tensor parallelism (attribute and parameter).
        pipeline: blocks, replicas and schedule of stages (operator).
        zero: replicas that shard states, and which states (sample).
        data: replicas of all that, and the compression of their gradients (sample).
        recomputed: blocks of the unpartitioned model whose forwards are recomputed.
        num_microbatches: of the innermost program.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> configuration = SearchConfiguration(pipeline=Pipeline(2), data=Data(4), recomputed=frozenset({1}))
        >>> plan = configuration.plan(linear_chain(4))
        >>> str(plan), plan.passes
        ('pipeline(2) * data(4)', ('recompute:block1',))
    """

    tensor: Tensor = field(default_factory=partial(Tensor, 1))
    pipeline: Pipeline = field(default_factory=partial(Pipeline, 1))
    zero: Zero = field(default_factory=partial(Zero, 1))
    data: Data = field(default_factory=partial(Data, 1))
    recomputed: frozenset[int] = frozenset()
    num_microbatches: int = 1

    @staticmethod
    def from_plan(plan: Plan, model: ModelSpec) -> SearchConfiguration | None:
        """Return a plan as a configuration of a model; None if it has parts that the search does not change."""
        remaining: dict[type[Strategy], Strategy] = {type(strategy): strategy for strategy in plan.strategies}
        parts = (Tensor(1), Pipeline(1), Zero(1), Data(1))
        tensor, pipeline, zero, data = (remaining.pop(type(part), part) for part in parts)
        assert isinstance(tensor, Tensor) and isinstance(pipeline, Pipeline), "found by their types"  # noqa: PT018
        assert isinstance(zero, Zero) and isinstance(data, Data), "found by their types"  # noqa: PT018
        recompute_passes = [name for name in plan.passes if name.partition(":")[0] == RECOMPUTE_PASS]
        blocks = (
            Recomputation.from_pass(recompute_passes[0]).select_blocks(model) if recompute_passes else frozenset[int]()
        )
        configuration = SearchConfiguration(tensor, pipeline, zero, data, blocks, plan.num_microbatches)
        is_complete = (
            not remaining
            and not pipeline.is_async
            and not pipeline.split_points
            and configuration.strategies == plan.strategies
        )
        return configuration if is_complete else None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The parts of degree greater than 1, from the inside out."""
        parts: tuple[Strategy, ...] = (self.tensor, self.pipeline, self.zero, self.data)
        return tuple(part for part in parts if part.degree > 1)

    def plan(self, model: ModelSpec, passes: tuple[str, ...] = ()) -> Plan:
        """Return the plan of the configuration.

        Args:
            model: whose blocks are recomputed.
            passes: other passes of the plan.

        Raises:
            PlanError: the parts cannot be combined.
        """
        recompute_passes = (recompute_pass(model, self.recomputed),) if self.recomputed else ()
        return Plan(self.strategies, self.num_microbatches, passes + recompute_passes)

    def blocks_per_chunk(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of blocks of each chunk of its stages, after tensor parallelism.

        Raises:
            PlanError: there are more chunks than blocks, or layers cannot be split by this degree.
        """
        return tuple(map(len, self.pipeline.chunks(self.tensor.split_model(model)).block_ranges))

    def with_balance(self, counts: Iterable[int]) -> SearchConfiguration:
        """Return the configuration with this balance of its stages."""
        return replace(self, pipeline=replace(self.pipeline, balance=tuple(counts)))

    def with_tensor(self, tensor: Tensor, model: ModelSpec) -> SearchConfiguration:
        """Return the configuration with other tensor parallelism, and stages that start as close as possible to before.

        Raises:
            PlanError: layers cannot be split by this degree.
        """
        configuration = replace(self, tensor=tensor)
        if not self.pipeline.balance:
            return configuration
        first_layers = [block.first_layer for block in self.tensor.split_model(model).blocks]
        starts = [first_layers[index] for index in accumulate(self.pipeline.balance[:-1])]
        blocks = tensor.split_model(model).blocks
        bounds = [0, *(sum(block.first_layer < head for block in blocks) for head in starts), len(blocks)]
        counts = [stop - start for start, stop in pairwise(bounds)]
        return configuration.with_balance(counts if min(counts) > 0 else ())


def recompute_pass(model: ModelSpec, blocks: frozenset[int]) -> str:
    """Return the pass that recomputes these blocks; of blocks with common names it recomputes all.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> recompute_pass(linear_chain(4), frozenset({0, 2})), recompute_pass(linear_chain(2), frozenset({0, 1}))
        ('recompute:block0+block2', 'recompute')
    """
    if len(blocks) == model.num_blocks:
        return RECOMPUTE_PASS
    names = dict.fromkeys(name for block in sorted(blocks) for name in _block_patterns(model, block))
    return f"{RECOMPUTE_PASS}:{PATTERN_SEPARATOR.join(map(_escape_pattern, names))}"


def _block_patterns(model: ModelSpec, block_index: int) -> Iterator[str]:
    """Yield the path of the module that a block is, or the names of its layers if other blocks belong to it, too."""
    parts = [name.split(".") for layer in model.blocks[block_index].layers for name in layer.name.split("..")]
    steps = takewhile(lambda step: len(set(step)) == 1, zip(*parts, strict=False))
    path = ".".join(step[0] for step in steps)
    others = [block for index, block in enumerate(model.blocks) if index != block_index]
    if path and not any(_is_inside(layer.name, path) for block in others for layer in block.layers):
        yield path
    else:
        yield from (layer.name for layer in model.blocks[block_index].layers)


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _escape_pattern(name: str) -> str:
    """Return a name as a pattern that matches only this name."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
