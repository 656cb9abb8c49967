"""From a proved program and a cut model to one rank that can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from counterpoint.cutting.cut import Cut
from counterpoint.cutting.whole import WholeCut
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.model.values import INPUT, carried_by
from counterpoint.plan import Plan
from counterpoint.program.early import early_sums
from counterpoint.program.instruction import BACKWARDS, Backward, Collective, Commit, Forward, Group, Recv, Serve
from counterpoint.program.program import Program, versions_held
from counterpoint.program.turn import Turn
from counterpoint.runtime.calls import Script, boundaries, fuse
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.layout import WHOLE
from counterpoint.runtime.model import Model
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.roles import roles_of
from counterpoint.runtime.seeds import Dice
from counterpoint.runtime.store import Store
from counterpoint.runtime.strewn import tables_of
from counterpoint.runtime.twins import Twins
from counterpoint.runtime.vote import Guard
from counterpoint.strategies.buckets import BY_DEFAULT, Buckets


@dataclass(frozen=True, slots=True)
class Parts:
    """What all ranks of a run are built from.

    Args:
        turns: every kind of step with its rows and their proof, which says who answers for which part of which unit.
        spec: the model with the program's blocks.
        loss: from output and targets to a scalar.
        face: the user's optimizer.
        guard: what is checked before updates.
        seed: the run's seed.
        buckets: in which gradients are summed while a backward goes on.
    """

    turns: tuple[Turn, ...]
    spec: ModelSpec
    loss: Callable[[Any, Any], Tensor]
    face: Face
    guard: Guard
    seed: int
    buckets: Buckets = BY_DEFAULT

    @property
    def program(self) -> Program:
        """One row per rank: that of the kind of step that evaluations go by."""
        return self.turns[-1].program


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, ready: its interpreter, and the model's functions for training and for evaluation."""

    interpreter: Interpreter
    evaluation: Callable[[], Model]


def build_rank(parts: Parts, cut: Cut, model: nn.Module, fabric: Fabric, *, is_only: bool = False) -> Rank:
    """Return the rank that ``fabric`` belongs to.

    Args:
        parts: what all ranks share.
        cut: the model's functions; a whole cut must be of this rank's own copy.
        model: the model whose values the rank starts with.
        fabric: the rank's way to the others.
        is_only: whether no other rank of this process has the model, so that it may be trained in its own memory.
    """
    rank = fabric.rank
    row = parts.program.rows[rank]
    words = [word for turn in parts.turns for word in turn.program.rows[rank].body]
    roles = roles_of(rank, words, parts.spec)
    needed = {name for unit in roles for name in parts.spec.units[unit]}
    params = own_params(parts.spec, cut, model, (row.slice_index, row.num_slices), needed, is_only=is_only)
    own_buffers = isinstance(cut, WholeCut)
    buffers = {name: buffer if own_buffers else buffer.clone() for name, buffer in model.named_buffers()}
    store = Store(roles, params, buffers, parts.spec.units, parts.face, fabric.empty, tables_of(model))
    store.keep_versions(versions_held(row.body))
    interpreter = Interpreter(
        {turn.name: script_of(parts, turn, rank) for turn in parts.turns},
        model=bind(parts, cut, words, training=True),
        store=store,
        fabric=fabric,
        dice=Dice(parts.seed),
        guard=parts.guard,
        readers=readers(parts, rank),
        brought={place: micros for turn in parts.turns for place, micros in turn.ledger.brought.items()},
        buckets=parts.buckets,
    )
    if not renormalizes(model):
        interpreter.twins = Twins(twins_of(parts, parts.turns[-1]), store)
    return Rank(interpreter, lambda: bind(parts, cut, row.body, training=False))


def script_of(parts: Parts, turn: Turn, rank: int) -> Script:
    """Return what a rank does in one kind of step."""
    program, words = turn.program, turn.program.rows[rank].body
    if turn.stream is None:
        return Script(words, answers_for(parts, rank, turn), domains_of(program, rank), early_sums(program, rank))
    return Script(  # autograd puts gradients on parameters of older versions, where no sum could see them come early
        words,
        answers_for(parts, rank, turn),
        domains_of(program, rank),
        above=domains_above(program, rank),
        stride=turn.stride,
    )


def renormalizes(model: nn.Module) -> bool:
    """Tell whether a forward changes weights, as an embedding's with ``max_norm``: replicas would collide."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return any(table.max_norm is not None for table in tables)


def require_no_hooks(model: nn.Module, cut: Cut, plan: Plan) -> None:
    """Check that no parameter has gradient hooks where ranks compute with copies of it, or sum its gradient later.

    Raises:
        PlanError: one has.
    """
    if plan.num_ranks == 1 and isinstance(cut, WholeCut):
        return
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:  # noqa: SLF001 - there is no other way to see them
            raise PlanError(
                f"{name} has a gradient hook, which under {plan} would not see the gradient that trains it: ranks have "
                "parts and copies of the parameter, and add up their gradients afterwards; remove the hook and change "
                "the loss or the model in its place (clip_norm=... clips the summed gradient), or train under solo"
            )


def bind(parts: Parts, cut: Cut, words: Sequence[Any], *, training: bool) -> Model:
    """Return the functions for the blocks that a row runs."""
    segments = {}
    for first, stop in boundaries(fuse(words)):
        last = parts.spec.blocks[stop - 1]
        pieces = (parts.spec.blocks[first].first_piece, last.first_piece + len(last.pieces))
        read = tuple(dict.fromkeys(name for block in parts.spec.blocks[first:stop] for name in block.params))
        segments[first, stop] = replace(cut.segment(*pieces, training=training), params=read)
    values, mode = cut.values(training=training), "training" if training else "evaluation"
    return Model(
        segments=segments,
        num_blocks=parts.spec.num_blocks,
        num_inputs=sum(value.maker == INPUT for value in values),
        strands=carried_by(values, parts.spec.strands, parts.spec.block_of, mode),
        flatten=lambda inputs: cut.flatten_inputs(call_form(inputs), training=training),
        unflatten=lambda values: cut.unflatten_output(values, training=training),
        loss=parts.loss,
        draws=cut.draws and training,
    )


def call_form(inputs: Any) -> Any:  # noqa: ANN401 - whatever the model takes
    """Return inputs as the arguments of a call: a tuple of positional or a dict of keyword arguments."""
    return inputs if isinstance(inputs, tuple | dict) else (inputs,)


def own_params(
    spec: ModelSpec, cut: Cut, model: nn.Module, place: tuple[int, int], needed: Container[str], *, is_only: bool
) -> dict[str, nn.Parameter]:
    """Return a rank's parameters: the model's own for a whole cut, else what it needs, sliced.

    These are copies but for whole parameters of the only rank here: they are other tensors, with a count of changes of
    their own, in the same memory.
    """
    named = dict(model.named_parameters())
    if isinstance(cut, WholeCut):
        return named
    sliced, own = slices_of(spec), {}
    for name, param in named.items():
        if name in needed or not param.requires_grad:
            value = slice_of(param.data, sliced.get(name), place)
            stays = is_only and value.numel() == param.numel() and param.is_contiguous() and not param.is_shared()  # type: ignore[no-untyped-call]
            own[name] = nn.Parameter(value if stays else value.clone(), requires_grad=param.requires_grad)
    return own


def slices_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return for each sliced parameter its sliced dim and the number of slices."""
    return {
        name: (dim, block.num_slices)
        for block in spec.blocks
        if block.split is not None
        for name, dim in block.split.slices
    }


def slice_of(tensor: Tensor, how: tuple[int, int] | None, place: tuple[int, int]) -> Tensor:
    """Return the slice that the rank at ``place`` (index, count) holds; all of it when it is not sliced."""
    if how is None or place[1] == 1:
        return tensor
    return tensor.chunk(how[1], dim=how[0])[place[0]]


def answers_for(parts: Parts, rank: int, turn: Turn | None = None) -> list[Unit]:
    """Return the units whose part on this rank is counted here in norms and saved from here, and nowhere else."""
    return [holding.unit for holding in holdings(parts, turn) if holding.rank == rank]


@dataclass(frozen=True, slots=True)
class Holding:
    """Who answers for a part of a unit.

    Args:
        rank: who.
        unit: of what.
        span: which part of it.
        slice_index: of which slice; matters only for sliced units.
        replica: of which of the replicas that update apart.
    """

    rank: int
    unit: Unit
    span: tuple[Any, Any]
    slice_index: int
    replica: int = 0


def holdings(parts: Parts, turn: Turn | None = None) -> list[Holding]:
    """Return one holding for every part of every unit of each replica: the first rank that updates it."""
    chosen = parts.turns[-1] if turn is None else turn
    sliced = slices_of(parts.spec)
    replicas = {own: index for index, own in enumerate(replicas_of(chosen))}
    found: dict[tuple[Unit, Any, int, int], Holding] = {}
    for entry in chosen.ledger.entries:
        is_sliced = any(name in sliced for name in parts.spec.units[entry.unit])
        at = chosen.program.rows[entry.rank].slice_index if is_sliced else 0
        key = (entry.unit, entry.span, at, replicas.get(entry.replica, 0))
        known = found.get(key)
        if known is None or entry.rank < known.rank:
            found[key] = Holding(entry.rank, *key)
    drawn = [
        Holding(rank, unit, WHOLE, 0, replicas[chosen.center])
        for rank in chosen.center
        for word in chosen.program.rows[rank].body
        if isinstance(word, Serve)
        for unit in word.units
    ]
    return [*(found[key] for key in sorted(found)), *drawn]


def twins_of(parts: Parts, turn: Turn) -> list[Group]:
    """Return the groups of ranks that update the same parts of the same units, and so should hold the same weights."""
    sliced = slices_of(parts.spec)
    held: defaultdict[int, set[object]] = defaultdict(set)
    for entry in turn.ledger.entries:
        is_sliced = any(name in sliced for name in parts.spec.units[entry.unit])
        at = turn.program.rows[entry.rank].slice_index if is_sliced else 0
        held[entry.rank].add((entry.unit, entry.span, at, entry.replica))
    groups: defaultdict[frozenset[object], list[int]] = defaultdict(list)
    for rank in sorted(held):
        groups[frozenset(held[rank])].append(rank)
    return [tuple(members) for members in groups.values() if len(members) > 1]


def replicas_of(turn: Turn) -> list[Group]:
    """Return the groups of ranks that update apart from each other; none where all ranks update alike.

    Servers that draw all of them together have weights of their own as well, and stand last.
    """
    apart = sorted({entry.replica for entry in turn.ledger.entries if entry.replica})
    return [*apart, *([turn.center] if turn.center else [])]


def commit_group(program: Program, rank: int) -> Group:
    """Return the ranks that decide together with this one; none for a rank that commits nothing."""
    return next((word.group for word in program.rows[rank].body if isinstance(word, Commit)), ())


def groups_of(programs: Iterable[Program]) -> list[tuple[int, ...]]:
    """Return every group that the words of programs name, and that of all ranks, in the same order on every rank."""
    found: set[tuple[int, ...]] = set()
    for program in programs:
        found.add(tuple(range(program.num_ranks)))
        found.update(word.group for _, word in program.words() if isinstance(word, Collective | Commit))
    return sorted(found)


def readers(parts: Parts, rank: int) -> dict[str, Group]:
    """Return for each parameter which ranks of this rank's commit compute with it."""
    found: dict[str, Group] = {}
    units = parts.spec.units
    for member in commit_group(parts.program, rank):
        blocks = {word.block for word in parts.program.rows[member].body if isinstance(word, Forward)}
        for name in (name for unit, names in units.items() if not blocks.isdisjoint(unit) for name in names):
            found[name] = (*found.get(name, ()), member)
    return found


def domains_of(program: Program, rank: int) -> list[list[int]]:
    """Return for each commit of a rank the microbatches over whose samples its loss is a mean: those of its group."""
    commits = [word for word in program.rows[rank].body if isinstance(word, Commit)]
    groups = [commit.own or commit.group for commit in commits]
    between = {member: _between_commits(program, member) for group in groups for member in group}
    return [
        sorted({micro for member in group for micro in between[member][index]}) for index, group in enumerate(groups)
    ]


def _between_commits(program: Program, rank: int) -> list[set[int]]:
    """Return the microbatches that a rank goes backward on before each of its commits."""
    found: list[set[int]] = [set()]
    for word in program.rows[rank].body:
        if isinstance(word, Backward):
            found[-1].add(word.micro)
        elif isinstance(word, Commit):
            found.append(set())
    return found


def domains_above(program: Program, rank: int) -> dict[tuple[int, int], list[int]]:
    """Return what is decided on with a microbatch on a rank that sends its gradient, if this rank decides on others."""
    own = domains_of(program, rank)
    found: dict[tuple[int, int], list[int]] = {}
    for word in program.rows[rank].body:
        if isinstance(word, Recv) and word.value.name in BACKWARDS and word.value.micro is not None:
            theirs = next(domain for domain in domains_of(program, word.peer) if word.value.micro in domain)
            if theirs not in own:
                found[word.value.micro, word.peer] = theirs
    return found


def copy_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values by name into a model's parameters and buffers."""
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        targets[name].detach().copy_(value)
