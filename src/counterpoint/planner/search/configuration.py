"""What a search decides: the stage of every block, what is recomputed, what is sliced, and what copies share out."""

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
    """A plan as a search sees it: each part may be changed by itself, and parts of one rank are left out of the plan.

    Args:
        slices: attribute and parameter: into how many slices layers go, and along which of their dims.
        stages: operator: which blocks each stage runs, on how many replicas of its own, in which order.
        shards: sample: copies that share out states, and which of them.
        copies: sample: copies of all that, and the code in which they sum gradients.
        recomputed: the blocks of the model, as it came, whose forwards are computed again.
        num_microbatches: of the innermost program.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> found = Configuration(stages=Pipeline(2), copies=Data(4), recomputed=frozenset({1}))
        >>> plan = found.plan(chain(4))
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
        """Return a plan as a configuration of a model; None for one that has other parts than a search changes."""
        found: dict[type[Strategy], Strategy] = {type(strategy): strategy for strategy in plan.strategies}
        parts = (Tensor(1), Pipeline(1), Zero(1), Data(1))
        slices, stages, shards, copies = (found.pop(type(part), part) for part in parts)
        assert isinstance(slices, Tensor) and isinstance(stages, Pipeline), "found by their types"  # noqa: PT018
        assert isinstance(shards, Zero) and isinstance(copies, Data), "found by their types"  # noqa: PT018
        asked = [name for name in plan.passes if name.partition(":")[0] == RECOMPUTE_PASS]
        blocks = Recomputation.from_pass(asked[0]).select_blocks(model) if asked else frozenset[int]()
        made = SearchConfiguration(slices, stages, shards, copies, blocks, plan.num_microbatches)
        is_whole = not found and not stages.is_async and not stages.split_points and made.strategies == plan.strategies
        return made if is_whole else None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The parts that spread over more than one rank, from the inside out."""
        parts: tuple[Strategy, ...] = (self.tensor, self.pipeline, self.zero, self.data)
        return tuple(part for part in parts if part.degree > 1)

    def plan(self, model: ModelSpec, passes: tuple[str, ...] = ()) -> Plan:
        """Return the plan that says the same.

        Args:
            model: whose blocks are recomputed.
            passes: what is done to the program besides.

        Raises:
            PlanError: the parts do not go together.
        """
        asked = (recompute_pass(model, self.recomputed),) if self.recomputed else ()
        return Plan(self.strategies, self.num_microbatches, passes + asked)

    def blocks_per_chunk(self, model: ModelSpec) -> tuple[int, ...]:
        """Return how many blocks each chunk of its stages has, of those that its slices leave.

        Raises:
            PlanError: there are more chunks than blocks, or layers do not divide into these slices.
        """
        return tuple(map(len, self.pipeline.chunks(self.tensor.split_model(model)).block_ranges))

    def with_balance(self, counts: Iterable[int]) -> SearchConfiguration:
        """Return the configuration with its stages cut like that."""
        return replace(self, stages=replace(self.pipeline, balance=tuple(counts)))

    def with_tensor(self, tensor: Tensor, model: ModelSpec) -> SearchConfiguration:
        """Return the configuration with other slices, and its stages cut at the places next to those of before.

        Raises:
            PlanError: layers do not divide into these slices.
        """
        made = replace(self, slices=tensor)
        if not self.pipeline.balance:
            return made
        firsts = [block.first_layer for block in self.tensor.split_model(model).blocks]
        heads = [firsts[at] for at in accumulate(self.pipeline.balance[:-1])]
        blocks = tensor.split_model(model).blocks
        begun = [0, *(sum(block.first_layer < head for block in blocks) for head in heads), len(blocks)]
        counts = [stop - start for start, stop in pairwise(begun)]
        return made.with_balance(counts if min(counts) > 0 else ())


def recompute_pass(model: ModelSpec, blocks: frozenset[int]) -> str:
    """Return the pass that recomputes these blocks; of blocks with names in common it takes all.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> pass_for(chain(4), frozenset({0, 2})), pass_for(chain(2), frozenset({0, 1}))
        ('recompute:block0+block2', 'recompute')
    """
    if len(blocks) == model.num_blocks:
        return RECOMPUTE_PASS
    names = dict.fromkeys(name for at in sorted(blocks) for name in _block_patterns(model, at))
    return f"{RECOMPUTE_PASS}:{PATTERN_SEPARATOR.join(map(_escape_pattern, names))}"


def _block_patterns(model: ModelSpec, at: int) -> Iterator[str]:
    """Yield the path of the module that a block is, or the names of its pieces where other blocks are of it, too."""
    parts = [name.split(".") for piece in model.blocks[at].layers for name in piece.name.split("..")]
    steps = takewhile(lambda step: len(set(step)) == 1, zip(*parts, strict=False))
    whole = ".".join(step[0] for step in steps)
    others = [block for place, block in enumerate(model.blocks) if place != at]
    if whole and not any(_is_inside(piece.name, whole) for block in others for piece in block.layers):
        yield whole
    else:
        yield from (piece.name for piece in model.blocks[at].layers)


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _escape_pattern(name: str) -> str:
    """Return a name as a pattern that matches it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
