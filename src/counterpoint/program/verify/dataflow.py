"""Check that messages match (rule 1) and that every instruction finds its inputs (rule 4).

Rule 1 needs the instructions of all ranks; rule 4 is checked along each rank's instructions, with the set of values
that are live at each point.
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
    Fetch,
    Forward,
    Free,
    Group,
    Instruction,
    Offload,
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
"""A send or a push: kind, tensor, source, target, codec."""
_MESSAGE_TYPES = {Send, Recv, Push, Pull, ApplyPushes}


def check_p2p_matching(rank_instructions: Sequence[Instructions]) -> None:
    """Check that sends and receives, pushes and pulls pair up, and that messages keep their order (rule 1).

    Raises:
        ProgramError: an instruction has no counterpart, or that of another instruction.
    """
    balance: defaultdict[_MessageKey, int] = defaultdict(int)
    for rank, instructions in enumerate(rank_instructions):
        for instruction in instructions:
            if type(instruction) in _MESSAGE_TYPES:
                for key, weight in _count_messages(rank, instruction):
                    balance[key] += weight
    for key, count in balance.items():
        if count:
            category, tensor, source, target, code = key
            coded = f" in {code}" if code else ""
            excess = "is never received" if count > 0 else "is never sent"
            if category == "push":
                excess = "is never pulled" if count > 0 else "is pulled without a push"
            elif category == "push_no_reply":
                excess = "is never applied" if count > 0 else "is applied, but never pushed"
            rank, index = max(
                (rank, index)
                for rank, instructions in enumerate(rank_instructions)
                for index, instruction in enumerate(instructions)
                if any(found == key for found, _ in _count_messages(rank, instruction))
            )
            raise ProgramError(
                f"{format_tensor_ref(tensor)}{coded} from rank {source} to rank {target} {excess}; every {category} "
                "has exactly "
                f"one counterpart\n{format_locations(rank_instructions, {rank: index}, 'here')}",
                rule=1,
            )

    _check_receive_order(rank_instructions)


def _check_receive_order(rank_instructions: Sequence[Instructions]) -> None:
    """Check that each rank receives from a peer in the order in which the peer sends."""
    sent: defaultdict[tuple[int, int], list[TensorRef]] = defaultdict(list)
    for rank, instructions in enumerate(rank_instructions):
        for instruction in instructions:
            if type(instruction) is Send:
                sent[rank, instruction.peer].append(instruction.tensor)
    taken: Counter[tuple[int, int]] = Counter()
    for rank, instructions in enumerate(rank_instructions):
        for index, instruction in enumerate(instructions):
            if type(instruction) is not Recv:
                continue
            expected = sent[instruction.peer, rank][taken[instruction.peer, rank]]
            taken[instruction.peer, rank] += 1
            if instruction.tensor != expected:
                raise ProgramError(
                    f"rank {rank} receives {format_tensor_ref(instruction.tensor)} where rank {instruction.peer} sends "
                    f"{format_tensor_ref(expected)}; messages from one rank to another are received in the order in "
                    f"which they are sent\n{format_locations(rank_instructions, {rank: index}, 'here')}",
                    rule=1,
                )


def _count_messages(rank: int, instruction: Instruction) -> Iterator[tuple[_MessageKey, int]]:
    """Yield the messages that an instruction sends, with 1, or receives, with -1; a pull is identified by its unit."""
    match instruction:
        case Send(tensor, peer, codec):
            yield ("send", tensor, rank, peer, codec), 1
        case Recv(tensor, peer, codec):
            yield ("send", tensor, peer, rank, codec), -1
        case Push(tensor, peer, op="push_no_reply"):
            yield ("push_no_reply", tensor, rank, peer, ""), 1
        case Push(tensor, peer):
            yield ("push", TensorRef("grad", tensor.blocks), rank, peer, ""), 1
        case Pull(tensor, peer):
            yield ("push", TensorRef("grad", tensor.blocks), rank, peer, ""), -1
        case ApplyPushes(units, workers, op="apply"):
            yield from (
                (("push_no_reply", TensorRef("grad", unit), worker, rank, ""), -1)
                for worker in workers
                for unit in units
            )
        case _:
            pass


_LiveValue: TypeAlias = tuple[str, tuple[int, ...], int | None, int]
"""A value that a rank holds for a microbatch: kind, blocks, microbatch, consumer.

The kind is ``v`` for the activations of an edge, ``d`` for what one consumer (the last number) adds to their gradient,
``y`` or ``dx`` for a partial result of a block that is still to be summed, ``part`` for what a rank keeps of an input
that it frees, ``disk`` and ``host`` for an input that is offloaded there, and ``Bi`` for what the input half of a
backward leaves for the weight half.
"""
_EdgesByBlock: TypeAlias = "dict[int, list[tuple[int, ...]]]"


class _Effects(NamedTuple):
    """Effects of an instruction on live values: reads, consumes, produces; and what is wrong with it."""

    reads: Collection[_LiveValue] = ()
    consumes: Collection[_LiveValue] = ()
    produces: Collection[_LiveValue] = ()
    error: str = ""


_NO_EFFECTS = _Effects()
_KEPT = {"part": "the part of x", "disk": "the copy on disk of x", "host": "the copy in host memory of x"}
"""What errors call an input that a rank keeps elsewhere, before its block."""
_OUTPUT_RULE = "the outputs of the last block are gathered, by all_gather, which is not split in two"
_INPUT_RULE = (
    "the input of a block is gathered from the parts of it that ranks keep, by all_gather, which is not split in two"
)
_PARTIAL_SUM_RULE = "only partial results are combined by a collective, and only by all_reduce"


class _Dataflow:
    """Values that each instruction reads and writes, given the edges of the model.

    Args:
        edges: the edges of the model.
        last_block: the last block; its output has no consumer, and its backward waits for no gradient.
        tp_blocks: the blocks whose outputs and input gradients are partial on every rank.
        rank_instructions: the unrolled instructions, per rank.
    """

    def __init__(
        self,
        edges: Iterable[Edge],
        last_block: int,
        tp_blocks: Collection[int],
        rank_instructions: Sequence[Instructions],
    ) -> None:
        self.last_block = last_block
        self.tp_blocks = tp_blocks
        self.blocks_by_rank = [
            frozenset(instruction.block for instruction in instructions if type(instruction) is Forward)
            for instructions in rank_instructions
        ]
        self.edges_from: _EdgesByBlock = defaultdict(list)
        self.edges_into: _EdgesByBlock = defaultdict(list)
        self.edges_with_grad: set[tuple[int, ...]] = set()
        for edge in edges:
            blocks = edge.endpoints
            self.edges_from[edge.producer].append(blocks)
            for consumer in edge.consumers:
                self.edges_into[consumer].append(blocks)
            if edge.grad_bytes is not None:
                self.edges_with_grad.add(blocks)
        self.output_edge = (last_block, last_block + 1)
        self.edges_from[last_block] = [self.output_edge]
        self.output_micros = [  # of each rank whose outputs are gathered
            tuple(one.micro for one in instructions if type(one) is Forward and one.block == last_block)
            if any(type(one) is Collective and one.tensor.name == "out" for one in instructions)
            else ()
            for instructions in rank_instructions
        ]
        if any(self.output_micros):
            self.edges_with_grad.add(self.output_edge)

    def effects(self, rank: int, instruction: Instruction) -> _Effects:
        match instruction:
            case Forward(block, micro):
                inputs = [("v", blocks, micro, 0) for blocks in self.edges_into[block]]
                return _Effects(inputs, (), self.forward_results(block, micro, is_summed=block not in self.tp_blocks))
            case Recompute(block, micro):
                return _Effects([("v", blocks, micro, 0) for blocks in self.edges_into[block]])
            case Backward(block, micro):
                input_half = (("Bi", (block,), micro, 0),)
                if not instruction.computes_input_grad:
                    return _Effects(input_half, input_half)
                effects = self.backward_effects(rank, block, micro)
                return (
                    effects
                    if instruction.computes_weight_grad
                    else effects._replace(produces=(*effects.produces, *input_half))
                )
            case Fetch(TensorRef("x") as tensor, place):
                away = [(place, tensor.blocks, tensor.micro, 0)]
                return _Effects(away, away, self.live_values(tensor))
            case Offload(TensorRef("x") as tensor, place):
                live_here = self.live_values(tensor)
                return _Effects(live_here, live_here, [(place, tensor.blocks, tensor.micro, 0)])
            case Recv() | Send() | Free() | Collective() if instruction.tensor.name not in UNIT_TENSORS:
                return self.transfer_effects(rank, instruction)
            case _:
                return _NO_EFFECTS

    def transfer_effects(self, rank: int, instruction: Recv | Send | Free | Collective) -> _Effects:
        """Return the effects of an instruction that moves, combines or frees activations or their gradients."""
        tensor = instruction.tensor
        match instruction:
            case Recv():
                return self.receive_effects(rank, instruction)
            case Send():
                return self.send_effects(rank, tensor)
            case Free():
                live_here = self.live_values(tensor)
                parts = [("part", tensor.blocks, tensor.micro, 0)] if tensor.name == "x" else ()
                return _Effects(live_here, live_here, parts)
            case Collective("all_gather", TensorRef("x"), phase=""):
                parts = [("part", tensor.blocks, tensor.micro, 0)]
                return _Effects(parts, parts, self.live_values(tensor))
            case Collective(op, TensorRef("out"), phase=phase):
                outputs = [("v", self.output_edge, micro, 0) for micro in self.output_micros[rank]]
                grads = [("d", self.output_edge, micro, self.last_block + 1) for micro in self.output_micros[rank]]
                is_wrong = (op, tensor.blocks, phase) != ("all_gather", (self.last_block,), "")
                return _Effects(outputs, outputs, grads, _OUTPUT_RULE if is_wrong else "")
            case Collective(phase=phase):
                if tensor.name in ACTIVATIONS | ACTIVATION_GRADS:
                    is_gather = (instruction.op, tensor.name) == ("all_gather", "x")
                    return _Effects(error=_INPUT_RULE if is_gather else _PARTIAL_SUM_RULE)
                summed = self.live_values(tensor) if phase != "wait" else ()
                return _Effects(summed, summed, self.partial_sum(tensor) if phase != "start" else ())

    def forward_results(self, block: int, micro: int | None, *, is_summed: bool) -> Collection[_LiveValue]:
        """Return what a forward produces, or the sum of its partial results."""
        if not is_summed:
            return (("y", (block,), micro, 0),)
        return [("v", blocks, micro, 0) for blocks in self.edges_from[block]]

    def input_grads(self, block: int, micro: int | None, *, is_summed: bool) -> Collection[_LiveValue]:
        """Return what a backward produces, or the sum of its partial results."""
        if not is_summed:
            return (("dx", (block,), micro, 0),)
        return [("d", blocks, micro, block) for blocks in self.edges_into[block] if blocks in self.edges_with_grad]

    def backward_effects(self, rank: int, block: int, micro: int) -> _Effects:
        """Return the effects of a backward, which needs the gradients of all consumers of the block's outputs."""
        own_values = [("v", blocks, micro, 0) for blocks in self.edges_from[block]]
        is_loss = block >= self.last_block and not any(self.output_micros)
        read = own_values if is_loss else self.output_grads(block, micro)
        blocks_here = self.blocks_by_rank[rank]
        inputs_consumed = [
            ("v", blocks, micro, 0)
            for blocks in self.edges_into[block]
            if not any(consumer in blocks_here for consumer in blocks[1 : blocks.index(block, 1)])
        ]
        produced = self.input_grads(block, micro, is_summed=block == 0 or block not in self.tp_blocks)
        return _Effects(read, (*own_values, *read, *inputs_consumed), produced)

    def output_grads(self, block: int, micro: int) -> list[_LiveValue]:
        """Return what all consumers add to the gradients of a block's outputs."""
        answered = (blocks for blocks in self.edges_from[block] if blocks in self.edges_with_grad)
        return [("d", blocks, micro, consumer) for blocks in answered for consumer in blocks[1:]]

    def partial_sum(self, tensor: TensorRef) -> Collection[_LiveValue]:
        """Return the value that the sum of a partial result becomes."""
        make = self.forward_results if tensor.name == "y" else self.input_grads
        return make(tensor.blocks[0], tensor.micro, is_summed=True)

    def live_values(self, tensor: TensorRef) -> Collection[_LiveValue]:
        """Return all values that a tensor reference denotes."""
        if tensor.name not in ACTIVATIONS | ACTIVATION_GRADS:
            return ((tensor.name, tensor.blocks, tensor.micro, 0),)
        blocks = edge_endpoints(tensor)
        if tensor.name in ACTIVATIONS:
            return (("v", blocks, tensor.micro, 0),)
        return [("d", blocks, tensor.micro, consumer) for consumer in blocks[1:]]

    def receive_effects(self, rank: int, instruction: Recv) -> _Effects:
        """Return the activations, or the gradients from consumers on the peer, that arrive."""
        tensor, blocks = instruction.tensor, edge_endpoints(instruction.tensor)
        if tensor.name not in ACTIVATION_GRADS:
            error = "" if self.blocks_by_rank[rank] & set(blocks[1:]) else "no block of this rank reads it"
            return _Effects(produces=(("v", blocks, tensor.micro, 0),), error=error)
        produced = [
            ("d", blocks, tensor.micro, consumer)
            for consumer in blocks[1:]
            if consumer in self.blocks_by_rank[instruction.peer]
        ]
        error = (
            ""
            if produced and blocks[0] in self.blocks_by_rank[rank]
            else "it must come from a rank that consumes it to the rank that produces it"
        )
        return _Effects(produces=produced, error=error)

    def send_effects(self, rank: int, tensor: TensorRef) -> _Effects:
        """Return what leaves: activations that are live, or what the consumers of this rank add to a gradient."""
        if tensor.name not in ACTIVATION_GRADS:
            live_here = self.live_values(tensor)
            return _Effects(live_here, live_here if tensor.name != "s" else ())
        blocks = edge_endpoints(tensor)
        consumers = [consumer for consumer in blocks[1:] if consumer in self.blocks_by_rank[rank]]
        added = [("d", blocks, tensor.micro, consumer) for consumer in consumers or blocks[1:]]
        return _Effects(added, added)


def check_inputs_available(
    program: Program,
    rank_instructions: Sequence[Instructions],
    last_block: int,
    tp_blocks: Collection[int] | None,
    edges: Iterable[Edge] | None = None,
) -> None:
    """Check that each instruction finds its inputs, and that every partial result is summed once (rule 4).

    A value is live from the instruction that produces it until it is sent to its only consumer, or consumed by the
    backward of its first consumer on a rank or of its producer. Its gradient is complete when each consumer has added
    to it once. The output and the input gradient of a tensor-parallel block are partial results until they are summed
    over all shards. If outputs are gathered, the gathering computes their gradients.

    Args:
        program: the program.
        rank_instructions: its unrolled instructions, per rank.
        last_block: the last block of the model.
        tp_blocks: the tensor-parallel blocks; None for those whose results are summed.
        edges: the edges of the model; None for those of a chain and those that messages name.

    Raises:
        ProgramError: a value is not live, arrives at a rank that does not read it, or a partial result is not summed
            correctly.
    """
    if tp_blocks is None:
        sums = (
            instruction.tensor
            for instructions in rank_instructions
            for instruction in instructions
            if isinstance(instruction, Collective)
        )
        tp_blocks = {tensor.blocks[0] for tensor in sums if tensor.name in {"y", "dx"}}
    if edges is None:
        sent = (
            instruction.tensor
            for instructions in rank_instructions
            for instruction in instructions
            if isinstance(instruction, Send | Recv)
        )
        edges = [*chain_edges(last_block + 1), *(Edge(blocks[0], blocks[1:]) for blocks in sorted(skip_edges(sent)))]
    dataflow = _Dataflow(edges, last_block, frozenset(tp_blocks), rank_instructions)
    for rank, instructions in enumerate(rank_instructions):
        live: set[_LiveValue] = set()
        for index, instruction in enumerate(instructions):
            read, consumed, produced, error = dataflow.effects(rank, instruction)
            for value in read:
                if value not in live:
                    raise rule_violation(rank_instructions, (rank, index), 4, _describe_missing(value))
            if error or (type(instruction) is Recv and not live.isdisjoint(produced)):
                fact = error or "it is live already; each rank receives what it reads once"
                raise rule_violation(rank_instructions, (rank, index), 4, fact)
            if type(instruction) is Collective and (read or instruction.tensor.name == "out"):
                _check_collective(program, rank_instructions, (rank, index), instruction, dataflow)
            live.difference_update(consumed)
            live.update(produced)
        _check_partials_consumed(rank_instructions, rank, live, dataflow)


def _check_partials_consumed(
    rank_instructions: Sequence[Instructions], rank: int, live: Collection[_LiveValue], dataflow: _Dataflow
) -> None:
    unconsumed = [value for value in live if value[0] in {"y", "dx"}]
    if unconsumed:
        name, (block,), micro, _ = value = min(unconsumed)
        location = max(
            index
            for index, instruction in enumerate(rank_instructions[rank])
            if value in dataflow.effects(rank, instruction).produces
        )
        raise rule_violation(
            rank_instructions, (rank, location), 4, f"no instruction sums its partial result {name}{block}.{micro}"
        )


def _describe_missing(value: _LiveValue) -> str:
    category, blocks, micro, consumer = value
    if category in {"v", "d"} and micro is not None:
        edge = Edge(blocks[0], blocks[1:])
        text = format_tensor_ref(edge.activation(micro) if category == "v" else edge.gradient(micro))
        text += f" (the addition of block {consumer})" if category == "d" and not edge.is_adjacent else ""
    else:
        text = f"{_KEPT.get(category, category)}{blocks[0]}" + ("" if micro is None else f".{micro}")
    return (
        f"{text} is not live here; an instruction must come after the producer of its inputs and before their last "
        "consumer"
    )


def _check_gathered_outputs(
    program: Program,
    rank_instructions: Sequence[Instructions],
    location: tuple[int, int],
    group: Group,
    micros: Sequence[int],
) -> None:
    """Check that the members of a gathering of outputs have those of each microbatch of the batch once."""
    shards = {program.rank_programs[member].tp_rank for member in group}
    if tuple(sorted(micros)) != program.micros or len(shards) > 1:
        raise rule_violation(
            rank_instructions,
            location,
            4,
            f"its members have the outputs of microbatches {sorted(micros)}; a loss of the whole batch is evaluated on "
            f"each of {list(program.micros)} once, by ranks with the same shard of the model",
        )


def _check_collective(
    program: Program,
    rank_instructions: Sequence[Instructions],
    location: tuple[int, int],
    instruction: Collective,
    dataflow: _Dataflow,
) -> None:
    """Check that the members of a collective of activations have what it combines."""
    match instruction.tensor.name:
        case "out":
            micros = [micro for member in instruction.group for micro in dataflow.output_micros[member]]
            _check_gathered_outputs(program, rank_instructions, location, instruction.group, micros)
        case "x":
            _check_gathered_input(program, rank_instructions, location, instruction)
        case _:
            tp_degree = program.rank_programs[location[0]].tp_degree
            _check_partial_sum(rank_instructions, location, instruction, tp_degree)


def _check_gathered_input(
    program: Program, rank_instructions: Sequence[Instructions], location: tuple[int, int], instruction: Collective
) -> None:
    """Check that the members of a gathering hold one input each: they are all shards of one tensor-parallel group."""
    tp_degree = program.rank_programs[location[0]].tp_degree
    shards = [program.rank_programs[member].tp_rank for member in instruction.group]
    if sorted(shards) != list(range(tp_degree)):
        raise rule_violation(
            rank_instructions,
            location,
            4,
            f"its members are the shards {shards} of {tp_degree}; the parts of an input are those of the ranks of one "
            "tensor-parallel group",
        )


def _check_partial_sum(
    rank_instructions: Sequence[Instructions], location: tuple[int, int], instruction: Collective, tp_degree: int
) -> None:
    """Check the sum of a partial result; that no two members hold the same shard follows from which blocks they ran."""
    if instruction.op != "all_reduce":
        raise rule_violation(rank_instructions, location, 4, _PARTIAL_SUM_RULE)
    if len(instruction.group) != tp_degree:
        raise rule_violation(
            rank_instructions, location, 4, f"it sums {len(instruction.group)} of {tp_degree} partial results"
        )
