"""What a plan recomputes: which forwards keep only what they read, and are computed again for their backwards."""

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
"""The name of the pass, which may go on as ``recompute:PATTERN`` or ``recompute:50%``."""

PATTERN_SEPARATOR = "+"
"""Stands between patterns of which a block has to match one."""

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What is recomputed, and how much of it at once.

    Args:
        which: a pattern of module paths, as ``*.attn`` or ``layers.3``, several joined by ``+``, or a part of the
            blocks, as ``50%``; empty for all.
        keeps_next: whether a forward keeps its tape whose backward is the next thing that its rank computes.
        at_once: whether adjacent blocks of a microbatch are recomputed together, so that only what enters the first of
            them is kept meanwhile; else each is recomputed when the one behind it is done with.
    """

    selector: str = ""
    exempts_next_backward: bool = True
    whole_stage: bool = False

    @staticmethod
    def from_pass(name: str) -> Recomputation:
        """Return what a pass such as ``recompute`` or ``recompute:*.attn`` asks for.

        Raises:
            PlanError: nothing stands behind the colon, or a part is none.
        """
        _, colon, which = name.partition(":")
        share = _PERCENT.fullmatch(which)
        if (colon and not which) or (share is not None and not 0 < float(share[1]) <= 100):
            raise PlanError(
                f"the pass {name!r} does not say what to recompute; write recompute for all blocks, recompute:50% for "
                "half of them, or recompute:PATTERN for those whose module paths match, as recompute:*.attn"
            )
        return Recomputation(which)

    @staticmethod
    def from_mode(mode: RecomputeMode) -> Recomputation | None:
        """Return what the option of a pipeline asks for: all of a stage's blocks together, or nothing."""
        return None if mode == "never" else Recomputation(exempts_next_backward=mode == "except_last", whole_stage=True)

    def select_blocks(self, model: ModelSpec) -> frozenset[int]:
        """Return the blocks that are recomputed.

        A part takes those first that need least work per byte of what they hand on; of equal ones the first, whose
        results wait longest for their backward.

        Raises:
            PlanError: the pattern matches no block.
        """
        share = _PERCENT.fullmatch(self.selector)
        if share is not None:
            count = math.ceil(model.num_blocks * float(share[1]) / 100)
            by_worth = sorted(range(model.num_blocks), key=lambda index: _work_per_byte(model.blocks[index]))
            return frozenset(by_worth[:count])
        found = frozenset(index for index, block in enumerate(model.blocks) if self._matches(block))
        if not found:
            shown = ", ".join(block.name for block in model.blocks[:6])
            more = f" and {model.num_blocks - 6} more" if model.num_blocks > 6 else ""
            raise PlanError(
                f"no block of the model matches recompute:{self.selector}; its blocks are {shown}{more}: write a "
                "pattern of these, with * for any text"
            )
        return found

    def _matches(self, block: Block) -> bool:
        patterns = [form for one in self.selector.split(PATTERN_SEPARATOR) for form in (one, f"{one}.*")]
        return not self.selector or any(fnmatchcase(piece.name, one) for piece in block.layers for one in patterns)

    def estimate_cost(self, inner: CostEstimate, blocks: frozenset[int]) -> CostEstimate:
        """Return the forecast with what is recomputed, and of how much a rank keeps at once what backwards need.

        Cost:
            Blocks that are not recomputed, once for each microbatch in flight; of those that are, one microbatch's: one
            block, or where they are recomputed at once all that follow each other on the rank.
        """
        keeps: Literal["run", "block"] = "run" if self.whole_stage else "block"
        repeats = RecomputePolicy(blocks, keeps if self.exempts_next_backward else "nothing")
        return replace(
            inner,
            max_saved_activations=tuple(self._count_saved_activations(rank, blocks) for rank in inner.ranks),
            recompute=repeats,
        )

    def _count_saved_activations(self, rank: RankCost, blocks: frozenset[int]) -> int:
        runs: dict[int, list[int]] = {}  # chunks that follow each other, as where stages are folded, count as one
        for place, block in enumerate(sorted(rank.blocks)):
            runs.setdefault(block - place, []).append(block)
        again = max((len(blocks.intersection(run)) for run in runs.values()), default=0)
        kept = max((len(set(run) - blocks) for run in runs.values()), default=0)
        return rank.in_flight * kept + (again if self.whole_stage else min(again, 1))


def _work_per_byte(block: Block) -> float:
    return block.cost / block.output_bytes if block.output_bytes else math.inf
