"""Gradients that go up a tree of replicas to the first one, which updates, and weights that come down the same tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Instruction,
    Recv,
    Send,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import forward_blocks, grad_completion_index, replicate, widen_commits
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost

TreeShape: TypeAlias = Literal["binomial", "star", "chain"]


@dataclass(frozen=True, slots=True)
class TreeReduce:
    """Copy the program ``degree`` times; gradients are added up along a tree to the first copy, which alone updates.

    The weights come back along the same tree. With ``shape=binomial`` copy i hands its gradients to the copy whose
    number is i without its lowest bit, so that ``log2 n`` messages follow each other; with ``star`` to copy 0; with
    ``chain`` to copy i-1, which hands every unit on as soon as it has it. Trees may be nested: ``tree(4) * tree(2)``
    is one inside each of two groups, and one between the first copies of the groups.

    Args:
        degree: ranks along the new axis.
        shape: ``binomial``, ``star`` or ``chain``.
        sends: ``after_backward`` for gradients that are sent after all backwards, ``during_backward`` for each as soon as it is complete;
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
    shape: TreeShape = "binomial"
    send: Literal["after_backward", "during_backward"] = "after_backward"

    axis: ClassVar[str] = "tree"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.shape not in get_args(TreeShape):
            raise PlanError(f"tree has no shape={self.shape}; give shape=binomial, shape=star or shape=chain")
        if self.send not in {"after_backward", "during_backward"}:
            raise PlanError(f"tree has no send={self.send}; give send=after_backward or send=during_backward")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"shape={self.shape}"] if self.shape != "binomial" else []
        options += [f"send={self.send}"] if self.send != "after_backward" else []
        return f"tree({', '.join([str(self.degree), *options])})"

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be cut."""
        return "prefer_blocks" if self.send == "during_backward" else "whole"

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
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
        if _uses_servers(program):
            raise PlanError(
                f"{self} stands behind server, which keeps the weights already; write data(...) in its place"
            )
        if any(isinstance(word, Collective) and word.op == "reduce_scatter" for _, word in program.instructions()):
            raise PlanError(
                f"{self} stands where gradients have been shared out, but hands on whole ones; write data(...) in its "
                "place, or data(...) instead of what shares out"
            )
        if self.degree == 1:
            return program
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)
        rows = []
        for rank, row in enumerate(copies.rank_programs):
            copy, place = divmod(rank, stride)
            up = self.parent(copy) * stride + place if copy else None
            down = tuple(child * stride + place for child in self.children(copy))
            rows.append(_TreeRank(self.send, up, down).rewrite(row))
        return Program(tuple(rows))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with gradients on their way up and weights on their way down."""
        if self.degree == 1:
            return inner
        ranks = tuple(self._rank_cost(copy, rank) for copy in range(self.degree) for rank in inner.ranks)
        return replace(inner, ranks=ranks, num_micros=inner.num_micros * self.degree)

    def _rank_cost(self, copy: int, rank: RankCost) -> RankCost:
        messages = len(self.children(copy)) + (copy > 0)
        sent = rank.other_bytes + messages * sum(rank.updates.values(), Fraction(0))
        return (
            replace(rank, other_bytes=sent, updates={}, optimizer_fraction=Fraction(0))
            if copy
            else replace(rank, other_bytes=sent)
        )


@dataclass(frozen=True, slots=True)
class _TreeRank:
    """One rank's place in its tree.

    Args:
        sends: when gradients are handed on.
        up: the rank it hands gradients to; None for the first copy's.
        down: the ranks it gets gradients from.
    """

    send: Literal["after_backward", "during_backward"]
    parent: int | None
    children: Sequence[int]

    def rewrite(self, row: RankProgram) -> RankProgram:
        """Return the row with its messages; one that updates nothing has none."""
        at = next((index for index, word in enumerate(row.body) if isinstance(word, Commit)), len(row.body))
        units = [word.unit for word in row.body if isinstance(word, Update)]
        return replace(
            row, body=(*self.add_grad_messages(row.body[:at], units), *self.add_weight_messages(row.body[at:]))
        )

    def add_grad_messages(self, words: Instructions, units: Sequence[Unit]) -> Iterator[Instruction]:
        """Yield the words, and gradients coming in and going out behind them, in the order of their completion."""
        due: dict[int, list[Unit]] = {}
        for index, unit in sorted((grad_completion_index(words, unit) or 0, unit) for unit in units):
            due.setdefault(self.message_index(words, index), []).append(unit)
        for index, word in enumerate(words):
            yield word
            for unit in due.get(index, ()):
                yield from (Recv(grad(unit), child) for child in self.children)
                yield from self.send_up(unit)

    def message_index(self, words: Instructions, complete: int) -> int:
        """Return the index of the word behind which a gradient comes in and goes out.

        One that is sent early goes as soon as it is complete. Where others add to it, it waits for one more backward,
        so that their messages have had as long to arrive; not for a sum, in which others may be waited for. What the
        words before send, a stage of a pipeline may be waiting for: it goes first.
        """
        if self.send == "after_backward":
            return len(words) - 1
        place = complete
        if self.children:
            later = range(complete + 1, len(words))
            place = next((index for index in later if isinstance(words[index], Backward)), complete)
        while place + 1 < len(words) and isinstance(words[place + 1], Send):
            place += 1
        return place

    def send_up(self, unit: Unit) -> Iterable[Instruction]:
        """Return the message with a gradient; none where it is for the first copy to apply."""
        return (Send(grad(unit), self.parent),) if self.parent is not None else ()

    def add_weight_messages(self, words: Instructions) -> Iterator[Instruction]:
        """Yield the words from the commit on; what is not updated here comes from above, and all of it goes down."""
        last = max((index for index, word in enumerate(words) if isinstance(word, Update)), default=-1)
        units = [word.unit for word in words if isinstance(word, Update)]
        for index, word in enumerate(words):
            if isinstance(word, Update) and self.parent is not None:
                yield Recv(weight(word.unit), self.parent)
                yield from self.send_down(word.unit)
            else:
                yield word
            if index == last and self.parent is None:
                yield from (sent for unit in units for sent in self.send_down(unit))

    def send_down(self, unit: Unit) -> Iterable[Instruction]:
        """Return the messages with weights, to those with the largest subtrees first."""
        return (Send(weight(unit), child) for child in reversed(self.children))


def uses_tree_reduce(program: Program) -> bool:
    """Tell whether gradients are handed to a rank that computes gradients, too: then the others update nothing."""
    computing = (row.body for row in program.rank_programs if forward_blocks(row))
    return any(_receives_grad(word) for words in computing for word in words)


def _uses_servers(program: Program) -> bool:
    idle = (row.body for row in program.rank_programs if not forward_blocks(row))
    return any(isinstance(word, ApplyPushes) or _receives_grad(word) for words in idle for word in words)


def _receives_grad(word: Instruction) -> bool:
    return isinstance(word, Recv) and word.tensor.name == "grad"
