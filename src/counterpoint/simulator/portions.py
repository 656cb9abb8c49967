"""A backward in portions: sums of gradients that begin while it goes on, bucket by bucket, as they do in a run.

A model that needs no cut is one block of a program, with one backward and one sum. The runtime carries the backward out
in one call, and begins the sum of each bucket of gradients as soon as it is complete. For the clock the backward is cut
in two behind each of these moments, and the sum into the buckets; what each word of this costs is a part of what the
word costs that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.early import Early, candidates, early_sums
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Group,
    Instruction,
    Push,
    Release,
    Send,
    Update,
    grad,
)
from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.turn import Turn
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.network import Message, Talk
from counterpoint.strategies.buckets import Buckets, Ready, cut
from counterpoint.world.cluster import Cluster

Word = TypeVar("Word", bound=Instruction)


@dataclass(frozen=True, slots=True)
class Portion:
    """What a backward does until a bucket of gradients is complete.

    Args:
        work: the part of its seconds.
        part: of the gradient's bytes those that are summed then; nothing behind the last bucket.
    """

    work: float
    part: Fraction


def portions_of(model: ModelSpec, seconds: Sequence[float], sizes: Buckets) -> tuple[Portion, ...]:
    """Return the portions of the backward of a model in one block, in the order in which they are done.

    Args:
        model: its pieces go backward from the last to the first.
        seconds: of each piece backward, in the order of the model.
        sizes: of buckets.
    """
    ready_s: dict[str, float] = {}
    ends = list(accumulate(reversed(seconds)))
    for piece, end_s in zip(reversed(model.pieces), ends, strict=True):
        ready_s |= dict.fromkeys(piece.params, end_s)  # of several pieces that read it the first one is the last
    params = [param for param in model.params if param.name in ready_s]
    made = [Ready(at, one.item_bytes, one.num_bytes, ready_s[one.name]) for at, one in enumerate(params)]
    whole_s, whole_bytes = ends[-1] or 1.0, sum(one.num_bytes for one in made)
    found, done_s = [], 0.0
    for places in cut(made, sizes):
        until_s = max(done_s, *(made[at].ready_s for at in places))
        found.append(
            Portion((until_s - done_s) / whole_s, Fraction(sum(made[at].num_bytes for at in places), whole_bytes))
        )
        done_s = until_s
    if done_s < ends[-1]:
        found.append(Portion((ends[-1] - done_s) / whole_s, Fraction(0)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Spread:
    """One kind of step with its early sums in buckets.

    Args:
        turn: what is played.
        origins: for each word of each row the place of the word that it comes from.
        portions: of the backward.
    """

    turn: Turn
    origins: tuple[tuple[int, ...], ...]
    portions: tuple[Portion, ...]

    def costs(self, others: Costs) -> Costs:
        """Return what its words cost, given what the words cost that they come from."""
        summed = [at for at, one in enumerate(self.portions) if one.part]
        parts = {grad(_unit(at, summed)): self.portions[at].part for at in summed}
        adds = any(isinstance(word, Backward) and not word.block for row in self.turn.program.rows for word in row.body)
        return PortionCosts(self.portions, {value.blocks: part for value, part in parts.items()}, others, adds=adds)


def spread(turn: Turn, portions: Sequence[Portion], cluster: Cluster) -> Spread | None:
    """Return a kind of step of a model in one block with its early sums in buckets; None where it has none, or others.

    Sums in memory that members see stay whole: in a run they do not begin early.

    Args:
        turn: of a plan.
        portions: of the backward.
        cluster: where it runs.
    """
    if turn.stream is not None or len(portions) < 2:
        return None
    rows, origins = [], []
    for rank, row in enumerate(turn.program.rows):
        found = _spread_row(row, early_sums(turn.program, rank), portions, cluster)
        if found is None:
            return None
        rows.append(found[0])
        origins.append(found[1])
    if tuple(rows) == turn.program.rows:
        return None
    return Spread(replace(turn, program=replace(turn.program, rows=tuple(rows))), tuple(origins), tuple(portions))


def spread_alike(row: Row, portions: Sequence[Portion], cluster: Cluster) -> Spread | None:
    """Return what :func:`spread` makes of a step in which all members of the row's groups have rows like this one.

    Args:
        row: of the first rank, the only one that is in what is returned.
        portions: of the backward.
        cluster: where it runs; its ranks see no memory of others.
    """
    found = _spread_row(row, candidates(row.body), portions, cluster) if len(portions) > 1 else None
    if found is None or found[0] == row:
        return None
    return Spread(Turn("step", Program((found[0],)), Ledger(), ()), (found[1],), tuple(portions))


def _spread_row(
    row: Row, early: Early, portions: Sequence[Portion], cluster: Cluster
) -> tuple[Row, tuple[int, ...]] | None:
    """Return a row with its early sums in buckets, and where its words come from; None where it has others, too."""
    begun = {word for sums in early.values() for word in sums}
    sums = {word for word in row.body if isinstance(word, Collective) and word.value.name == "grad"}
    if sums != begun | set(map(_wait_of, begun)) or any(_sees_memory(word.group, cluster) for word in begun):
        return None
    made = list(_spread_words(row.body, early, portions))
    return replace(row, body=tuple(word for _, word in made)), tuple(at for at, _ in made)


def _sees_memory(group: Group, cluster: Cluster) -> bool:
    """Tell whether members see each other's memory, and so share their sum and their update there."""
    return cluster.link_at(0, group).is_copied and len(set(map(cluster.host, group))) < len(group)


def _spread_words(words: Words, early: Early, portions: Sequence[Portion]) -> Iterator[tuple[int, Instruction]]:
    """Yield the words of a row with the places of those that they come from."""
    summed = [at for at, one in enumerate(portions) if one.part]
    starts = {start for sums in early.values() for start in sums}
    waits = set(map(_wait_of, starts))
    for index, word in enumerate(words):
        if isinstance(word, Backward) and early.get(index):
            for at, portion in enumerate(portions):
                yield index, replace(word, block=at + 1)
                for start in early[index] if portion.part else ():
                    yield words.index(start, index), replace(start, value=grad(_unit(at, summed)))
        elif isinstance(word, Collective) and word in waits:
            yield from ((index, replace(word, value=grad(_unit(at, summed)))) for at in summed)
        elif word not in starts:
            yield index, word


def _wait_of(start: Collective) -> Collective:
    return replace(start, phase="wait")


def _unit(at: int, summed: Sequence[int]) -> Unit:
    """Return what a bucket's gradient is called: the last one as the whole, which its members share out, or not."""
    return (0,) if at == summed[-1] else (at + 1,)


@dataclass(frozen=True, slots=True)
class PortionCosts:
    """Costs of a backward in portions, and of sums in buckets.

    Args:
        portions: of the backward.
        parts: of the gradient, by what the bucket is called.
        others: costs of the whole backward and the whole sum.
        adds: whether earlier microbatches, whose backwards are whole, have left a gradient.
    """

    portions: tuple[Portion, ...]
    parts: dict[Unit, Fraction]
    others: Costs
    adds: bool

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return the portion's part of the whole backward, and of adding its gradient to an earlier one."""
        if isinstance(word, Backward) and word.block:
            portion = self.portions[word.block - 1]
            added_s = float(portion.part) * self.others.add_s(0) if self.adds else 0.0
            return portion.work * self.others.compute_s(replace(word, block=0), part) + added_s
        return self.others.compute_s(word, part)

    def add_s(self, block: int) -> float:
        """Return it for a whole backward; that of a portion is in what it takes."""
        return 0.0 if block else self.others.add_s(0)

    def call_s(self, word: Instruction) -> float:
        """Return the cost of the call with its first portion."""
        if isinstance(word, Backward) and word.block:
            return self.others.call_s(replace(word, block=0)) if word.block == 1 else 0.0
        return self.others.call_s(word)

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what a sum of the bucket's part costs."""
        return self.others.link_s(*self._whole(word, part), rank)

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return of these seconds those on shared links."""
        return self.others.crossing_s(*self._whole(word, part), rank)

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return what a sum of the bucket's part costs."""
        return self.others.hand_s(*self._whole(word, part), rank, has_one_copy=has_one_copy)

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell what the other costs say."""
        return self.others.is_streamed(word, rank)

    def pass_s(self, word: Talk | Release) -> float:
        """Return what a pass over the bucket's part takes."""
        if isinstance(word, Collective):
            whole, part = self._whole(word, Fraction(1))
            return float(part) * self.others.pass_s(whole)
        return self.others.pass_s(word)

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return what it costs by the other costs."""
        return self.others.serve_s(unit, server, worker)

    def _whole(self, word: Word, part: Fraction) -> tuple[Word, Fraction]:
        """Return the word about the whole gradient, and which part of it is at hand."""
        if isinstance(word, Collective) and word.value.name == "grad" and word.value.blocks in self.parts:
            return replace(word, value=grad((0,))), part * self.parts[word.value.blocks]
        return word, part
