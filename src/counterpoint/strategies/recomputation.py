"""Activation recomputation: which forwards save only their input and run again for their backward."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.program.recompute_sets import RecomputePolicy
from counterpoint.strategies.strategy import CostEstimate, RankCost

RecomputeMode: TypeAlias = Literal["never", "except_last", "always"]
"""Which microbatches a pipeline recomputes."""
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("never", "except_last", "always")

RECOMPUTE_PASS = "recompute"
"""Name of the pass; ``recompute:PATTERN`` and ``recompute:50%`` select blocks."""

PARTITION_PASS = "partition_activations"
"""Name of the pass after which each tensor-parallel rank keeps a part of what blocks are recomputed from."""

PATTERN_SEPARATOR = "+"
"""Separates patterns; a block has to match one of them."""

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Which blocks are recomputed, and how many of them at a time.

    Args:
        selector: patterns of module paths joined by ``+``, such as ``*.attn`` or ``layers.3``; or a percentage of the
            blocks, such as ``50%``; empty for all.
        exempts_next_backward: whether a forward saves its activations if its backward is the next computation of its
            rank.
        whole_stage: whether adjacent blocks of a microbatch are recomputed together, so that only the input of the
            first one is saved; otherwise each block is recomputed right before its own backward.
    """

    selector: str = ""
    exempts_next_backward: bool = True
    whole_stage: bool = False

    @staticmethod
    def from_pass(name: str) -> Recomputation:
        """Return the recomputation of a pass such as ``recompute`` or ``recompute:*.attn``.

        Raises:
            PlanError: nothing follows the colon, or a percentage is out of range.
        """
        _, colon, selector = name.partition(":")
        percent = _PERCENT.fullmatch(selector)
        if (colon and not selector) or (percent is not None and not 0 < float(percent[1]) <= 100):
            raise PlanError(
                f"the pass {name!r} does not say what to recompute; write recompute for all blocks, recompute:50% for "
                "half of them, or recompute:PATTERN for those whose module paths match, such as recompute:*.attn"
            )
        return Recomputation(selector)

    @staticmethod
    def from_mode(mode: RecomputeMode) -> Recomputation | None:
        """Return the recomputation of a pipeline's option: all blocks of a stage together, or None."""
        return None if mode == "never" else Recomputation(exempts_next_backward=mode == "except_last", whole_stage=True)

    def select_blocks(self, model: ModelSpec) -> frozenset[int]:
        """Return the blocks that are recomputed.

        A percentage selects the blocks with the least compute per byte of output; of equal ones the first in the
        model, whose activations are saved longest.

        Raises:
            PlanError: the pattern matches no block.
        """
        percent = _PERCENT.fullmatch(self.selector)
        if percent is not None:
            count = math.ceil(model.num_blocks * float(percent[1]) / 100)
            by_cost = sorted(range(model.num_blocks), key=lambda index: _cost_per_byte(model.blocks[index]))
            return frozenset(by_cost[:count])
        blocks = frozenset(index for index, block in enumerate(model.blocks) if self._matches(block))
        if not blocks:
            names = ", ".join(block.name for block in model.blocks[:6])
            more = f" and {model.num_blocks - 6} more" if model.num_blocks > 6 else ""
            raise PlanError(
                f"no block of the model matches recompute:{self.selector}; its blocks are {names}{more}: write a "
                "pattern of these, with * for any text"
            )
        return blocks

    def _matches(self, block: Block) -> bool:
        patterns = [form for pattern in self.selector.split(PATTERN_SEPARATOR) for form in (pattern, f"{pattern}.*")]
        return not self.selector or any(
            fnmatchcase(layer.name, pattern) for layer in block.layers for pattern in patterns
        )

    def estimate_cost(self, inner: CostEstimate, blocks: frozenset[int]) -> CostEstimate:
        """Return the cost with the recompute policy and the peak of saved activations of each rank.

        Cost:
            Activations of the blocks that are not recomputed, for each microbatch in flight; of those that are, for one
            microbatch: of one block, or of all consecutive ones on the rank with ``whole_stage``.
        """
        exempt: Literal["run", "block"] = "run" if self.whole_stage else "block"
        policy = RecomputePolicy(blocks, exempt if self.exempts_next_backward else "nothing")
        peaks = tuple(self._count_saved_activations(rank, blocks) for rank in inner.ranks)
        return replace(inner, max_saved_activations=peaks, recompute=policy)

    def _count_saved_activations(self, rank: RankCost, blocks: frozenset[int]) -> int:
        runs: dict[int, list[int]] = {}  # chunks with consecutive blocks, as in a V-shaped pipeline, are one run
        for position, block in enumerate(sorted(rank.blocks)):
            runs.setdefault(block - position, []).append(block)
        recomputed = max((len(blocks.intersection(run)) for run in runs.values()), default=0)
        saved = max((len(set(run) - blocks) for run in runs.values()), default=0)
        return rank.in_flight * saved + (recomputed if self.whole_stage else min(recomputed, 1))


def _cost_per_byte(block: Block) -> float:
    return block.cost / block.output_bytes if block.output_bytes else math.inf
