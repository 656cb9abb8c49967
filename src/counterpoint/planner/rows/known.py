"""What is worked out once and kept: a model as slices and stages leave it, and all that one row says by itself."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction

from counterpoint.compiler.compile import sizes_in
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.model.timing import Timing
from counterpoint.planner.given import held_bytes
from counterpoint.planner.playing import backward_portions, costs_on, is_divisible
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Instruction,
    Pull,
    Push,
    Recv,
    Release,
    Send,
    Update,
)
from counterpoint.program.partners import Kinds, by_kind
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.symmetry import Outlines
from counterpoint.program.traffic import Sizes, sent_bytes
from counterpoint.simulator.costs import Costs
from counterpoint.simulator.memory import peak_bytes
from counterpoint.simulator.network import Message, Talk
from counterpoint.simulator.portions import Portion, Spread, spread_alike
from counterpoint.simulator.row_times import Times, time_row
from counterpoint.strategies.buckets import Buckets
from counterpoint.strategies.recomputation import Recomputation
from counterpoint.strategies.solo import solo
from counterpoint.strategies.strategy import Strategy
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Bill:
    """What rows hold and send that are equal but for ranks and microbatches."""

    sent_bytes: Fraction
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row of a program, with all that can be said about it without the other rows.

    Args:
        words: what the rank does.
        kinds: the places of words of each kind.
        outline: a number that rows have in common which are equal but for ranks and microbatches, and cost alike.
        place: the rank whose row it is, where ranks differ.
        row: what it is before its words are made finer, which is what holds and sends.
        own: the outline of that.
        costs: of its words, on each cluster.
    """

    words: Words
    kinds: Kinds
    outline: int
    place: int
    row: Row
    own: int
    costs: tuple[Costs, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """Costs that are worked out once for all microbatches.

    Args:
        costs: which.
        found: what has been asked for.
    """

    costs: Costs
    found: dict[Hashable, float] = field(default_factory=dict)

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return what the costs say."""
        if isinstance(word, Update):
            key: Hashable = (Update, word.unit, part.numerator, part.denominator)
        else:
            key = (type(word), word.block, word.part if isinstance(word, Backward) else "")
        if key not in self.found:
            self.found[key] = self.costs.compute_s(word, part)
        return self.found[key]

    def call_s(self, word: Instruction) -> float:
        """Return what the costs say."""
        return self.costs.call_s(word)

    def add_s(self, block: int) -> float:
        """Return what the costs say."""
        return self.costs.add_s(block)

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what the costs say."""
        key = ("link", _without_micro(word), part.numerator, part.denominator, rank)
        if key not in self.found:
            self.found[key] = self.costs.link_s(word, part, rank)
        return self.found[key]

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return what the costs say."""
        key = ("crossing", _without_micro(word), part.numerator, part.denominator, rank)
        if key not in self.found:
            self.found[key] = self.costs.crossing_s(word, part, rank)
        return self.found[key]

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return what the costs say."""
        key = ("hand", _without_micro(word), part.numerator, part.denominator, rank, has_one_copy)
        if key not in self.found:
            self.found[key] = self.costs.hand_s(word, part, rank, has_one_copy=has_one_copy)
        return self.found[key]

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell what the costs say."""
        return self.costs.is_streamed(word, rank)

    def pass_s(self, word: Talk | Release) -> float:
        """Return what the costs say."""
        key = ("pass", _without_micro(word) if isinstance(word, Commit) else (word.value.name, word.value.blocks))
        if key not in self.found:
            self.found[key] = self.costs.pass_s(word)
        return self.found[key]

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return what the costs say."""
        return self.costs.serve_s(unit, server, worker)


def _without_micro(word: Talk) -> Hashable:
    """Return all that a word's cost depends on, but for the part of its value that is at hand."""
    match word:
        case Collective(_, value, group):
            return word.name, value.name, value.blocks, group
        case Send(value, peer, code) | Push(value, peer, code) | Recv(value, peer, code):
            return type(word), value.name, value.blocks, peer, code
        case Pull(value, peer):
            return type(word), value.name, value.blocks, peer
        case Commit(group):
            return group


@dataclass(slots=True)
class Cut:
    """A model with the blocks that a plan needs, for microbatches of so many samples, and what is known of its rows.

    Args:
        model: with these blocks.
        clusters: where it runs; ranks are where they are on the first one.
        samples: of one microbatch.
        num_micros: microbatches of a step, of all ranks.
        timing: of the model's own pieces; None where their work is only counted.
    """

    model: ModelSpec
    clusters: tuple[Cluster, ...]
    samples: int
    num_micros: int
    timing: Timing | None = None
    sizes: Sizes = field(init=False)
    held: Sizes = field(init=False)
    costs: tuple[Kept, ...] = field(init=False)
    is_chain: bool = field(init=False)
    plain: Outlines = field(default_factory=Outlines)
    outlines: dict[Hashable, int] = field(default_factory=dict)
    bills: dict[int, Bill] = field(default_factory=dict)
    times: dict[tuple[int, int, int], Times] = field(default_factory=dict)
    crossings: dict[tuple[int, int], float] = field(default_factory=dict)
    rows: dict[Hashable, KnownRow] = field(default_factory=dict)
    stages: dict[Hashable, Row] = field(default_factory=dict)
    inner: dict[Hashable, Program] = field(default_factory=dict)
    portions: dict[Buckets, tuple[Portion, ...]] = field(default_factory=dict)
    again: dict[Recomputation, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = sizes_in(self.model, self.samples)
        self.held = held_bytes(self.model, self.samples, self.timing)
        costs = costs_on(
            self.clusters, self.model, samples=self.samples, num_micros=self.num_micros, timing=self.timing
        )
        self.costs = tuple(map(Kept, costs))
        self.is_chain = _is_chain(self.model)

    @property
    def cluster(self) -> Cluster:
        """The first of the clusters."""
        return self.clusters[0]

    def inner_program(self, num_microbatches: int, slices: tuple[Strategy, ...]) -> Program:
        """Return the program of one stage that runs everything: solo's, or the first slice beside empty rows."""
        key = num_microbatches, slices
        if key not in self.inner:
            program = solo(self.model, num_microbatches)
            for strategy in slices:
                first, *others = strategy.lower(program, self.model).rows
                program = Program((first, *(Row(()) for _ in others)))
            self.inner[key] = program
        return self.inner[key]

    def recomputed(self, asked: Recomputation) -> frozenset[int]:
        """Return the blocks that are recomputed.

        Raises:
            PlanError: none is of that name.
        """
        if asked not in self.again:
            self.again[asked] = asked.blocks(self.model)
        return self.again[asked]

    def know(self, row: Row, rank: int, finer: Spread | None) -> KnownRow:
        """Return the row of a rank with all that it says by itself; its words are those of what is played, finer."""
        own = self._outline(row, ())
        shown, outline, costs = row, own, tuple[Costs, ...](self.costs)
        if finer is not None:
            (shown,) = finer.turn.program.rows
            outline = self._outline(shown, finer.portions)
            costs = tuple(finer.costs(one) for one in self.costs)
        place = rank if self.cluster.levels or self.cluster.slow_links or self.cluster.speeds else 0
        return KnownRow(shown.body, by_kind(shown.body), outline, place, row, own, costs)

    def bill(self, known: KnownRow) -> Bill:
        """Return what a row holds and sends."""
        if known.own not in self.bills:
            alone = Program((known.row,))
            self.bills[known.own] = Bill(sent_bytes(alone, self.sizes)[0], peak_bytes(alone, self.held)[0])
        return self.bills[known.own]

    def time(self, known: KnownRow, at: int) -> Times:
        """Return what the words of a row take on one of the clusters."""
        key = known.outline, known.place, at
        if key not in self.times:
            self.times[key] = time_row(known.words, known.costs[at], rank=known.place, cluster=self.cluster)
        return self.times[key]

    def finer(self, row: Row, buckets: Buckets) -> Spread | None:
        """Return a step in which all ranks have rows like this with early sums in buckets; None without such sums."""
        if not is_divisible(self.model):
            return None
        if buckets not in self.portions:
            self.portions[buckets] = backward_portions(self.model, self.costs[0], buckets, self.samples, self.timing)
        return spread_alike(row, self.portions[buckets], self.cluster)

    def _outline(self, row: Row, portions: tuple[Portion, ...]) -> int:
        return self.outlines.setdefault((self.plain.number(row, row.body), portions), len(self.outlines))


def _is_chain(model: ModelSpec) -> bool:
    """Tell whether each block hands on to the next one alone and no two share weights.

    What a stage does then depends on where the others begin only in the names of what it sends and receives.
    """
    strands = model.strands
    links = [strand.blocks for strand in strands if strand.gradient_bytes is not None]
    return (
        len(strands) == len(links)
        and links == [(block, block + 1) for block in range(model.num_blocks - 1)]
        and all(len(unit) == 1 for unit in model.units)
    )
