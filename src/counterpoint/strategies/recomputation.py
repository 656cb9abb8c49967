"""Activation recomputation: which forwards save only their input and run again for their backward."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.optim.validation import shorten
from counterpoint.program.recompute_sets import RecomputePolicy
from counterpoint.strategies.strategy import CostEstimate, RankCost

RecomputeMode: TypeAlias = Literal["never", "except_last", "always"]
"""Which microbatches a pipeline recomputes."""
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("never", "except_last", "always")

RECOMPUTE_PASS = "recompute"
"""Name of the pass; ``recompute:PATTERN``, ``recompute:50%`` and ``recompute:blocks=0-3+7`` select blocks."""

PARTITION_PASS = "partition_activations"
"""Name of the pass after which each tensor-parallel rank keeps a part of what blocks are recomputed from; it may select
blocks as the pass ``recompute``."""

PATTERN_SEPARATOR = "+"
"""Separates patterns and ranges of blocks; a block has to match one of them."""

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_BLOCKS = "blocks="
_RANGES = re.compile(r"blocks=\d{1,9}(-\d{1,9})?(\+\d{1,9}(-\d{1,9})?)*")


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Which blocks are recomputed, and how many of them at a time.

    Args:
        selector: patterns of module paths joined by ``+``, such as ``*.attn`` or ``layers.3``; a percentage of the
            blocks, such as ``50%``; or their numbers in the program, such as ``blocks=0-3+7``; empty for all.
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
            PlanError: nothing follows the colon, or what follows is out of range.
        """
        return Recomputation(parse_selector(name, RECOMPUTE_PASS))

    @staticmethod
    def from_mode(mode: RecomputeMode) -> Recomputation | None:
        """Return the recomputation of a pipeline's option: all blocks of a stage together, or None."""
        return None if mode == "never" else Recomputation(exempts_next_backward=mode == "except_last", whole_stage=True)

    def select_blocks(self, model: ModelSpec) -> frozenset[int]:
        """Return the blocks that are recomputed; see :func:`select_blocks`.

        Raises:
            PlanError: the selector matches no block.
        """
        return select_blocks(self.selector, model, RECOMPUTE_PASS)

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


def parse_selector(name: str, pass_text: str) -> str:
    """Return which blocks a pass selects: what follows its own text and a colon, or an empty text for all.

    Args:
        name: the pass in a plan, such as ``recompute:blocks=0-3``.
        pass_text: the pass without a selector, such as ``recompute``.

    Raises:
        PlanError: nothing follows the colon, a percentage is out of range, or ``blocks=`` has no numbers.

    Example:
        >>> parse_selector("recompute:blocks=0-3", "recompute"), parse_selector("recompute", "recompute")
        ('blocks=0-3', '')
    """
    selector = name.removeprefix(pass_text).removeprefix(":")
    percent = _PERCENT.fullmatch(selector)
    is_wrong = selector.startswith(_BLOCKS) and (_RANGES.fullmatch(selector) is None or not all(_ranges(selector)))
    if name == f"{pass_text}:" or is_wrong or (percent is not None and not 0 < float(percent[1]) <= 100):
        raise PlanError(
            f"the pass {shorten(repr(name))} does not say which blocks; write {pass_text} for all blocks, "
            f"{pass_text}:50% for half of them, {pass_text}:blocks=0-3+7 for those with these numbers in the program, "
            f"or {pass_text}:PATTERN for those whose module paths match, such as {pass_text}:*.attn"
        )
    return selector


def select_blocks(selector: str, model: ModelSpec, pass_text: str) -> frozenset[int]:
    """Return the blocks of a model that a selector names.

    A percentage selects the blocks with the least compute per byte of output; of equal ones the first in the model,
    whose activations are saved longest.

    Args:
        selector: of :func:`parse_selector`.
        model: with the blocks of the program.
        pass_text: the pass without its selector, for errors.

    Raises:
        PlanError: it matches no block, or names one that the model does not have.
    """
    if selector.startswith(_BLOCKS):
        largest = max(numbers[-1] for numbers in _ranges(selector))
        if largest >= model.num_blocks:
            raise PlanError(
                f"{pass_text}:{selector} names block {largest}, but the program has the blocks 0 to "
                f"{model.num_blocks - 1}; give numbers of these"
            )
        return frozenset(block for numbers in _ranges(selector) for block in numbers)
    percent = _PERCENT.fullmatch(selector)
    if percent is not None:
        count = math.ceil(model.num_blocks * float(percent[1]) / 100)
        by_cost = sorted(range(model.num_blocks), key=lambda index: _cost_per_byte(model.blocks[index]))
        return frozenset(by_cost[:count])
    blocks = frozenset(index for index, block in enumerate(model.blocks) if _matches(block, selector))
    if not blocks:
        names = ", ".join(block.name for block in model.blocks[:6])
        more = f" and {model.num_blocks - 6} more" if model.num_blocks > 6 else ""
        raise PlanError(
            f"no block of the model matches {pass_text}:{selector}; its blocks are {names}{more}: write a "
            "pattern of these, with * for any text"
        )
    return blocks


def format_blocks(blocks: Collection[int]) -> str:
    """Return the numbers of blocks as ranges, as a selector has them after ``blocks=``.

    Example:
        >>> format_blocks({0, 1, 2, 5})
        '0-2+5'
    """
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return PATTERN_SEPARATOR.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _ranges(selector: str) -> list[range]:
    """Return the ranges of ``blocks=0-3+7``; one that ends before it begins is empty."""
    ends = (text.partition("-") for text in selector.removeprefix(_BLOCKS).split(PATTERN_SEPARATOR))
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]


def _matches(block: Block, selector: str) -> bool:
    patterns = [form for pattern in selector.split(PATTERN_SEPARATOR) for form in (pattern, f"{pattern}.*")]
    return not selector or any(fnmatchcase(layer.name, pattern) for layer in block.layers for pattern in patterns)


def _cost_per_byte(block: Block) -> float:
    return block.cost / block.output_bytes if block.output_bytes else math.inf
