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
from counterpoint.strategies.renamed import renamed_hint
from counterpoint.strategies.replica_groups import receives_grad, updated_units
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost

TreeShape: TypeAlias = Literal["binomial", "star", "chain"]


@dataclass(frozen=True, slots=True)
class TreeReduce:
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
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.shape not in get_args(TreeShape):
            raise PlanError(f"tree has no shape={self.shape}; give shape=binomial, shape=star or shape=chain")
        if self.send not in {"after_backward", "during_backward"}:
            hint = renamed_hint(f"send={self.send}")
            raise PlanError(f"tree has no send={self.send}; give send=after_backward or send=during_backward{hint}")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"shape={self.shape}"] if self.shape != "binomial" else []
        options += [f"send={self.send}"] if self.send != "after_backward" else []
        return f"tree({', '.join([str(self.degree), *options])})"

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be split."""
        return "prefer_blocks" if self.send == "during_backward" else "whole"

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model unchanged."""
        return model

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
        if _uses_servers(program):
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
        other_bytes = rank.other_bytes + num_messages * sum(rank.updates.values(), Fraction(0))
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
        commit = next((index for index, instruction in enumerate(body) if isinstance(instruction, Commit)), len(body))
        compute, update = body[:commit], body[commit:]
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


def uses_tree_reduce(program: Program) -> bool:
    """Tell whether gradients are sent to a rank that computes gradients itself: then the others do not update."""
    computing = (rank_program.body for rank_program in program.rank_programs if forward_blocks(rank_program))
    return any(receives_grad(instruction) for body in computing for instruction in body)


def _uses_servers(program: Program) -> bool:
    not_computing = (rank_program.body for rank_program in program.rank_programs if not forward_blocks(rank_program))
    return any(
        isinstance(instruction, ApplyPushes) or receives_grad(instruction)
        for body in not_computing
        for instruction in body
    )
