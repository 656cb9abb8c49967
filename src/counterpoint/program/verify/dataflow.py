"""Law 1: whatever is sent is received, once and in its order.

Law 4, along each row: every word finds what it reads, and values come to those that read them, and to no others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from counterpoint.errors import ProgramError
from counterpoint.program.edges import Edge, chain_edges, edge_endpoints, skip_edges
from counterpoint.program.execution_order import format_locations, rule_violation
from counterpoint.program.instruction import (
    ACTIVATION_GRADS,
    ACTIVATIONS,
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Forward,
    Free,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    TensorRef,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.text import format_tensor_ref

_MessageKey: TypeAlias = tuple[str, TensorRef, int, int, str]
"""A send or a push: which, of what, from whom, to whom, in which code."""
_MESSAGE_TYPES = {Send, Recv, Push, Pull, ApplyPushes}


def check_p2p_matching(rows: Sequence[Instructions]) -> None:
    """Prove that sends and receives, pushes and pulls come in pairs, and messages between two ranks in their order.

    Raises:
        ProgramError: law 1; a word has no counterpart, or another one's.
    """
    balance: defaultdict[_MessageKey, int] = defaultdict(int)
    for rank, row in enumerate(rows):
        for word in row:
            if type(word) in _MESSAGE_TYPES:
                for key, weight in _count_messages(rank, word):
                    balance[key] += weight
    for key, count in balance.items():
        if count:
            kind, value, source, target, code = key
            coded = f" in {code}" if code else ""
            excess = "is never received" if count > 0 else "is never sent"
            if kind == "push":
                excess = "is never answered by a pull" if count > 0 else "is pulled without a push"
            elif kind == "push_no_reply":
                excess = "is never applied" if count > 0 else "is applied, but never pushed"
            rank, index = max(
                (at, index)
                for at, row in enumerate(rows)
                for index, word in enumerate(row)
                if any(found == key for found, _ in _count_messages(at, word))
            )
            raise ProgramError(
                f"{format_tensor_ref(value)}{coded} from rank {source} to rank {target} {excess}; every {kind} has exactly "
                f"one counterpart\n{format_locations(rows, {rank: index}, 'here')}",
                rule=1,
            )

    _check_receive_order(rows)


def _check_receive_order(rows: Sequence[Instructions]) -> None:
    """Prove that each rank takes what another one sends it in the order in which that sends it."""
    sent: defaultdict[tuple[int, int], list[TensorRef]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for word in row:
            if type(word) is Send:
                sent[rank, word.peer].append(word.tensor)
    taken: Counter[tuple[int, int]] = Counter()
    for rank, row in enumerate(rows):
        for index, word in enumerate(row):
            if type(word) is not Recv:
                continue
            expected = sent[word.peer, rank][taken[word.peer, rank]]
            taken[word.peer, rank] += 1
            if word.tensor != expected:
                raise ProgramError(
                    f"rank {rank} receives {format_tensor_ref(word.tensor)} where rank {word.peer} has sent "
                    f"{format_tensor_ref(expected)} before; messages from one rank to another are received in the order in "
                    f"which they are sent\n{format_locations(rows, {rank: index}, 'here')}",
                    rule=1,
                )


def _count_messages(rank: int, word: Instruction) -> Iterator[tuple[_MessageKey, int]]:
    """Yield what a word says, 1, or takes, -1. What is pulled is told apart by its unit alone."""
    match word:
        case Send(value, peer, code):
            yield ("send", value, rank, peer, code), 1
        case Recv(value, peer, code):
            yield ("send", value, peer, rank, code), -1
        case Push(value, peer, op="push_no_reply"):
            yield ("push_no_reply", value, rank, peer, ""), 1
        case Push(value, peer):
            yield ("push", TensorRef("grad", value.blocks), rank, peer, ""), 1
        case Pull(value, peer):
            yield ("push", TensorRef("grad", value.blocks), rank, peer, ""), -1
        case ApplyPushes(units, workers, op="apply"):
            yield from (
                (("push_no_reply", TensorRef("grad", unit), worker, rank, ""), -1)
                for worker in workers
                for unit in units
            )
        case _:
            pass


_LiveValue: TypeAlias = tuple[str, tuple[int, ...], int | None, int]
"""Something there for a microbatch: ``v`` for the values of a strand, ``d`` for what one of its readers adds to their
gradient (the last number is that block), ``y`` or ``dx`` of a block as long as nobody has summed it, ``Bi`` for what
the input part of a backward leaves for the weight part.
"""
_EdgesByBlock: TypeAlias = "dict[int, list[tuple[int, ...]]]"


class _Effects(NamedTuple):
    """What must be there for a word, what is gone after it, what is there after it, and what is wrong with it."""

    reads: Collection[_LiveValue] = ()
    consumes: Collection[_LiveValue] = ()
    produces: Collection[_LiveValue] = ()
    error: str = ""


_NO_EFFECTS = _Effects()
_PARTIAL_SUM_RULE = "only partial results are combined like this, and only by their sum"


class _Dataflow:
    """What the flow of values depends on besides the words.

    Args:
        strands: those of the model.
        last: the last block, whose output nobody reads and which has no gradient to wait for.
        sliced: the blocks whose outputs and input gradients are partial on every rank.
        rows: the flat rows.
    """

    def __init__(
        self, edges: Iterable[Edge], last_block: int, tp_blocks: Collection[int], rows: Sequence[Instructions]
    ) -> None:
        self.last_block = last_block
        self.tp_blocks = tp_blocks
        self.blocks_by_rank = [frozenset(word.block for word in row if type(word) is Forward) for row in rows]
        self.edges_from: _EdgesByBlock = defaultdict(list)
        self.edges_into: _EdgesByBlock = defaultdict(list)
        self.edges_with_grad: set[tuple[int, ...]] = set()  # those that a gradient comes back for
        for strand in edges:
            blocks = strand.endpoints
            self.edges_from[strand.producer].append(blocks)
            for reader in strand.consumers:
                self.edges_into[reader].append(blocks)
            if strand.grad_bytes is not None:
                self.edges_with_grad.add(blocks)
        self.output_edge = (last_block, last_block + 1)
        self.edges_from[last_block] = [self.output_edge]

    def effects(self, rank: int, word: Instruction) -> _Effects:
        """Return what a word does on a rank."""
        match word:
            case Forward(block, micro):
                needed = [("v", blocks, micro, 0) for blocks in self.edges_into[block]]
                return _Effects(needed, (), self.forward_results(block, micro, is_summed=block not in self.tp_blocks))
            case Recompute(block, micro):
                return _Effects([("v", blocks, micro, 0) for blocks in self.edges_into[block]])
            case Backward(block, micro):
                left = (("Bi", (block,), micro, 0),)
                if not word.computes_input_grad:
                    return _Effects(left, left)
                flow = self.backward_effects(rank, block, micro)
                return flow if word.computes_weight_grad else flow._replace(produces=(*flow.produces, *left))
            case Recv() | Send() | Free() | Collective() if word.tensor.name not in UNIT_TENSORS:
                return self.transfer_effects(rank, word)
            case _:
                return _NO_EFFECTS

    def transfer_effects(self, rank: int, word: Recv | Send | Free | Collective) -> _Effects:
        """Return what a word does with values and gradients of microbatches."""
        value = word.tensor
        match word:
            case Recv():
                return self.receive_effects(rank, word)
            case Send():
                return self.send_effects(rank, value)
            case Free():
                here = self.live_values(value)
                return _Effects(here, here)
            case Collective(phase=phase):
                if value.name in ACTIVATIONS | ACTIVATION_GRADS:
                    return _Effects(error=_PARTIAL_SUM_RULE)
                summed = self.live_values(value) if phase != "wait" else ()
                return _Effects(summed, summed, self.partial_sum(value) if phase != "start" else ())

    def forward_results(self, block: int, micro: int | None, *, is_summed: bool) -> Collection[_LiveValue]:
        """Return what a forward makes, or the sum of its parts."""
        if not is_summed:
            return (("y", (block,), micro, 0),)
        return [("v", blocks, micro, 0) for blocks in self.edges_from[block]]

    def input_grads(self, block: int, micro: int | None, *, is_summed: bool) -> Collection[_LiveValue]:
        """Return what a backward makes, or the sum of its parts: its addition to the gradients of what it has read."""
        if not is_summed:
            return (("dx", (block,), micro, 0),)
        return [("d", blocks, micro, block) for blocks in self.edges_into[block] if blocks in self.edges_with_grad]

    def backward_effects(self, rank: int, block: int, micro: int) -> _Effects:
        """Return what a backward needs: additions of all readers; behind it, what it has made itself is forgotten."""
        own = [("v", blocks, micro, 0) for blocks in self.edges_from[block]]
        needed = own if block >= self.last_block else self.output_grads(block, micro)
        runs = self.blocks_by_rank[rank]
        spent = [
            ("v", blocks, micro, 0)
            for blocks in self.edges_into[block]
            if not any(reader in runs for reader in blocks[1 : blocks.index(block, 1)])
        ]
        made = self.input_grads(block, micro, is_summed=block == 0 or block not in self.tp_blocks)
        return _Effects(needed, (*own, *needed, *spent), made)

    def output_grads(self, block: int, micro: int) -> list[_LiveValue]:
        """Return what all readers add to the gradients of what a block has made."""
        answered = (blocks for blocks in self.edges_from[block] if blocks in self.edges_with_grad)
        return [("d", blocks, micro, reader) for blocks in answered for reader in blocks[1:]]

    def partial_sum(self, value: TensorRef) -> Collection[_LiveValue]:
        """Return what the sum of a partial result is."""
        make = self.forward_results if value.name == "y" else self.input_grads
        return make(value.blocks[0], value.micro, is_summed=True)

    def live_values(self, value: TensorRef) -> Collection[_LiveValue]:
        """Return all that a value consists of."""
        if value.name not in ACTIVATIONS | ACTIVATION_GRADS:
            return ((value.name, value.blocks, value.micro, 0),)
        blocks = edge_endpoints(value)
        if value.name in ACTIVATIONS:
            return (("v", blocks, value.micro, 0),)
        return [("d", blocks, value.micro, reader) for reader in blocks[1:]]

    def receive_effects(self, rank: int, word: Recv) -> _Effects:
        """Return what comes: values, to one who reads them; or a gradient, from one who does, to their maker."""
        value, blocks = word.tensor, edge_endpoints(word.tensor)
        if value.name not in ACTIVATION_GRADS:
            wrong = "" if self.blocks_by_rank[rank] & set(blocks[1:]) else "no block of this row reads it"
            return _Effects(produces=(("v", blocks, value.micro, 0),), error=wrong)
        made = [("d", blocks, value.micro, reader) for reader in blocks[1:] if reader in self.blocks_by_rank[word.peer]]
        wrong = (
            ""
            if made and blocks[0] in self.blocks_by_rank[rank]
            else "it comes from a row that reads it to one that makes it"
        )
        return _Effects(produces=made, error=wrong)

    def send_effects(self, rank: int, value: TensorRef) -> _Effects:
        """Return what goes: values that are here, or what all readers of a row add to the gradient of theirs."""
        if value.name not in ACTIVATION_GRADS:
            here = self.live_values(value)
            return _Effects(here, here if value.name != "s" else ())
        blocks = edge_endpoints(value)
        readers = [reader for reader in blocks[1:] if reader in self.blocks_by_rank[rank]]
        added = [("d", blocks, value.micro, reader) for reader in readers or blocks[1:]]
        return _Effects(added, added)


def check_inputs_available(
    program: Program,
    rows: Sequence[Instructions],
    last_block: int,
    tp_blocks: Collection[int] | None,
    edges: Iterable[Edge] | None = None,
) -> None:
    """Prove that each word finds what it reads, and that every partial result is summed once over all its slices.

    A value is there from the word that makes it until it is sent to its only reader, or used up by the backward of its
    first reader on a row, or of its maker. Its gradient is there when each of its readers has added to
    it, once. The output of a sliced block and its input gradient come as partial results, which only their sum makes
    values and gradients.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        last: the last block of the model.
        sliced: the sliced blocks; None for those that any word sums.
        strands: of the model; None for those of a chain, and those that any word names.

    Raises:
        ProgramError: law 4; a value is not there, comes to one that does not read it, or a partial result is not
            summed as it must be.
    """
    if tp_blocks is None:
        sums = (word.tensor for row in rows for word in row if isinstance(word, Collective))
        tp_blocks = {value.blocks[0] for value in sums if value.name in {"y", "dx"}}
    if edges is None:
        sent = (word.tensor for row in rows for word in row if isinstance(word, Send | Recv))
        edges = [*chain_edges(last_block + 1), *(Edge(blocks[0], blocks[1:]) for blocks in sorted(skip_edges(sent)))]
    web = _Dataflow(edges, last_block, frozenset(tp_blocks), rows)
    for rank, row in enumerate(rows):
        there: set[_LiveValue] = set()
        for index, word in enumerate(row):
            needed, used, made, wrong = web.effects(rank, word)
            for held in needed:
                if held not in there:
                    raise rule_violation(rows, (rank, index), 4, _describe_missing(held))
            if wrong or (type(word) is Recv and not there.isdisjoint(made)):
                fact = wrong or "it is here already; what a row reads comes to it once"
                raise rule_violation(rows, (rank, index), 4, fact)
            if type(word) is Collective and needed:
                _check_partial_sum(rows, (rank, index), word, program.rank_programs[rank].tp_degree)
            there.difference_update(used)
            there.update(made)
        _check_partials_consumed(rows, rank, there, web)


def _check_partials_consumed(
    rows: Sequence[Instructions], rank: int, live: Collection[_LiveValue], dataflow: _Dataflow
) -> None:
    left = [held for held in live if held[0] in {"y", "dx"}]
    if left:
        name, (block,), micro, _ = held = min(left)
        place = max(index for index, word in enumerate(rows[rank]) if held in dataflow.effects(rank, word).produces)
        raise rule_violation(rows, (rank, place), 4, f"nobody sums its partial result {name}{block}.{micro}")


def _describe_missing(value: _LiveValue) -> str:
    """Say what is missing, as the text of the program has it."""
    kind, blocks, micro, reader = value
    if kind in {"v", "d"} and micro is not None:
        strand = Edge(blocks[0], blocks[1:])
        text = format_tensor_ref(strand.activation(micro) if kind == "v" else strand.gradient(micro))
        text += f", as far as block {reader} adds to it," if kind == "d" and not strand.is_adjacent else ""
    else:
        text = f"{kind}{blocks[0]}" + ("" if micro is None else f".{micro}")
    return f"{text} is not there; a word stands behind the one that makes what it reads, and before what uses it up"


def _check_partial_sum(
    rows: Sequence[Instructions], location: tuple[int, int], word: Collective, tp_degree: int
) -> None:
    """Judge the words of partial results; that no two members hold the same slice follows from who ran what."""
    if word.op != "all_reduce":
        raise rule_violation(rows, location, 4, _PARTIAL_SUM_RULE)
    if len(word.group) != tp_degree:
        raise rule_violation(rows, location, 4, f"it adds up {len(word.group)} partial results of {tp_degree}")
