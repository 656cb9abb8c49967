"""Gradients that go up a tree of replicas to the first one, which updates, and weights that come down the same tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Instruction,
    Recv,
    Send,
    Serve,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.rewrite import blocks_of, completion, replicate, widen_commits
from counterpoint.strategies.strategy import Forecast, Need, RankForecast

Shape: TypeAlias = Literal["binomial", "star", "chain"]


@dataclass(frozen=True, slots=True)
class Tree:
    """Copy the program ``degree`` times; gradients are added up along a tree to the first copy, which alone updates.

    The weights come back along the same tree. With ``shape=binomial`` copy i hands its gradients to the copy whose
    number is i without its lowest bit, so that ``log2 n`` messages follow each other; with ``star`` to copy 0; with
    ``chain`` to copy i-1, which hands every unit on as soon as it has it. Trees may be nested: ``tree(4) * tree(2)``
    is one inside each of two groups, and one between the first copies of the groups.

    Args:
        degree: ranks along the new axis.
        shape: ``binomial``, ``star`` or ``chain``.
        sends: ``last`` for gradients that are sent after all backwards, ``early`` for each as soon as it is complete;
            where others add to it, it is received and handed on one backward later.

    Cost:
        Bytes sent per step, with P bytes of weights: P for the gradients of each copy but the first, and P for each
        copy that gets its weights from this one. In all ``2 (n-1) P``; of that the first sends ``ceil(log2 n) P``,
        ``(n-1) P`` and ``P`` in the three shapes. Memory: optimizer state only on the first copy.

    Source:
        Iandola et al., FireCaffe, CVPR 2016, section 5 (binomial).
        Awan et al., S-Caffe, PPoPP 2017 (chains within binomial trees, sends during the backward).
    """

    degree: int
    shape: Shape = "binomial"
    sends: Literal["last", "early"] = "last"

    axis: ClassVar[str] = "tree"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise PlanError(f"tree has no shape={self.shape}; give shape=binomial, shape=star or shape=chain")
        if self.sends not in {"last", "early"}:
            raise PlanError(f"tree has no sends={self.sends}; give sends=last or sends=early")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"shape={self.shape}"] if self.shape != "binomial" else []
        options += [f"sends={self.sends}"] if self.sends != "last" else []
        return f"tree({', '.join([str(self.degree), *options])})"

    @property
    def need(self) -> Need:
        """How finely the model should be cut."""
        return "wish" if self.sends == "early" else "none"

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def parent(self, copy: int) -> int:
        """Return the copy that one which is not the first hands its gradients to."""
        match self.shape:
            case "binomial":
                return copy & (copy - 1)
            case "star":
                return 0
            case "chain":
                return copy - 1

    def children(self, copy: int) -> tuple[int, ...]:
        """Return the copies that hand their gradients to this one, those with the smallest subtrees first."""
        return tuple(other for other in range(copy + 1, self.degree) if self.parent(other) == copy)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` copies.

        Raises:
            PlanError: gradients have been shared out, or the weights live on servers.
        """
        if _has_server(program):
            raise PlanError(
                f"{self} stands behind server, which keeps the weights already; write data(...) in its place"
            )
        if any(isinstance(word, Collective) and word.verb == "reduce_scatter" for _, word in program.words()):
            raise PlanError(
                f"{self} stands where gradients have been shared out, but hands on whole ones; write data(...) in its "
                "place, or data(...) instead of what shares out"
            )
        if self.degree == 1:
            return program
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)
        rows = []
        for rank, row in enumerate(copies.rows):
            copy, place = divmod(rank, stride)
            up = self.parent(copy) * stride + place if copy else None
            down = tuple(child * stride + place for child in self.children(copy))
            rows.append(_Node(self.sends, up, down).row(row))
        return Program(tuple(rows))

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with gradients on their way up and weights on their way down."""
        if self.degree == 1:
            return before
        ranks = tuple(self._forecast_rank(copy, rank) for copy in range(self.degree) for rank in before.ranks)
        return replace(before, ranks=ranks, num_micros=before.num_micros * self.degree)

    def _forecast_rank(self, copy: int, rank: RankForecast) -> RankForecast:
        messages = len(self.children(copy)) + (copy > 0)
        sent = rank.sent + messages * sum(rank.updates.values(), Fraction(0))
        return replace(rank, sent=sent, updates={}, updated=Fraction(0)) if copy else replace(rank, sent=sent)


@dataclass(frozen=True, slots=True)
class _Node:
    """One rank's place in its tree.

    Args:
        sends: when gradients are handed on.
        up: the rank it hands gradients to; None for the first copy's.
        down: the ranks it gets gradients from.
    """

    sends: Literal["last", "early"]
    up: int | None
    down: Sequence[int]

    def row(self, row: Row) -> Row:
        """Return the row with its messages; one that updates nothing has none."""
        at = next((index for index, word in enumerate(row.body) if isinstance(word, Commit)), len(row.body))
        units = [word.unit for word in row.body if isinstance(word, Update)]
        return replace(row, body=(*self.with_gradients(row.body[:at], units), *self.with_weights(row.body[at:])))

    def with_gradients(self, words: Words, units: Sequence[Unit]) -> Iterator[Instruction]:
        """Yield the words, and gradients coming in and going out behind them, in the order of their completion."""
        due: dict[int, list[Unit]] = {}
        for index, unit in sorted((completion(words, unit) or 0, unit) for unit in units):
            due.setdefault(self.place(words, index), []).append(unit)
        for index, word in enumerate(words):
            yield word
            for unit in due.get(index, ()):
                yield from (Recv(grad(unit), child) for child in self.down)
                yield from self.hand_on(unit)

    def place(self, words: Words, complete: int) -> int:
        """Return the index of the word behind which a gradient comes in and goes out.

        One that is sent early goes as soon as it is complete. Where others add to it, it waits for one more backward,
        so that their messages have had as long to arrive; not for a sum, in which others may be waited for. What the
        words before send, a stage of a pipeline may be waiting for: it goes first.
        """
        if self.sends == "last":
            return len(words) - 1
        place = complete
        if self.down:
            later = range(complete + 1, len(words))
            place = next((index for index in later if isinstance(words[index], Backward)), complete)
        while place + 1 < len(words) and isinstance(words[place + 1], Send):
            place += 1
        return place

    def hand_on(self, unit: Unit) -> Iterable[Instruction]:
        """Return the message with a gradient; none where it is for the first copy to apply."""
        return (Send(grad(unit), self.up),) if self.up is not None else ()

    def with_weights(self, words: Words) -> Iterator[Instruction]:
        """Yield the words from the commit on; what is not updated here comes from above, and all of it goes down."""
        last = max((index for index, word in enumerate(words) if isinstance(word, Update)), default=-1)
        units = [word.unit for word in words if isinstance(word, Update)]
        for index, word in enumerate(words):
            if isinstance(word, Update) and self.up is not None:
                yield Recv(weight(word.unit), self.up)
                yield from self.spread(word.unit)
            else:
                yield word
            if index == last and self.up is None:
                yield from (sent for unit in units for sent in self.spread(unit))

    def spread(self, unit: Unit) -> Iterable[Instruction]:
        """Return the messages with weights, to those with the largest subtrees first."""
        return (Send(weight(unit), child) for child in reversed(self.down))


def has_tree(program: Program) -> bool:
    """Tell whether gradients are handed to a rank that computes gradients, too: then the others update nothing."""
    computing = (row.body for row in program.rows if blocks_of(row))
    return any(_takes_gradient(word) for words in computing for word in words)


def _has_server(program: Program) -> bool:
    idle = (row.body for row in program.rows if not blocks_of(row))
    return any(isinstance(word, Serve) or _takes_gradient(word) for words in idle for word in words)


def _takes_gradient(word: Instruction) -> bool:
    return isinstance(word, Recv) and word.value.name == "grad"
