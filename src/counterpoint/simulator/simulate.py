"""Which bodies of a stream are played, and which of them say how long a step of it takes.

A body of a stream begins before the one before it has come to its end, because links go on: in the long run a step
takes less than a body from its first word to its last. Where links are slow, microbatches come one right behind the
other, and then none for long, so that several bodies count, as many as are under way at one time.

Run a program on a virtual clock, one rank of each class for all of it.

How long a step takes on the virtual clock, without a trace of it: for comparing many plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import ProgramError
from counterpoint.program.comm_matching import CommMatches, match_communication
from counterpoint.program.execution_order import GroupInterner, execution_order, format_locations
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Commit,
    Instruction,
    Update,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rank_classes import classify_ranks
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.simulator.contention import SharedResources, topology_keys
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.event_simulator import EventSimulator, SymmetryBroken
from counterpoint.simulator.instruction_times import UNIFORM_CLUSTER, InstructionTimes, time_instructions
from counterpoint.simulator.sim_input import SimInput
from counterpoint.world.cluster import Cluster

WARMUP_FACTOR = 3
"""So many times as many bodies as count are played before them, which are then like all later ones."""


@dataclass(frozen=True, slots=True)
class RepeatedBody:
    """The bodies of one kind of step that are played; a step that is no stream has one.

    Args:
        turn: the kind of step.
        num_counted: how many of them count, the last ones.
    """

    variant: StepVariant
    num_measured: int

    @staticmethod
    def for_variant(variant: StepVariant) -> RepeatedBody:
        """Return as many as say how long a step takes."""
        return RepeatedBody(variant, 1 + variant.lookahead)

    @property
    def num_simulated(self) -> int:
        """How many there are."""
        return self.num_measured if self.variant.async_pipeline is None else (1 + WARMUP_FACTOR) * self.num_measured

    def measured_indices(self, rank: int) -> range:
        """Return the places of the words in a rank's flat row that count."""
        return self._indices(rank, self.num_measured)

    def preceding_indices(self, rank: int) -> range:
        """Return the places of as many words before them."""
        counted = self.measured_indices(rank)
        return range(max(0, counted.start - len(counted)), counted.start)

    def last_indices(self, rank: int) -> range:
        """Return the places of the words of the last body."""
        return self._indices(rank, 1)

    def _indices(self, rank: int, count: int) -> range:
        row = self.variant.full_program.rank_programs[rank]
        stop = len(row.prologue) + self.num_simulated * len(row.body)
        return range(stop - count * len(row.body), stop)


def simulate(program: Program, costs: CostModel, cluster: Cluster = UNIFORM_CLUSTER) -> Trace:
    """Return what one step would be like: one rank of each symmetry class is played, all ranks are in the trace.

    Args:
        program: a program that keeps the laws; a stream is played with one body.
        costs: seconds of its instructions.
        cluster: how fast each rank is, and which of them are in each other's way.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    return _simulate(program, program.unroll(1), costs, cluster)


def simulate_variant(variant: StepVariant, costs: CostModel, cluster: Cluster = UNIFORM_CLUSTER) -> Trace:
    """Return what one kind of step would be like; in a stream, one body in the long run.

    Every rank's body begins at 0 then, as it does where it is measured; how long it is until the next is told beside.

    Args:
        turn: of a plan.
        costs: seconds of its instructions.
        cluster: how fast each rank is, and which of them are in each other's way.
    """
    if variant.async_pipeline is None:
        return simulate(variant.program, costs, cluster)
    bodies = RepeatedBody.for_variant(variant)
    rows = variant.async_pipeline.unroll(bodies.num_simulated)
    speaker, clock = run_rank_programs(
        rows, find_representatives(variant.async_pipeline, rows, cluster), costs, cluster
    )
    own = _group_by_rank(_build_trace(rows, speaker, clock))
    events = [event for rank in range(len(rows)) for event in _last_iteration(own[rank], bodies, rank)]
    return replace(
        Trace.from_events(events, len(rows), "simulated"), beat_s=step_s(dict.fromkeys(speaker), clock, bodies)
    )


def _group_by_rank(trace: Trace) -> list[list[TraceEvent]]:
    found: list[list[TraceEvent]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        found[event.rank].append(event)
    return found


def _last_iteration(events: Sequence[TraceEvent], body: RepeatedBody, rank: int) -> list[TraceEvent]:
    last, words = body.last_indices(rank), body.variant.program.rank_programs[rank].body
    played = [event for event in events if event.index in last]
    began = min((event.start_s for event in played), default=0.0)
    return [
        replace(
            event,
            index=event.index - last.start,
            words=format_instruction(words[event.index - last.start]),
            start_s=event.start_s - began,
            stop_s=event.stop_s - began,
        )
        for event in played
    ]


def _simulate(program: Program, rank_instructions: Sequence[Instructions], costs: CostModel, cluster: Cluster) -> Trace:
    speaker, clock = run_rank_programs(
        rank_instructions, find_representatives(program, rank_instructions, cluster), costs, cluster
    )
    return _build_trace(rank_instructions, speaker, clock)


SIGNIFICANT_DIGITS = 12
"""A difference of two late moments has so many digits that are no rounding; equal streams are then equally fast."""


def step_s(representatives: Iterable[int], simulator: EventSimulator, body: RepeatedBody | None = None) -> float:
    """Return the seconds of a step that was played: in a stream those from the end of a body to the end of the next.

    Args:
        speakers: whose words were played.
        clock: with what they did.
        bodies: which of a stream's were played; None where the rows are one step.
    """
    found = 0.0
    for rank in representatives:
        if body is None or body.variant.async_pipeline is None:
            found = max(found, _end_s(simulator, rank, None))
        else:
            passed = _end_s(simulator, rank, body.measured_indices(rank)) - _end_s(
                simulator, rank, body.preceding_indices(rank)
            )
            found = max(found, float(f"{passed / body.num_measured:.{SIGNIFICANT_DIGITS}g}"))
    return found


def _end_s(simulator: EventSimulator, rank: int, places: range | None) -> float:
    """Return when the last of a rank's words at some places was done; of all of them, with none."""
    return max(
        (stop for index, _, stop, _ in simulator.intervals[rank] if places is None or index in places), default=0.0
    )


@dataclass(frozen=True, slots=True)
class Representatives:
    """Who meets whom in rows, and which rank speaks for which, whatever the words cost."""

    partners: CommMatches
    representative: Sequence[int]


def find_representatives(
    program: Program, rank_instructions: Sequence[Instructions], cluster: Cluster = UNIFORM_CLUSTER
) -> Representatives:
    """Return the cast of a program's flat rows.

    Raises:
        ProgramError: messages do not pair up (law 1).
    """
    try:
        partners = match_communication(rank_instructions)
    except (IndexError, KeyError):
        raise _explain_stall(rank_instructions) from None
    speaker = [0] * len(rank_instructions)
    for group in classify_ranks(program, rank_instructions, partners, topology_keys(cluster, len(rank_instructions))):
        for rank in group:
            speaker[rank] = group[0]
    return Representatives(partners, speaker)


def run_rank_programs(
    rank_instructions: Sequence[Instructions],
    representatives: Representatives,
    costs: CostModel,
    cluster: Cluster = UNIFORM_CLUSTER,
) -> tuple[Sequence[int], EventSimulator]:
    """Return who has spoken for each rank in the end, and the clock with what the speakers did.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    speaker = representatives.representative
    try:
        clock = _run(rank_instructions, representatives, costs, cluster)
    except SymmetryBroken:
        speaker = range(len(rank_instructions))
        clock = _run(rank_instructions, Representatives(representatives.partners, speaker), costs, cluster)
    if clock.stalled_ranks:
        raise _explain_stall(rank_instructions)
    return speaker, clock


def simulate_every_rank(program: Program, costs: CostModel, cluster: Cluster = UNIFORM_CLUSTER) -> Trace:
    """Return what :func:`simulate` returns, without use of symmetry: the reference that it must equal."""
    rows = program.unroll(1)
    clock = _run(rows, Representatives(match_communication(rows), range(len(rows))), costs, cluster)
    return _build_trace(rows, range(len(rows)), clock)


def _run(
    rank_instructions: Sequence[Instructions], representatives: Representatives, costs: CostModel, cluster: Cluster
) -> EventSimulator:
    speakers = list(dict.fromkeys(representatives.representative))
    places = SharedResources(cluster, representatives.representative)
    times = {rank: time_instructions(rank_instructions[rank], costs, rank=rank, cluster=cluster) for rank in speakers}
    return run_simulator(rank_instructions, representatives, times, costs, places)


def run_simulator(
    rank_instructions: Sequence[Instructions],
    representatives: Representatives,
    times: Mapping[int, InstructionTimes],
    costs: CostModel,
    resources: SharedResources,
) -> EventSimulator:
    """Return the clock after those have spoken of whose words it is known what each takes.

    Raises:
        Clash: ranks of one class would differ, see there.
    """
    seconds = {rank: own.seconds for rank, own in times.items()}
    crossings = {rank: own.shared_link_s for rank, own in times.items()} if resources.has_shared_nics else {}
    hands = {rank: own.cpu_demands for rank, own in times.items()}
    clock = EventSimulator(
        SimInput(
            rank_instructions,
            representatives.partners,
            representatives.representative,
            seconds,
            crossings,
            hands,
            costs,
            resources,
        )
    )
    clock.run()
    return clock


def _explain_stall(rank_instructions: Sequence[Instructions]) -> ProgramError:
    """Return why a program comes to no end; the walk knows."""
    try:
        for _ in execution_order(rank_instructions):
            pass
    except ProgramError as error:
        return error
    places = dict.fromkeys(range(len(rank_instructions)), 0)
    return ProgramError(
        f"the messages of the rows do not pair up\n{format_locations(rank_instructions, places, 'row')}", rule=1
    )


def _build_trace(
    rank_instructions: Sequence[Instructions], representative: Sequence[int], simulator: EventSimulator
) -> Trace:
    """Return the events of all ranks; those of a class are put in order once."""
    write = _InstructionFormatter()
    spans = {
        rank: sorted(own, key=lambda span: (span[1], span[2], span[0])) for rank, own in simulator.intervals.items()
    }
    events = [
        TraceEvent(rank, index, write.text(row[index]), start, stop, lane)
        for rank, row in enumerate(rank_instructions)
        for index, start, stop, lane in spans[representative[rank]]
    ]
    return Trace(tuple(events), len(rank_instructions), "simulated")


class _InstructionFormatter:
    """Writes words; what a thousand members call is written once."""

    def __init__(self) -> None:
        self.groups = GroupInterner()
        self.texts: dict[tuple[object, ...], str] = {}

    def text(self, instruction: Instruction) -> str:
        """Return the text of a word."""
        if not isinstance(instruction, Collective | Commit):
            return format_instruction(instruction)
        group = self.groups.intern(instruction.group)
        key = (
            (group, instruction.op_name, instruction.tensor, instruction.phase)
            if isinstance(instruction, Collective)
            else (group,)
        )
        if key not in self.texts:
            self.texts[key] = format_instruction(instruction)
        return self.texts[key]


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """The seconds of a step, and of those how many a rank computes and how many it updates, on average.

    In a stream a step lasts from the end of a body to the end of the next one, in the long run.
    """

    step_s: float
    compute_s: float
    update_s: float


def simulate_breakdown(
    variant: StepVariant, costs: Sequence[CostModel], cluster: Cluster = UNIFORM_CLUSTER
) -> list[StepBreakdown]:
    """Return what :func:`counterpoint.simulator.simulate.simulate_variant` would show of one kind of step, in sums.

    Args:
        turn: of a plan.
        costs: one or more, for each of which it is played.
        cluster: how fast each rank is, and which of them are in each other's way.

    Raises:
        ProgramError: the program comes to no end (law 2 or 3).
    """
    bodies = RepeatedBody.for_variant(variant)
    rows = variant.full_program.unroll(bodies.num_simulated)
    cast = find_representatives(variant.full_program, rows, cluster)
    found = []
    for each in costs:
        speaker, clock = run_rank_programs(rows, cast, each, cluster)
        found.append(compute_breakdown(rows, speaker, clock, bodies))
    return found


def compute_breakdown(
    rank_instructions: Sequence[Instructions],
    representative: Sequence[int],
    simulator: EventSimulator,
    body: RepeatedBody | None = None,
) -> StepBreakdown:
    """Return what a clock has shown that has played rows.

    Args:
        rows: of all ranks.
        speaker: for each rank the one that has played for it.
        clock: with what the speakers did.
        bodies: which of a stream's were played; None where the rows are one step.
    """
    speakers = dict.fromkeys(representative)
    times = 1 if body is None else body.num_measured
    own = {rank: _busy_seconds(rank_instructions[rank], simulator, rank, body) for rank in speakers}
    return StepBreakdown(
        step_s(speakers, simulator, body),
        sum(own[rank][0] for rank in representative) / len(rank_instructions) / times,
        sum(own[rank][1] for rank in representative) / len(rank_instructions) / times,
    )


def _busy_seconds(
    instructions: Instructions, simulator: EventSimulator, rank: int, body: RepeatedBody | None
) -> tuple[float, float]:
    """Return the seconds that a rank computes and updates in the bodies that count."""
    counted = range(len(instructions)) if body is None else body.measured_indices(rank)
    compute_s = update_s = 0.0
    for index, start, stop, lane in simulator.intervals[rank]:
        if lane != "compute" or index not in counted:
            continue
        if isinstance(instructions[index], Update | ApplyPushes):
            update_s += stop - start
        else:
            compute_s += stop - start
    return compute_s, update_s
