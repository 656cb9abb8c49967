"""Simulate programs on virtual ranks and links: traces of one step, and how long a step takes.

One rank of each class of equal ranks is simulated and represents the others.

A step of an asynchronous pipeline takes less time than its body from the first instruction to the last, because
several bodies are in flight: messages of one are received in the next. So the body is repeated, and a step is the
distance between the ends of two repetitions in the steady state::

    body k      |-------------------|
    body k+1               |-------------------|
                           steps: |<-------->|
    simulated   [warm-up: 3 n bodies][n bodies that are measured]     n = 1 + lookahead of the step variant
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
"""Repetitions before the measured ones, as a multiple of these; then the pipeline is in its steady state."""


@dataclass(frozen=True, slots=True)
class RepeatedBody:
    """Repetitions of a step variant's body; a step that is not part of an asynchronous pipeline has one.

    Args:
        variant: the step variant.
        num_measured: the last repetitions, which are measured.
    """

    variant: StepVariant
    num_measured: int

    @staticmethod
    def for_variant(variant: StepVariant) -> RepeatedBody:
        """Return as many repetitions as the duration of a step depends on."""
        return RepeatedBody(variant, 1 + variant.lookahead)

    @property
    def num_simulated(self) -> int:
        """Number of repetitions."""
        return self.num_measured if self.variant.async_pipeline is None else (1 + WARMUP_FACTOR) * self.num_measured

    def measured_indices(self, rank: int) -> range:
        """Return the indices of the measured instructions among the unrolled ones of a rank."""
        return self._indices(rank, self.num_measured)

    def preceding_indices(self, rank: int) -> range:
        """Return the indices of as many instructions before the measured ones."""
        measured = self.measured_indices(rank)
        return range(max(0, measured.start - len(measured)), measured.start)

    def last_indices(self, rank: int) -> range:
        """Return the indices of the last repetition."""
        return self._indices(rank, 1)

    def _indices(self, rank: int, count: int) -> range:
        rank_program = self.variant.full_program.rank_programs[rank]
        stop = len(rank_program.prologue) + self.num_simulated * len(rank_program.body)
        return range(stop - count * len(rank_program.body), stop)


def simulate(program: Program, costs: CostModel, cluster: Cluster = UNIFORM_CLUSTER) -> Trace:
    """Return the trace of one step.

    Args:
        program: a verified program; an asynchronous pipeline runs its body once.
        costs: seconds of its instructions.
        cluster: how fast each rank is, and what ranks share.

    Raises:
        ProgramError: the program deadlocks, or its collectives do not match.
    """
    rank_instructions = program.unroll(1)
    representatives = find_representatives(program, rank_instructions, cluster)
    representative, simulator = run_rank_programs(rank_instructions, representatives, costs, cluster)
    return _build_trace(rank_instructions, representative, simulator)


def simulate_variant(variant: StepVariant, costs: CostModel, cluster: Cluster = UNIFORM_CLUSTER) -> Trace:
    """Return the trace of one step variant; of an asynchronous pipeline, one body in the steady state.

    The body of each rank then begins at 0, as in a measured trace, and ``steady_step_s`` is the distance to the next
    one.

    Args:
        variant: of a plan.
        costs: seconds of its instructions.
        cluster: how fast each rank is, and what ranks share.
    """
    if variant.async_pipeline is None:
        return simulate(variant.program, costs, cluster)
    body = RepeatedBody.for_variant(variant)
    rank_instructions = variant.async_pipeline.unroll(body.num_simulated)
    representative, simulator = run_rank_programs(
        rank_instructions, find_representatives(variant.async_pipeline, rank_instructions, cluster), costs, cluster
    )
    events_of_rank = _group_by_rank(_build_trace(rank_instructions, representative, simulator))
    events = [
        event for rank in range(len(rank_instructions)) for event in _last_iteration(events_of_rank[rank], body, rank)
    ]
    return replace(
        Trace.from_events(events, len(rank_instructions), "simulated"),
        steady_step_s=step_s(dict.fromkeys(representative), simulator, body),
    )


def _group_by_rank(trace: Trace) -> list[list[TraceEvent]]:
    events_of_rank: list[list[TraceEvent]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        events_of_rank[event.rank].append(event)
    return events_of_rank


def _last_iteration(events: Sequence[TraceEvent], body: RepeatedBody, rank: int) -> list[TraceEvent]:
    last, instructions = body.last_indices(rank), body.variant.program.rank_programs[rank].body
    last_events = [event for event in events if event.index in last]
    start_s = min((event.start_s for event in last_events), default=0.0)
    return [
        replace(
            event,
            index=event.index - last.start,
            text=format_instruction(instructions[event.index - last.start]),
            start_s=event.start_s - start_s,
            stop_s=event.stop_s - start_s,
        )
        for event in last_events
    ]


SIGNIFICANT_DIGITS = 12
"""Digits of a difference of two late moments that are not rounding errors; equal pipelines get equal steps."""


def step_s(representatives: Iterable[int], simulator: EventSimulator, body: RepeatedBody | None = None) -> float:
    """Return the seconds of a simulated step; of an asynchronous pipeline between the ends of consecutive bodies.

    Args:
        representatives: the simulated ranks.
        simulator: after its run.
        body: what was repeated; None where the instructions are one step.
    """
    longest_s = 0.0
    for rank in representatives:
        if body is None or body.variant.async_pipeline is None:
            longest_s = max(longest_s, _end_s(simulator, rank, None))
        else:
            measured_s = _end_s(simulator, rank, body.measured_indices(rank)) - _end_s(
                simulator, rank, body.preceding_indices(rank)
            )
            longest_s = max(longest_s, float(f"{measured_s / body.num_measured:.{SIGNIFICANT_DIGITS}g}"))
    return longest_s


def _end_s(simulator: EventSimulator, rank: int, indices: range | None) -> float:
    """Return when the last of a rank's instructions with some indices ended; of all of them, with None."""
    return max(
        (stop for index, _, stop, _ in simulator.intervals[rank] if indices is None or index in indices), default=0.0
    )


@dataclass(frozen=True, slots=True)
class Representatives:
    """Which instructions communicate with each other, and which rank represents each rank.

    Neither depends on costs.
    """

    matches: CommMatches
    representative: Sequence[int]


def find_representatives(
    program: Program, rank_instructions: Sequence[Instructions], cluster: Cluster = UNIFORM_CLUSTER
) -> Representatives:
    """Return the representatives of a program's unrolled instructions.

    Raises:
        ProgramError: sends and receives do not match.
    """
    try:
        matches = match_communication(rank_instructions)
    except (IndexError, KeyError):
        raise _explain_stall(rank_instructions) from None
    representative = [0] * len(rank_instructions)
    for group in classify_ranks(program, rank_instructions, matches, topology_keys(cluster, len(rank_instructions))):
        for rank in group:
            representative[rank] = group[0]
    return Representatives(matches, representative)


def run_rank_programs(
    rank_instructions: Sequence[Instructions],
    representatives: Representatives,
    costs: CostModel,
    cluster: Cluster = UNIFORM_CLUSTER,
) -> tuple[Sequence[int], EventSimulator]:
    """Return the representative of each rank and the simulator after its run.

    If symmetry breaks, because ranks of one class request the same link at the same moment, each rank represents
    itself.

    Raises:
        ProgramError: the program deadlocks, or its collectives do not match.
    """
    representative = representatives.representative
    try:
        simulator = _run(rank_instructions, representatives, costs, cluster)
    except SymmetryBroken:
        representative = range(len(rank_instructions))
        simulator = _run(rank_instructions, Representatives(representatives.matches, representative), costs, cluster)
    if simulator.stalled_ranks:
        raise _explain_stall(rank_instructions)
    return representative, simulator


def simulate_every_rank(program: Program, costs: CostModel, cluster: Cluster = UNIFORM_CLUSTER) -> Trace:
    """Return the trace of :func:`simulate` without use of symmetry: the reference that it must equal."""
    rank_instructions = program.unroll(1)
    simulator = _run(
        rank_instructions,
        Representatives(match_communication(rank_instructions), range(len(rank_instructions))),
        costs,
        cluster,
    )
    return _build_trace(rank_instructions, range(len(rank_instructions)), simulator)


def _run(
    rank_instructions: Sequence[Instructions], representatives: Representatives, costs: CostModel, cluster: Cluster
) -> EventSimulator:
    ranks = list(dict.fromkeys(representatives.representative))
    resources = SharedResources(cluster, representatives.representative)
    times = {rank: time_instructions(rank_instructions[rank], costs, rank=rank, cluster=cluster) for rank in ranks}
    return run_simulator(rank_instructions, representatives, times, costs, resources)


def run_simulator(
    rank_instructions: Sequence[Instructions],
    representatives: Representatives,
    times: Mapping[int, InstructionTimes],
    costs: CostModel,
    resources: SharedResources,
) -> EventSimulator:
    """Return the simulator after it has run the representatives, whose instructions have known times.

    Raises:
        SymmetryBroken: ranks of one class would behave differently.
    """
    seconds = {rank: times_of_rank.seconds for rank, times_of_rank in times.items()}
    shared_link_s = (
        {rank: times_of_rank.shared_link_s for rank, times_of_rank in times.items()}
        if resources.has_shared_nics
        else {}
    )
    cpu_demands = {rank: times_of_rank.cpu_demands for rank, times_of_rank in times.items()}
    simulator = EventSimulator(
        SimInput(
            rank_instructions,
            representatives.matches,
            representatives.representative,
            seconds,
            shared_link_s,
            cpu_demands,
            costs,
            resources,
        )
    )
    simulator.run()
    return simulator


def _explain_stall(rank_instructions: Sequence[Instructions]) -> ProgramError:
    """Return the error that the verifier of the execution order raises for a program that does not end."""
    try:
        for _ in execution_order(rank_instructions):
            pass
    except ProgramError as error:
        return error
    cursors = dict.fromkeys(range(len(rank_instructions)), 0)
    return ProgramError(
        f"sends and receives of the ranks do not match\n{format_locations(rank_instructions, cursors, 'starts here')}",
        rule=1,
    )


def _build_trace(
    rank_instructions: Sequence[Instructions], representative: Sequence[int], simulator: EventSimulator
) -> Trace:
    """Return the trace of all ranks; the events of a class are sorted once."""
    formatter = _InstructionFormatter()
    intervals = {
        rank: sorted(unsorted, key=lambda interval: (interval[1], interval[2], interval[0]))
        for rank, unsorted in simulator.intervals.items()
    }
    events = [
        TraceEvent(rank, index, formatter.text(instructions[index]), start, stop, lane)
        for rank, instructions in enumerate(rank_instructions)
        for index, start, stop, lane in intervals[representative[rank]]
    ]
    return Trace(tuple(events), len(rank_instructions), "simulated")


class _InstructionFormatter:
    """Formats instructions; a collective of a thousand members is formatted once."""

    def __init__(self) -> None:
        self.groups = GroupInterner()
        self.texts: dict[tuple[object, ...], str] = {}

    def text(self, instruction: Instruction) -> str:
        """Return the text of an instruction."""
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
    """Seconds of a step, and of these the seconds that a rank computes and updates, averaged over ranks.

    A step of an asynchronous pipeline lasts from the end of one body to the end of the next, in the steady state.
    """

    step_s: float
    compute_s: float
    update_s: float


def simulate_breakdown(
    variant: StepVariant, costs: Sequence[CostModel], cluster: Cluster = UNIFORM_CLUSTER
) -> list[StepBreakdown]:
    """Return the breakdown of a step variant under each cost model, without building a trace.

    Args:
        variant: of a plan.
        costs: one or more cost models.
        cluster: how fast each rank is, and what ranks share.

    Raises:
        ProgramError: the program deadlocks, or its collectives do not match.
    """
    body = RepeatedBody.for_variant(variant)
    rank_instructions = variant.full_program.unroll(body.num_simulated)
    representatives = find_representatives(variant.full_program, rank_instructions, cluster)
    breakdowns = []
    for cost_model in costs:
        representative, simulator = run_rank_programs(rank_instructions, representatives, cost_model, cluster)
        breakdowns.append(compute_breakdown(rank_instructions, representative, simulator, body))
    return breakdowns


def compute_breakdown(
    rank_instructions: Sequence[Instructions],
    representative: Sequence[int],
    simulator: EventSimulator,
    body: RepeatedBody | None = None,
) -> StepBreakdown:
    """Return the breakdown of a step from a simulator that has run it.

    Args:
        rank_instructions: of all ranks.
        representative: for each rank the rank that was simulated for it.
        simulator: after its run.
        body: what was repeated; None where the instructions are one step.
    """
    ranks = dict.fromkeys(representative)
    num_repetitions = 1 if body is None else body.num_measured
    busy_s = {rank: _busy_seconds(rank_instructions[rank], simulator, rank, body) for rank in ranks}
    return StepBreakdown(
        step_s(ranks, simulator, body),
        sum(busy_s[rank][0] for rank in representative) / len(rank_instructions) / num_repetitions,
        sum(busy_s[rank][1] for rank in representative) / len(rank_instructions) / num_repetitions,
    )


def _busy_seconds(
    instructions: Instructions, simulator: EventSimulator, rank: int, body: RepeatedBody | None
) -> tuple[float, float]:
    """Return the seconds that a rank computes and updates in the measured repetitions."""
    indices = range(len(instructions)) if body is None else body.measured_indices(rank)
    compute_s = update_s = 0.0
    for index, start, stop, lane in simulator.intervals[rank]:
        if lane != "compute" or index not in indices:
            continue
        if isinstance(instructions[index], Update | ApplyPushes):
            update_s += stop - start
        else:
            compute_s += stop - start
    return compute_s, update_s
