"""What a search decides: the stage of every block, what is recomputed, what is sliced, and what copies share out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise, takewhile

from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.recomputation import ALTERNATIVE, PASS, Recomputation
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Configuration:
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

    slices: Tensor = field(default_factory=partial(Tensor, 1))
    stages: Pipeline = field(default_factory=partial(Pipeline, 1))
    shards: Zero = field(default_factory=partial(Zero, 1))
    copies: Data = field(default_factory=partial(Data, 1))
    recomputed: frozenset[int] = frozenset()
    num_microbatches: int = 1

    @staticmethod
    def of(plan: Plan, model: ModelSpec) -> Configuration | None:
        """Return a plan as a configuration of a model; None for one that has other parts than a search changes."""
        found: dict[type[Strategy], Strategy] = {type(strategy): strategy for strategy in plan.strategies}
        parts = (Tensor(1), Pipeline(1), Zero(1), Data(1))
        slices, stages, shards, copies = (found.pop(type(part), part) for part in parts)
        assert isinstance(slices, Tensor) and isinstance(stages, Pipeline), "found by their types"  # noqa: PT018
        assert isinstance(shards, Zero) and isinstance(copies, Data), "found by their types"  # noqa: PT018
        asked = [name for name in plan.passes if name.partition(":")[0] == PASS]
        blocks = Recomputation.of_pass(asked[0]).blocks(model) if asked else frozenset[int]()
        made = Configuration(slices, stages, shards, copies, blocks, plan.num_microbatches)
        is_whole = not found and not stages.is_stream and not stages.cuts and made.strategies == plan.strategies
        return made if is_whole else None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The parts that spread over more than one rank, from the inside out."""
        parts: tuple[Strategy, ...] = (self.slices, self.stages, self.shards, self.copies)
        return tuple(part for part in parts if part.degree > 1)

    def plan(self, model: ModelSpec, passes: tuple[str, ...] = ()) -> Plan:
        """Return the plan that says the same.

        Args:
            model: whose blocks are recomputed.
            passes: what is done to the program besides.

        Raises:
            PlanError: the parts do not go together.
        """
        asked = (pass_for(model, self.recomputed),) if self.recomputed else ()
        return Plan(self.strategies, self.num_microbatches, passes + asked)

    def counts(self, model: ModelSpec) -> tuple[int, ...]:
        """Return how many blocks each chunk of its stages has, of those that its slices leave.

        Raises:
            PlanError: there are more chunks than blocks, or layers do not divide into these slices.
        """
        return tuple(map(len, self.stages.chunks(self.slices.refine(model)).runs))

    def with_counts(self, counts: Iterable[int]) -> Configuration:
        """Return the configuration with its stages cut like that."""
        return replace(self, stages=replace(self.stages, balance=tuple(counts)))

    def recut(self, slices: Tensor, model: ModelSpec) -> Configuration:
        """Return the configuration with other slices, and its stages cut at the places next to those of before.

        Raises:
            PlanError: layers do not divide into these slices.
        """
        made = replace(self, slices=slices)
        if not self.stages.balance:
            return made
        firsts = [block.first_piece for block in self.slices.refine(model).blocks]
        heads = [firsts[at] for at in accumulate(self.stages.balance[:-1])]
        blocks = slices.refine(model).blocks
        begun = [0, *(sum(block.first_piece < head for block in blocks) for head in heads), len(blocks)]
        counts = [stop - start for start, stop in pairwise(begun)]
        return made.with_counts(counts if min(counts) > 0 else ())


def pass_for(model: ModelSpec, blocks: frozenset[int]) -> str:
    """Return the pass that recomputes these blocks; of blocks with names in common it takes all.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> pass_for(chain(4), frozenset({0, 2})), pass_for(chain(2), frozenset({0, 1}))
        ('recompute:block0+block2', 'recompute')
    """
    if len(blocks) == model.num_blocks:
        return PASS
    names = dict.fromkeys(name for at in sorted(blocks) for name in _names_of(model, at))
    return f"{PASS}:{ALTERNATIVE.join(map(_literally, names))}"


def _names_of(model: ModelSpec, at: int) -> Iterator[str]:
    """Yield the path of the module that a block is, or the names of its pieces where other blocks are of it, too."""
    parts = [name.split(".") for piece in model.blocks[at].pieces for name in piece.name.split("..")]
    steps = takewhile(lambda step: len(set(step)) == 1, zip(*parts, strict=False))
    whole = ".".join(step[0] for step in steps)
    others = [block for place, block in enumerate(model.blocks) if place != at]
    if whole and not any(_is_of(piece.name, whole) for block in others for piece in block.pieces):
        yield whole
    else:
        yield from (piece.name for piece in model.blocks[at].pieces)


def _is_of(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _literally(name: str) -> str:
    """Return a name as a pattern that matches it alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
