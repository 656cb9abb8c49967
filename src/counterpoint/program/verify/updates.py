"""Check updates: what enters them, who commits, and what is left at the end (rules 6 and 7).

Some rules can be checked along each rank's instructions: updates follow a commit, collectives that were started are
awaited, whole gradients are freed. The others look at the records of the symbolic execution: every gradient contributes
to every update of its parameters exactly once; replicas apply the same updates; and all ranks that contributed to a
gradient commit together. The loss is averaged over the ranks that commit together, and all of them apply a step or all
skip it: a commit of fewer ranks would divide by too few samples, and let one rank skip what others apply.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import format_locations, rule_violation
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Group,
    Instruction,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions, Program, shift_microbatch
from counterpoint.program.text import format_group, format_instruction, format_unit
from counterpoint.program.units import Unit, freed_weights
from counterpoint.program.verify.symbolic import CommitRecord, GradContribution, SymbolicResult, UpdateRecord


def check_commit_before_update(rank_instructions: Sequence[Instructions]) -> None:
    """Check that ranks commit between gradients and updates or pushes, and do not compress weights (rule 6).

    Raises:
        ProgramError: an update would be applied without agreement, or weights would be changed by a codec.
    """
    for rank, instructions in enumerate(rank_instructions):
        _check_decoded_weights_freed(rank_instructions, rank)
        agreed = False
        for index, instruction in enumerate(instructions):
            match instruction:
                case Commit():
                    agreed = True
                case Send(tensor, codec=codec) | Recv(tensor, codec=codec) | Push(tensor, codec=codec) if (
                    codec and tensor.name != "grad"
                ):
                    raise rule_violation(rank_instructions, (rank, index), 6, "only gradients can be compressed")
                case Update() | Push() if not agreed:
                    raise rule_violation(
                        rank_instructions,
                        (rank, index),
                        6,
                        "there is no commit between the gradients and this instruction",
                    )
                case Backward() | Recv(TensorRef("grad")) | Collective(_, TensorRef("grad")) | SwapGradBuffers():
                    agreed = False
                case _:
                    pass


def _check_decoded_weights_freed(rank_instructions: Sequence[Instructions], rank: int) -> None:
    """Check that weights which were gathered with a codec are freed, so that updates use those of shards (rule 6)."""
    instructions = rank_instructions[rank]
    gathers = [
        (index, one.tensor.blocks)
        for index, one in enumerate(instructions)
        if isinstance(one, Collective) and one.codec and one.op == "all_gather"
    ]
    freed = freed_weights(instructions) if gathers else ()
    for index, unit in gathers:
        if unit not in freed:
            fact = "the weights are not freed after use, so that ranks would go on with what a codec has rounded"
            raise rule_violation(rank_instructions, (rank, index), 6, fact)


def check_gradients_freed(
    rank_instructions: Sequence[Instructions], units: Iterable[Unit], grad_fractions: Sequence[Fraction]
) -> None:
    """Check that ranks which keep shards of gradients free each whole gradient once it is reduce-scattered (rule 7).

    Args:
        rank_instructions: the unrolled instructions, per rank.
        units: the units of the model.
        grad_fractions: per rank, the fraction of each gradient that it may hold from one forward to the next.

    Raises:
        ProgramError: a gradient is held whole.
    """
    units_of: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        for block in unit:
            units_of[block].append(unit)
    for rank, (instructions, fraction) in enumerate(zip(rank_instructions, grad_fractions, strict=True)):
        if fraction == 1:
            continue
        held_units: set[Unit] = set()
        scattered: set[Unit] = set()
        for index, instruction in enumerate(instructions):
            match instruction:
                case Backward(block) if instruction.computes_weight_grad:
                    _check_freed(rank_instructions, (rank, index), scattered, fraction)
                    held_units.update(units_of[block])
                case Forward() | Commit():
                    _check_freed(rank_instructions, (rank, index), held_units, fraction)
                case Collective("reduce_scatter", TensorRef("grad", unit), phase="" | "wait"):
                    scattered.add(unit)
                case Free(TensorRef("grad", unit)):
                    held_units.discard(unit)
                    scattered.discard(unit)
                case _:
                    pass


def _check_freed(
    rank_instructions: Sequence[Instructions],
    location: tuple[int, int],
    held_units: Collection[Unit],
    fraction: Fraction,
) -> None:
    if held_units:
        text = format_unit(min(held_units))
        raise rule_violation(
            rank_instructions,
            location,
            7,
            f"the whole gradient of unit {text} is held; the plan declares a fraction of {fraction}",
        )


def check_async_collectives_awaited(rank_instructions: Sequence[Instructions]) -> None:
    """Check that nothing is used between the start and the wait of its collective, and that each start has a wait.

    Raises:
        ProgramError: a gradient is used while it is being reduced (rule 6), or a collective is never awaited (rule 7).
    """
    for rank, instructions in enumerate(rank_instructions):
        started: dict[TensorRef, int] = {}
        used: tuple[int, str] | None = None
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Collective):
                if instruction.phase == "wait":
                    started.pop(instruction.tensor, None)
                elif instruction.tensor in started:
                    used = used or (index, "it is in flight already")
                elif instruction.phase == "start":
                    started[instruction.tensor] = index
            elif started and any(tensor in started for tensor in _tensors_used(instruction, started)):
                used = used or (index, "a tensor that it uses is still in flight")
        if started:
            raise rule_violation(rank_instructions, (rank, min(started.values())), 7, "no instruction waits for it")
        if used:
            raise rule_violation(rank_instructions, (rank, used[0]), 6, used[1])


def _tensors_used(instruction: Instruction, started: Iterable[TensorRef]) -> Iterable[TensorRef]:
    match instruction:
        case Update(unit):
            return TensorRef("grad", unit), TensorRef("weight", unit)
        case SwapGradBuffers(unit):
            return TensorRef("grad", unit), TensorRef("delayed_grad", unit)
        case Send(tensor) | Push(tensor) | Free(tensor):
            return (tensor,)
        case Backward(block):
            return [tensor for tensor in started if tensor.name in {"grad", "weight"} and block in tensor.blocks]
        case Forward(block) | Recompute(block):
            return [tensor for tensor in started if tensor.name == "weight" and block in tensor.blocks]
        case _:
            return ()


def check_grad_coverage(
    program: Program, rank_instructions: Sequence[Instructions], symbolic: SymbolicResult, units: Iterable[Unit]
) -> None:
    """Check that each contribution enters exactly one update of each shard of its unit, on all replicas alike (rule 6).

    Replicas that update separately are checked one by one: each applies exactly its own contributions. A delayed
    gradient that the end of an asynchronous pipeline drops enters no update.
    """
    expected = _contributions_by_block(program, rank_instructions, range(len(rank_instructions)))
    by_unit: defaultdict[Unit, list[UpdateRecord]] = defaultdict(list)
    for update in symbolic.updates:
        by_unit[update.unit].append(update)
    units = list(units)
    tp_ranks = sorted({rank_program.tp_rank for rank_program in program.rank_programs})
    replica_contributions: dict[Group, defaultdict[int, set[GradContribution]]] = {}
    for unknown in by_unit.keys() - set(units):
        location = {by_unit[unknown][0].rank: by_unit[unknown][0].index}
        raise ProgramError(
            f"unit {format_unit(unknown)} is updated, but is not a unit of the "
            f"model\n{format_locations(rank_instructions, location, 'here')}",
            rule=6,
        )
    for unit in units:
        contributions = {contribution for block in unit for contribution in expected[block]} - symbolic.dropped.get(
            unit, set()
        )
        for replica in sorted({update.replica for update in by_unit[unit]}):
            if replica and replica not in replica_contributions:
                replica_contributions[replica] = _contributions_by_block(program, rank_instructions, replica)
            replica_updates = (
                {contribution for block in unit for contribution in replica_contributions[replica][block]}
                if replica
                else contributions
            )
            unit_updates = [update for update in by_unit[unit] if update.replica == replica]
            for tp_rank in tp_ranks:
                rank_updates = [
                    update for update in unit_updates if program.rank_programs[update.rank].tp_rank == tp_rank
                ]
                _check_unit_updates(
                    rank_instructions,
                    unit,
                    rank_updates,
                    {contribution for contribution in replica_updates if contribution[2] == tp_rank},
                )
            contributions = contributions - replica_updates
        if contributions or not by_unit[unit]:  # of a replica that updates nothing
            _check_unit_updates(rank_instructions, unit, [], contributions)


def _contributions_by_block(
    program: Program, rank_instructions: Sequence[Instructions], ranks: Iterable[int]
) -> defaultdict[int, set[GradContribution]]:
    """Return the contributions of the backwards that the ranks run, by block."""
    contributions: defaultdict[int, set[GradContribution]] = defaultdict(set)
    for rank in ranks:
        for instruction in rank_instructions[rank]:
            if isinstance(instruction, Backward):
                contributions[instruction.block].add(
                    (instruction.block, instruction.micro, program.rank_programs[rank].tp_rank)
                )
    return contributions


def _check_unit_updates(
    rank_instructions: Sequence[Instructions],
    unit: Unit,
    updates: Sequence[UpdateRecord],
    expected: set[GradContribution],
) -> None:
    text = format_unit(unit)
    by_rank: defaultdict[int, list[UpdateRecord]] = defaultdict(list)
    for update in updates:
        by_rank[update.rank].append(update)
    histories: dict[tuple[Fraction, Fraction], tuple[int, list[Counter[GradContribution]]]] = {}
    checked: set[tuple[int, ...]] = set()
    for rank, replica_updates in by_rank.items():
        history = [update.contributions for update in replica_updates]
        first_rank, known = histories.setdefault(replica_updates[0].shard, (rank, history))
        location = {rank: replica_updates[-1].index}
        if known is not history and known != history:
            raise ProgramError(
                f"ranks {first_rank} and {rank} update unit {text} with different gradients; copies of the same "
                f"parameters must apply the same\n{format_locations(rank_instructions, location, 'here')}",
                rule=6,
            )
        if first_rank != rank or tuple(map(id, history)) in checked:
            continue
        checked.add(tuple(map(id, history)))  # ranks that share a gradient share its contributions as an object
        total = history[0] if len(history) == 1 else sum(history, Counter())
        _check_contributions(rank_instructions, text, location, (total, expected))
        if not all(history):
            raise ProgramError(
                f"rank {rank} updates unit {text} without a new gradient since its previous update\n"
                f"{format_locations(rank_instructions, location, 'here')}",
                rule=6,
            )
    _check_shards_cover_unit(text, sorted(histories))


def _check_contributions(
    rank_instructions: Sequence[Instructions],
    unit: str,
    location: Mapping[int, int],
    contributions: tuple[Counter[GradContribution], set[GradContribution]],
) -> None:
    total, expected = contributions
    if total.keys() == expected and all(count == 1 for count in total.values()):
        return
    doubled = sorted(contribution for contribution, count in total.items() if count > 1)
    missing = sorted(expected - total.keys())
    unknown = sorted(total.keys() - expected)
    parts = [
        f"{problem} {', '.join(f'B{b}.{m}' for b, m, _ in members[:4])}{' and others' if len(members) > 4 else ''}"
        for problem, members in (("twice", doubled), ("never", missing), ("without cause", unknown))
        if members
    ]
    rank = next(iter(location))
    raise ProgramError(
        f"rank {rank} updates unit {unit} with gradients counted {'; '.join(parts)}; every gradient must enter every "
        f"update exactly once\n{format_locations(rank_instructions, location, 'here')}",
        rule=6,
    )


def _check_shards_cover_unit(unit: str, shards: Sequence[tuple[Fraction, Fraction]]) -> None:
    reached = Fraction(0)
    for low, high in shards:
        if low != reached:
            break
        reached = high
    if reached != 1:
        held_units = ", ".join(f"{low} to {high}" for low, high in shards) or "nothing"
        raise ProgramError(f"unit {unit} is updated only partly: {held_units}; all of it must be updated", rule=6)


def check_commit_groups(
    program: Program, rank_instructions: Sequence[Instructions], symbolic: SymbolicResult, *, is_bounded: bool = True
) -> None:
    """Check that all ranks that contributed to an update commit together, and that a body commits once (rule 6).

    These are the ranks that ran any block on its microbatches, and those that update the same unit. The stages of an
    asynchronous pipeline update at different times, some of them more often than others: there, these are the ranks
    that ran the backward of the unit's blocks. Without a bound on staleness, replicas that update separately commit
    separately.

    Raises:
        ProgramError: a commit has too few or too many members or microbatches, or is not the only one of its body.
    """
    for rank, rank_program in enumerate(program.rank_programs):
        locations = [index for index, instruction in enumerate(rank_program.body) if isinstance(instruction, Commit)]
        if len(locations) > 1 and not program.is_async_pipeline:
            bodies = [rank_program.body for rank_program in program.rank_programs]
            raise ProgramError(
                f"rank {rank} commits {len(locations)} times in one body; whether a step is applied is decided "
                f"once\n{format_locations(bodies, {rank: locations[1]}, 'here')}",
                rule=6,
            )
    checker = _CommitChecker.build(program, rank_instructions, symbolic, is_bounded=is_bounded)
    for update in sorted(symbolic.updates, key=lambda update: (update.rank, update.index)):
        checker.check(update)


@dataclass(slots=True)
class _CommitChecker:
    """Which ranks contribute to and apply each update.

    Args:
        rank_instructions: the unrolled instructions, per rank.
        is_async_pipeline: whether stages commit at different times.
        backward_ranks: the ranks that ran a backward, by microbatch and block.
        updating_ranks: the ranks that update each unit, separately for replicas that commit separately; parameter
            servers that apply pushes one by one do not commit.
        is_bounded: whether replicas that update separately nevertheless commit together.
        checked: what was checked already: unit, commit and contributions, by identity.
    """

    rank_instructions: Sequence[Instructions]
    is_async_pipeline: bool
    backward_ranks: dict[int, dict[int, set[int]]]
    updating_ranks: dict[tuple[Unit, Group], set[int]]
    is_bounded: bool
    checked: set[tuple[Unit, int, int]] = field(default_factory=set)

    @staticmethod
    def build(
        program: Program, rank_instructions: Sequence[Instructions], symbolic: SymbolicResult, *, is_bounded: bool
    ) -> _CommitChecker:
        backward_ranks: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, instructions in enumerate(rank_instructions):
            for instruction in instructions:
                if type(instruction) is Backward:
                    backward_ranks[instruction.micro][instruction.block].add(rank)
        updating_ranks: defaultdict[tuple[Unit, Group], set[int]] = defaultdict(set)
        for update in symbolic.updates:
            if not isinstance(rank_instructions[update.rank][update.index], ApplyPushes):
                updating_ranks[update.unit, () if is_bounded else update.replica].add(update.rank)
        return _CommitChecker(
            rank_instructions, program.is_async_pipeline, dict(backward_ranks), dict(updating_ranks), is_bounded
        )

    def check(self, update: UpdateRecord) -> None:
        """Check that all contributors of an update commit on it, and on exactly its microbatches.

        Raises:
            ProgramError: they do not (rule 6).
        """
        key = (update.unit, id(update.commit), id(update.contributions))
        if key in self.checked:
            return
        self.checked.add(key)  # the update holds both, so that no other object gets their ids
        if update.commit is None:
            raise self.violation(update, "no commit precedes it")
        text = format_instruction(Commit(update.commit.group, update.replica))
        micros = {micro for _, micro, _ in update.contributions}
        counted = update.commit.micros_in_loss_of(update.rank)
        if micros != counted:
            raise self.violation(
                update,
                f"its gradient is of {_format_microbatches(micros)}, but {text} commits "
                f"{_format_microbatches(counted)}; the "
                "loss must be averaged over exactly the committed samples",
            )
        missing = self.missing_members(update, update.commit)
        if missing:
            ranks = "rank " if len(missing) == 1 else "ranks "
            raise self.violation(
                update,
                f"{ranks}{format_group(tuple(sorted(missing)))} contributed to it, but are not in {text}; all "
                "contributors must "
                "apply a step together or skip it together",
            )

    def missing_members(self, update: UpdateRecord, commit: CommitRecord) -> set[int]:
        """Return the ranks that should take part in a commit and do not."""
        required = set(self.updating_ranks.get((update.unit, () if self.is_bounded else update.replica), ()))
        for micro in commit.micros:
            by_block = self.backward_ranks.get(micro, {})
            blocks: Iterable[int] = update.unit if self.is_async_pipeline else by_block
            for block in blocks:
                required |= by_block.get(block, set())
        return required.difference(commit.group)

    def violation(self, update: UpdateRecord, fact: str) -> ProgramError:
        shown = format_locations(self.rank_instructions, {update.rank: update.index}, "here")
        return ProgramError(f"rank {update.rank} updates unit {format_unit(update.unit)}: {fact}\n{shown}", rule=6)


def _format_microbatches(micros: Collection[int]) -> str:
    if not micros:
        return "no microbatch"
    noun = "microbatch" if len(micros) == 1 else "microbatches"
    first = ", ".join(map(str, sorted(micros)[:6]))
    return f"{noun} {first}{' and others' if len(micros) > 6 else ''}"


def check_replicas_equal(rank_instructions: Sequence[Instructions], symbolic: SymbolicResult) -> None:
    """Check that weights which replicas have updated separately are averaged over all of them at the end (rule 6).

    Raises:
        ProgramError: copies end with weights of different replicas.
    """
    first_seen: dict[Unit, tuple[int, frozenset[Group]]] = {}
    for (rank, unit), state in symbolic.unit_states.items():
        first_rank, diverged_from = first_seen.setdefault(unit, (rank, state.diverged_from))
        if diverged_from != state.diverged_from:
            raise ProgramError(
                f"ranks {first_rank} and {rank} end with weights of unit {format_unit(unit)} that replicas have "
                "updated "
                "separately and that are not averaged over all of them\n"
                f"{format_locations(rank_instructions, {rank: len(rank_instructions[rank]) - 1}, 'end')}",
                rule=6,
            )


def check_steady_state(program: Program) -> None:
    """Check that one more body leaves the same work in flight, shifted by one repetition (rule 7).

    Raises:
        ProgramError: the body cannot be repeated.
    """
    stride = len(program.micros)
    for rank, rank_program in enumerate(program.rank_programs):
        after_one = _in_flight_after(rank_program.prologue + rank_program.body)
        second = tuple(shift_microbatch(instruction, stride) for instruction in rank_program.body)
        after_two = _in_flight_after(rank_program.prologue + rank_program.body + second)
        if after_two != Counter(
            {shift_microbatch(instruction, stride): count for instruction, count in after_one.items()}
        ):
            raise ProgramError(
                f"rank {rank}:  the loop body is not steady-state: its in-flight set differs after one "
                "iteration\n" + format_locations([rank_program.body], {0: 0}, "body"),
                rule=7,
            )


def _in_flight_after(instructions: Instructions) -> Counter[Instruction]:
    """Return the forwards whose backward is still to come, with the weight version to read; and delayed backwards."""
    in_flight: dict[tuple[int, int], int] = {}
    input_grad_done: set[tuple[int, int]] = set()
    updates: Counter[int] = Counter()
    new_grads: defaultdict[Unit, list[Instruction]] = defaultdict(list)
    delayed_grads: defaultdict[Unit, list[Instruction]] = defaultdict(list)
    swapped = {instruction.unit for instruction in instructions if isinstance(instruction, SwapGradBuffers)}
    for instruction in instructions:
        match instruction:
            case Forward(block, micro, version):
                in_flight[block, micro] = updates[block] + version
            case Backward(block, micro, part="input"):
                input_grad_done.add((block, micro))
            case Backward(block, micro):
                input_grad_done.discard((block, micro))
                in_flight.pop((block, micro), None)
                for unit in swapped:
                    new_grads[unit] += [instruction] if block in unit else []
            case Update(unit):
                updates.update(unit)
                new_grads.pop(unit, None)
            case SwapGradBuffers(unit):
                new_grads[unit], delayed_grads[unit] = delayed_grads[unit], new_grads[unit]
            case _:
                pass
    under_way = Counter[Instruction](
        instruction for kept in (new_grads, delayed_grads) for commits in kept.values() for instruction in commits
    )
    for (block, micro), read in in_flight.items():
        version = read - updates[block]
        is_halfway = (block, micro) in input_grad_done
        under_way[Backward(block, micro, version, "input") if is_halfway else Forward(block, micro, version)] += 1
    return under_way
