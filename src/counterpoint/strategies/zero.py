"""ZeRO: replicas share out what data parallelism would keep on every one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Forward,
    Group,
    Instruction,
    Recv,
    Release,
    Serve,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.rewrite import (
    before_commit,
    blocks_of,
    last_backward_first,
    map_row,
    replicate,
    runs_of,
    widen_commits,
)
from counterpoint.strategies.strategy import Forecast, Need, RankForecast, ring_share
from counterpoint.strategies.tree import has_tree


@dataclass(frozen=True, slots=True)
class Zero:
    """Copy the program ``degree`` times; each copy keeps and updates its own share of the states.

    Level 1 shares the optimizer state: gradients are reduce-scattered once before the update, weights gathered
    after it. Level 2 also shares the gradients: they are reduce-scattered after each backward. Level 3 also
    shares the weights: they are gathered before each use and released after it.

    Args:
        degree: ranks along the new axis.
        level: 1, 2 or 3, as above.
        name: what errors call it, where it is part of another strategy.

    Cost:
        Bytes sent per rank and step, with M microbatches and P parameter bytes: level 1 ``2 (n-1)/n P``, level 2
        ``(M+1) (n-1)/n P``, level 3 ``3 M (n-1)/n P`` (a weight used by several blocks is gathered for each, and its
        gradient shared out by each of a stage's chunks).
        Memory per rank: optimizer state ``1/n``; from level 2 gradients ``1/n`` from one forward to the next, whole
        ones only until the last backward of their unit; at level 3 weights ``1/n``.

    Source:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 5.
    """

    degree: int
    level: Literal[1, 2, 3] = 1
    name: str = field(default="", compare=False, repr=False)

    axis: ClassVar[str] = "zero"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.level not in {1, 2, 3}:
            raise PlanError(f"zero has the levels 1, 2 and 3, not {self.level}; give level=1, level=2 or level=3")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name or f"zero({self.degree}, level={self.level})"

    @property
    def need(self) -> Need:
        """How finely the model should be cut."""
        return "wish" if self.level == 3 else "none"

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas with one share each.

        Raises:
            PlanError: the program is shared out already, or keeps its weights on servers or the first copy of a tree.
        """
        if has_tree(program):
            raise PlanError(
                f"{self} stands behind tree, of whose copies only the first updates, so that there is nothing to share "
                "out; write zero(...) with all ranks, without tree(...)"
            )
        for _, word in program.words():
            if isinstance(word, Collective) and word.verb == "reduce_scatter":
                raise PlanError(
                    f"{self} stands in a plan that is shared out already; write one zero(...) with all ranks"
                )
            if self.level > 1 and isinstance(word, Collective) and word.code:
                raise PlanError(
                    f"{self} shares gradients out before they are summed in the code {word.code}, which is about whole "
                    "ones; write zero(..., level=1), or data(...) without compress and reduce"
                )
            if isinstance(word, Serve) or (isinstance(word, Recv) and word.value.name == "grad"):
                raise PlanError(
                    f"{self} stands in a plan whose weights live on servers; write zero(...) or server(...)"
                )
        if self.degree == 1:
            return program
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)
        if self.level == 1:
            copies = before_commit(copies, lambda rank, row: _share_once(row, self.twins(rank, stride)))
        units = tuple(model.units)
        spread = (self._spread(row, self.twins(rank, stride), units) for rank, row in enumerate(copies.rows))
        return replace(copies, rows=tuple(spread))

    def twins(self, rank: int, stride: int) -> Group:
        """Return the ranks that hold the shares of the same parameters as ``rank``."""
        return tuple(range(rank % stride, stride * self.degree, stride))

    def _spread(self, row: Row, twins: Group, units: tuple[Unit, ...]) -> Row:
        used = _Used.by(row, units)
        if self.level == 3:
            return map_row(row, lambda words: [new for word in words for new in _gather_around(word, twins, used)])
        if self.level == 2:
            row = map_row(row, lambda words: [new for word in words for new in _share_after(word, twins, used)])
        return map_row(row, lambda words: _join_after_updates(words, twins))

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with the reduce-scatters and all-gathers of the level."""
        ranks = tuple(self._forecast_rank(rank, model) for rank in before.ranks)
        return replace(before, ranks=ranks).copied(self.degree)

    def _forecast_rank(self, rank: RankForecast, model: ModelSpec) -> RankForecast:
        moved = sum(size * self._trips(unit, rank) for unit, size in rank.updates.items())
        return replace(
            rank,
            sent=rank.sent + ring_share(self.degree) * moved,
            summed=rank.summed / (self.degree if self.level > 1 else 1),
            updates={unit: size / self.degree for unit, size in rank.updates.items()},
            updated=rank.updated / self.degree,
            gradients=rank.gradients / self.degree if self.level > 1 else rank.gradients,
        )

    def _trips(self, unit: Unit, rank: RankForecast) -> int:
        """Return how often a unit is scattered or gathered in one step."""
        if self.level == 1:
            return 2
        if self.level == 2:
            return rank.num_micros * rank.num_chunks(unit) + 1
        uses = sum(block in rank.blocks for block in unit)
        return rank.num_micros * (2 * uses + rank.num_chunks(unit))


def _share_once(row: Row, twins: Group) -> list[Instruction]:
    units = [word.unit for word in row.body if isinstance(word, Update)]
    return [Collective("reduce_scatter", grad(unit), twins) for unit in last_backward_first(row, units)]


class _Used(NamedTuple):
    """The units that a row's blocks use.

    Args:
        by_block: those of each block.
        done_by: those of whose gradient a run of backwards makes no more behind that of a block.
    """

    by_block: dict[int, list[Unit]]
    done_by: dict[int, list[Unit]]

    @staticmethod
    def by(row: Row, units: Iterable[Unit]) -> _Used:
        """Read off a row which units its blocks use, and behind which block each gradient is complete."""
        units = tuple(units)
        by_block = {block: [unit for unit in units if block in unit] for block in blocks_of(row)}
        run_of = {block: number for number, run in enumerate(runs_of(row)) for block in run}
        last: dict[tuple[Unit, int], int] = {}
        for block in sorted(by_block, reverse=True):
            last.update({(unit, run_of[block]): block for unit in by_block[block]})
        done_by = {
            block: [unit for unit in found if last[unit, run_of[block]] == block] for block, found in by_block.items()
        }
        return _Used(by_block, done_by)


def _share_after(word: Instruction, twins: Group, used: _Used) -> Iterable[Instruction]:
    yield word
    if isinstance(word, Backward) and word.has_weight:
        for unit in used.done_by[word.block]:
            yield Collective("reduce_scatter", grad(unit), twins)
            yield Release(grad(unit))


def _gather_around(word: Instruction, twins: Group, used: _Used) -> Iterable[Instruction]:
    if not isinstance(word, Forward | Backward):
        yield word
        return
    if isinstance(word, Backward) and not word.has_input:  # it reads no weights
        yield from _share_after(word, twins, used)
        return
    for unit in used.by_block[word.block]:
        yield Collective("all_gather", weight(unit), twins)
    yield from _share_after(word, twins, used)
    for unit in used.by_block[word.block]:
        yield Release(weight(unit))


def _join_after_updates(words: Words, twins: Group) -> Iterable[Instruction]:
    last = max((index for index, word in enumerate(words) if isinstance(word, Update)), default=-1)
    units = [word.unit for word in words if isinstance(word, Update)]
    for index, word in enumerate(words):
        yield word
        if index == last:
            yield from (Collective("all_gather", weight(unit), twins) for unit in units)
