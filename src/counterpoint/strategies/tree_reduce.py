r"""Tree reduction: gradients are summed up a tree of replicas; its root updates and sends weights down the same tree.

::

    binomial (5 replicas)      star            chain
           0                    0              0 <- 1 <- 2 <- 3
         / | \\                /|\\
        1  2  4              1 2 3
           |
           3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.optim.validation import renamed_parameters
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Instruction,
    Recv,
    Send,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import (
    grad_completion_index,
    replicate,
    split_at_commit,
    widen_commits,
)
from counterpoint.strategies.options import changed_options, format_term, require_choice
from counterpoint.strategies.renamed import RENAMED
from counterpoint.strategies.replica_groups import updated_units, uses_servers
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy

TreeShape: TypeAlias = Literal["binomial", "star", "chain"]


@renamed_parameters({"sends": RENAMED["sends"]})
@dataclass(frozen=True, slots=True)
class TreeReduce(Strategy):
    """Replicate the program ``degree`` times; gradients are summed up a tree to replica 0, which alone updates.

    Weights are sent down the same tree. With ``shape=binomial`` replica i sends its gradients to the replica whose
    number is i without its lowest set bit, so that the tree has depth ``log2 n``; with ``star`` to replica 0; with
    ``chain`` to replica i-1, which forwards every unit as soon as it has it. Trees can be nested: ``tree(4) * tree(2)``
    is one tree in each of two groups, and one between the first replicas of the groups.

    Args:
        degree: number of ranks along the new axis.
        shape: ``binomial``, ``star`` or ``chain``.
        send: ``after_backward`` sends all gradients after the last backward; ``during_backward`` sends each as soon as
            it is complete. A gradient that children add to is received and forwarded one backward later.

    Cost:
        Bytes sent per step, for P bytes of weights: P for the gradients of each replica but the root, and P for each
        child that is sent weights. In total ``2 (n-1) P``, of which the root sends ``ceil(log2 n) P``, ``(n-1) P`` and
        ``P`` in the three shapes. Memory: optimizer state only on the root.

    Source:
        Iandola et al., FireCaffe, CVPR 2016, section 5 (binomial).
        Awan et al., S-Caffe, PPoPP 2017 (chains within binomial trees, sends during the backward).
    """

    degree: int
    shape: TreeShape = "binomial"
    send: Literal["after_backward", "during_backward"] = "after_backward"

    axis: ClassVar[str] = "tree"

    def __post_init__(self) -> None:
        require_choice("tree", "shape", self.shape, get_args(TreeShape))
        require_choice("tree", "send", self.send, ("after_backward", "during_backward"))

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return format_term("tree", self.degree, changed_options(self, "shape", "send"))

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be split."""
        return "prefer_blocks" if self.send == "during_backward" else "whole"

    def parent(self, replica: int) -> int:
        """Return the replica to which a replica other than the root sends its gradients."""
        match self.shape:
            case "binomial":
                return replica & (replica - 1)
            case "star":
                return 0
            case "chain":
                return replica - 1

    def children(self, replica: int) -> tuple[int, ...]:
        """Return the replicas that send their gradients to this one, those with the smallest subtrees first."""
        return tuple(other for other in range(replica + 1, self.degree) if self.parent(other) == replica)

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas.

        Raises:
            PlanError: gradients are sharded, or the weights live on servers.
        """
        if uses_servers(program):
            raise PlanError(f"{self} comes after server, which keeps the weights already; write data(...) instead")
        instructions = (instruction for _, instruction in program.instructions())
        if any(isinstance(one, Collective) and one.op == "reduce_scatter" for one in instructions):
            raise PlanError(
                f"{self} comes after a strategy that shards gradients, but sends whole ones; write data(...) instead "
                "of either"
            )
        if self.degree == 1:
            return program
        stride = program.num_ranks
        replicated = widen_commits(replicate(program, self.degree), self.degree)
        rank_programs = []
        for rank, rank_program in enumerate(replicated.rank_programs):
            replica, offset = divmod(rank, stride)
            parent = self.parent(replica) * stride + offset if replica else None
            children = tuple(child * stride + offset for child in self.children(replica))
            rank_programs.append(_TreeRank(self.send, parent, children).rewrite(rank_program))
        return Program(tuple(rank_programs))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with gradients sent up the tree and weights sent down."""
        if self.degree == 1:
            return inner
        ranks = tuple(self._rank_cost(replica, rank) for replica in range(self.degree) for rank in inner.ranks)
        return replace(inner, ranks=ranks, num_micros=inner.num_micros * self.degree)

    def _rank_cost(self, replica: int, rank: RankCost) -> RankCost:
        num_messages = len(self.children(replica)) + (replica > 0)
        other_bytes = rank.other_bytes + num_messages * rank.updated_bytes
        if replica:
            return replace(rank, other_bytes=other_bytes, updates={}, optimizer_fraction=Fraction(0))
        return replace(rank, other_bytes=other_bytes)


@dataclass(frozen=True, slots=True)
class _TreeRank:
    """One rank's position in its tree.

    Args:
        send: when gradients are sent up.
        parent: the rank to which it sends gradients; None for the root.
        children: the ranks from which it receives gradients.
    """

    send: Literal["after_backward", "during_backward"]
    parent: int | None
    children: Sequence[int]

    def rewrite(self, rank_program: RankProgram) -> RankProgram:
        """Return the rank program with its messages; one that updates nothing has none."""
        body = rank_program.body
        compute, update = split_at_commit(body)
        with_grads = self.add_grad_messages(compute, updated_units(body))
        return replace(rank_program, body=(*with_grads, *self.add_weight_messages(update)))

    def add_grad_messages(self, instructions: Instructions, units: Sequence[Unit]) -> Iterator[Instruction]:
        """Yield the instructions and the messages with gradients, in the order in which gradients are complete."""
        due: dict[int, list[Unit]] = {}
        for index, unit in sorted((grad_completion_index(instructions, unit) or 0, unit) for unit in units):
            due.setdefault(self.message_index(instructions, index), []).append(unit)
        for index, instruction in enumerate(instructions):
            yield instruction
            for unit in due.get(index, ()):
                yield from (Recv(grad(unit), child) for child in self.children)
                if self.parent is not None:
                    yield Send(grad(unit), self.parent)

    def message_index(self, instructions: Instructions, complete: int) -> int:
        """Return the index of the instruction after which a gradient is received and sent.

        Args:
            instructions: up to the commit.
            complete: index of the instruction that completes the gradient.
        """
        if self.send == "after_backward":
            return len(instructions) - 1
        index = complete
        if self.children:  # one more backward, so that the children's messages have time to arrive
            later = range(complete + 1, len(instructions))
            index = next(
                (later_index for later_index in later if isinstance(instructions[later_index], Backward)), complete
            )
        while index + 1 < len(instructions) and isinstance(instructions[index + 1], Send):
            index += 1  # another pipeline stage may be waiting for what this one sends: that goes first
        return index

    def add_weight_messages(self, instructions: Instructions) -> Iterator[Instruction]:
        """Yield the instructions from the commit on, with weights received from the parent and sent to the children."""
        last = max(
            (index for index, instruction in enumerate(instructions) if isinstance(instruction, Update)), default=-1
        )
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Update) and self.parent is not None:
                yield Recv(weight(instruction.unit), self.parent)
                yield from self.send_down(instruction.unit)
            else:
                yield instruction
            if index == last and self.parent is None:
                yield from (send for unit in updated_units(instructions) for send in self.send_down(unit))

    def send_down(self, unit: Unit) -> Iterable[Instruction]:
        """Return the messages with weights, to the children with the largest subtrees first."""
        return (Send(weight(unit), child) for child in reversed(self.children))
