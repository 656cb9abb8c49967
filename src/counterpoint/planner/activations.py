"""Choose for each block what it keeps between forward and backward, by predicted time under a limit of memory.

A block keeps its activations, or only its input and is recomputed; then the input is in memory, in parts on the ranks
of ``tensor(n)``, or on disk. What each of these costs in a step, and how many bytes of a microbatch a rank then has, is
known from the cost model: ``seconds(b, mode)`` and ``saved(b, mode)``. For the blocks of each stage this solves ::

    minimize    sum of seconds(b, mode of b)
    subject to  fixed(b) + sum of saved over blocks before b + activations(b) + (q - 1) * sum of saved  <=  limit

for each block b, at whose backward a rank has what blocks before b have saved for this microbatch, all activations of
b, what q - 1 other microbatches in flight have saved, and ``fixed(b)`` bytes of weights, gradients and states. That is
a multiple-choice knapsack with a capacity at each block. It is solved block by block over the choices that no other one
beats in time and in bytes (Nemhauser and Ullmann, 1969); rotor solves the same problem for chains of which a microbatch
may be recomputed several times, and Checkmate for any graph.

The simulator has the last word: it predicts the plan of each solution, and the limit is corrected by what it counts
more or less than the formula. Models of a few blocks are searched completely, and recomputing everything is always
compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod
from typing import Literal, TypeAlias

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.planner.incremental_simulator import IncrementalSimulator
from counterpoint.planner.plan_simulation import build_costs
from counterpoint.planner.prepare import compile_for, fit_profile, storage_sizes
from counterpoint.planner.ranking import Prediction, predict_with_simulator
from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.instruction import Backward, Collective, Fetch, Forward, Offload, Recompute, TensorRef
from counterpoint.program.program import Instructions, Program
from counterpoint.program.recompute_sets import find_recomputed
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.memory import memory_timeline
from counterpoint.strategies.offload import OFFLOAD_ACTIVATIONS_PASS
from counterpoint.strategies.recomputation import PARTITION_PASS, RECOMPUTE_PASS, format_blocks

ActivationMode: TypeAlias = Literal["keep", "recompute", "partition", "offload"]
"""What a block has between forward and backward: its activations; or its input, in memory, in parts, or on disk."""

MAX_ENUMERATED = 128
"""Choices of a whole model up to which the simulator predicts all of them."""
MAX_STATES = 400
"""Choices for the blocks up to some block that are continued; of more, some are left out."""
MAX_CORRECTIONS = 4
"""How often the limit of a formula is corrected by what the simulator counts."""

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True)
class BlockOption:
    """A mode of a block.

    Args:
        mode: what it keeps.
        seconds: of a step that this takes, if nothing else runs.
        saved_bytes: of a microbatch, from the forward to the backward.
    """

    mode: ActivationMode
    seconds: float
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The modes of a block.

    Args:
        block: the block.
        options: its modes.
        activation_bytes: of a microbatch, during its backward.
        fixed_bytes: that its rank has in addition during its backward, whatever blocks keep.
    """

    block: int
    options: tuple[BlockOption, ...]
    activation_bytes: int
    fixed_bytes: int


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The blocks of the ranks of a stage.

    Args:
        ranks: that run them.
        blocks: in their order.
        num_in_flight: microbatches whose forward has run, and whose backward has not, at most.
    """

    ranks: tuple[int, ...]
    blocks: tuple[BlockOptions, ...]
    num_in_flight: int


def choose_activations(
    plan: Plan, simulator: IncrementalSimulator, *, allows_disk: bool = False, max_enumerated: int = MAX_ENUMERATED
) -> Prediction | None:
    """Return the fastest plan that fits and differs from the given one in what blocks keep; None if none fits.

    Args:
        plan: that recomputes nothing.
        simulator: predicts plans for the model, the cluster and the batch.
        allows_disk: whether inputs may be on disk; ranks on a device keep them in memory in any case.
        max_enumerated: the number of choices up to which all are predicted.

    Returns:
        The prediction, of which ``attribute_time`` attributes the time.

    Cost:
        At most ``max_enumerated`` predictions, or for each set of modes that is available ``MAX_CORRECTIONS``.

    Source:
        Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019 (rotor); Jain et al., Checkmate: Breaking
        the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020; Nemhauser and Ullmann, Discrete dynamic
        programming and capital allocation, Management Science 15, 1969.
    """
    try:
        search = _ActivationSearch(plan, simulator, allows_disk=allows_disk)
    except PlanError:  # it cannot be recomputed; the ranking has said why the plan itself cannot run, if so
        return None
    return search.run(max_enumerated)


def describe_activations(plan: Plan) -> str:
    """Return what blocks keep under a plan, as a change of the plan that keeps everything.

    Example:
        >>> describe_activations(Plan(passes=("recompute:blocks=0-2", "offload:activations=disk:blocks=2")))
        'recomputation of blocks 0-2, with the input of block 2 on disk'
    """
    names = {
        RECOMPUTE_PASS: "activation recomputation",
        PARTITION_PASS: "in parts on the ranks of tensor(n)",
        OFFLOAD_ACTIVATIONS_PASS: "on disk",
    }
    found = {
        own: name.removeprefix(own).removeprefix(":blocks=") for name in plan.passes for own in names
        if name == own or name.startswith(f"{own}:")
    }  # fmt: skip
    recomputed = found.pop(RECOMPUTE_PASS, "")
    moved = [
        f"the input{'' if blocks.isdigit() else 's'} of {_name_blocks(blocks)} {names[own]}"
        for own, blocks in found.items()
    ]
    text = f"recomputation of {_name_blocks(recomputed)}" if recomputed else names[RECOMPUTE_PASS]
    return f"{text}, with {' and '.join(moved)}" if moved else text


def _name_blocks(blocks: str) -> str:
    """Return the name of what a selector such as ``0-2`` selects; of all blocks if it is empty."""
    return f"block {blocks}" if blocks.isdigit() else f"blocks {blocks}".strip()


class _ActivationSearch:
    """The modes of the blocks of a plan, and the predictions of what was chosen of them."""

    def __init__(self, plan: Plan, simulator: IncrementalSimulator, *, allows_disk: bool) -> None:
        self.plan, self.simulator = plan, simulator
        self.everything = replace(plan, passes=(*plan.passes, RECOMPUTE_PASS))
        self.stages = find_stage_options(self.everything, simulator, allows_disk=allows_disk)
        self.predictions: dict[Plan, Prediction | None] = {}

    @property
    def blocks(self) -> list[BlockOptions]:
        """The blocks of all stages."""
        return [block for stage in self.stages for block in stage.blocks]

    def run(self, max_enumerated: int) -> Prediction | None:
        """Return the fastest prediction that fits."""
        everything = self.predict(self.everything)
        capacity = self.simulator.cluster.device.usable_bytes
        if (everything is None or not everything.fits) and not all(solve_stage(one, capacity) for one in self.stages):
            return None
        options = [[option.mode for option in block.options] for block in self.blocks]
        if prod(map(len, options)) <= max_enumerated:
            for modes in product(*options):
                self.predict(self.plan_of(modes))
        else:
            moves = sorted({mode for modes in options for mode in modes} & {"partition", "offload"})
            for excluded in dict.fromkeys([tuple(moves), *((one,) for one in moves), ()]):
                self.solve(excluded)
        fitting = [one for one in self.predictions.values() if one is not None and one.fits]
        return min(fitting, key=lambda one: _preference(one, self.plan), default=None)

    def solve(self, excluded: Collection[str]) -> None:
        """Predict the solutions of the formula, whose limits are corrected by what the simulator counts."""
        capacity = self.simulator.cluster.device.usable_bytes
        limits = [capacity] * len(self.stages)
        solved: set[Plan] = set()
        for _ in range(MAX_CORRECTIONS):
            modes: list[ActivationMode] = []
            for stage, limit in zip(self.stages, limits, strict=True):
                found = solve_stage(stage, limit, excluded)
                if found is None:
                    return
                modes += found
            plan = self.plan_of(modes)
            prediction = self.predict(plan)
            if prediction is None or plan in solved:
                return
            solved.add(plan)
            for index, stage in enumerate(self.stages):
                limits[index] -= max(prediction.rank_bytes[rank] for rank in stage.ranks) - capacity

    def predict(self, plan: Plan) -> Prediction | None:
        """Return the prediction for a plan; None if it cannot be executed, or is the given one."""
        if plan not in self.predictions and plan != self.plan:
            self.predictions[plan] = None
            with suppress(PlanError):
                self.predictions[plan] = predict_with_simulator(plan, self.simulator, attributes_time=False)
        return self.predictions.get(plan)

    def plan_of(self, modes: Sequence[ActivationMode]) -> Plan:
        """Return the plan in which the blocks of all stages have these modes."""
        by_mode: defaultdict[ActivationMode, set[int]] = defaultdict(set)
        for block, mode in zip(self.blocks, modes, strict=True):
            by_mode[mode].add(block.block)
        recomputed = by_mode["recompute"] | by_mode["partition"] | by_mode["offload"]
        kept = {block.block for block in self.blocks if len(block.options) > 1} - recomputed
        passes = [_select(RECOMPUTE_PASS, recomputed if kept else ())] if recomputed else []
        passes += [_select(PARTITION_PASS, by_mode["partition"])] if by_mode["partition"] else []
        passes += [_select(OFFLOAD_ACTIVATIONS_PASS, by_mode["offload"])] if by_mode["offload"] else []
        return replace(self.plan, passes=(*self.plan.passes, *passes))


def _preference(prediction: Prediction, plan: Plan) -> tuple[float, int, int]:
    """Return what the best of several predictions has least of: time, further passes, bytes."""
    num_passes = len(prediction.plan.passes) - len(plan.passes)
    return float(f"{prediction.step_s:.9g}"), num_passes, prediction.memory_bytes


def _select(pass_text: str, blocks: Collection[int]) -> str:
    return f"{pass_text}:blocks={format_blocks(blocks)}" if blocks else pass_text


def find_stage_options(plan: Plan, simulator: IncrementalSimulator, *, allows_disk: bool) -> tuple[StageOptions, ...]:
    """Return the modes of the blocks of each stage.

    Args:
        plan: that recomputes all blocks.
        simulator: for the model, the cluster and the batch.
        allows_disk: whether inputs may be on disk.

    Raises:
        PlanError: it cannot be compiled, or several ranks share some of their blocks only.
    """
    cluster = simulator.cluster
    profile = fit_profile(plan, simulator.model, simulator.profile)
    compiled, samples = compile_for(plan, simulator.model, cluster, simulator.batch_size, profile)
    (costs,) = build_costs(
        (cluster,),
        compiled.model,
        samples=samples,
        global_num_microbatches=plan.global_num_microbatches,
        profile=profile,
    )
    is_async = compiled.program.is_async_pipeline
    reader = _StageReader(
        compiled,
        costs,
        storage_sizes(compiled.model, samples, profile),
        allows_disk=allows_disk and cluster.device.roofline is None and not is_async,
        allows_parts=not is_async,
    )
    ranks_of: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, instructions in enumerate(compiled.program.unroll(1)):
        blocks = tuple(sorted({one.block for one in instructions if isinstance(one, Forward)}))
        if blocks:
            ranks_of[blocks].append(rank)
    if sum(map(len, ranks_of)) != len({block for blocks in ranks_of for block in blocks}):
        raise PlanError(f"under {plan} ranks share some of their blocks only; name the blocks that are recomputed")
    return tuple(reader.read(blocks, ranks) for blocks, ranks in ranks_of.items())


class _StageReader:
    """Reads the modes of blocks from a program in which all are recomputed."""

    def __init__(
        self, compiled: CompiledPlan, costs: CostModel, sizes: SizeFn, *, allows_disk: bool, allows_parts: bool
    ) -> None:
        self.compiled, self.model, self.costs, self.sizes = compiled, compiled.model, costs, sizes
        self.allows_disk, self.allows_parts = allows_disk, allows_parts

    def read(self, blocks: Sequence[int], ranks: Sequence[int]) -> StageOptions:
        """Return the modes of the blocks of some ranks, as the first of them has them."""
        instructions = self.compiled.program.unroll(1)[ranks[0]]
        fixed = self.fixed_bytes(instructions, ranks[0])
        recomputed = find_recomputed(instructions)
        counts = Counter(block for block, _ in recomputed.recomputed)
        movable = {block for block, _ in recomputed.recomputed - recomputed.input_recomputed}
        sums = (one.group for one in instructions if isinstance(one, Collective) and one.tensor.name in {"y", "dx"})
        group = next(sums, ()) if self.allows_parts else ()
        return StageOptions(
            tuple(ranks),
            tuple(
                BlockOptions(
                    block,
                    tuple(self.options(block, counts[block], group, ranks[0], is_movable=block in movable)),
                    self.sizes(TensorRef("g", (block,), 0)),
                    fixed.get(block, 0),
                )
                for block in blocks
            ),
            _num_in_flight(instructions),
        )

    def options(
        self, block: int, count: int, group: tuple[int, ...], rank: int, *, is_movable: bool
    ) -> Iterator[BlockOption]:
        """Yield the modes of a block that is recomputed ``count`` times in a step."""
        yield BlockOption("keep", 0.0, self.sizes(TensorRef("g", (block,), 0)))
        if not count:
            return
        tensor = TensorRef("x", (block,), 0)
        has_edge = self.model.find_edge((block - 1, block)) is not None
        input_bytes = self.sizes(tensor) if block > 0 else 0
        seconds = count * self.costs.compute_s(Recompute(block, 0), WHOLE)
        yield BlockOption("recompute", seconds, input_bytes)
        if not has_edge or not is_movable:
            return
        if group:
            gather = Collective("all_gather", tensor, group)
            gather_s = self.costs.link_s(gather, WHOLE, rank) + self.costs.cpu_s(gather, WHOLE, rank)
            yield BlockOption("partition", seconds + count * gather_s, -(-input_bytes // len(group)))
        if self.allows_disk:
            yield BlockOption("offload", seconds + count * self.exposed_disk_s(tensor), 0)

    def exposed_disk_s(self, tensor: TensorRef) -> float:
        """Return for how long writing and reading an input takes longer than the computations beside them."""
        above = min(tensor.blocks[0] + 1, self.model.num_blocks - 1)
        forward_s, backward_s = (self.costs.compute_s(one, WHOLE) for one in (Forward(above, 0), Backward(above, 0)))
        write_s, read_s = (self.costs.offload_s(one, WHOLE) for one in (Offload(tensor, "disk"), Fetch(tensor, "disk")))
        return max(0.0, write_s - forward_s) + max(0.0, read_s - backward_s)

    def fixed_bytes(self, instructions: Instructions, rank: int) -> Mapping[int, int]:
        """Return the bytes that a rank has during backwards of each block, but for activations and inputs."""
        program = Program((replace(self.compiled.program.rank_programs[rank]),), num_identical_copies=1)

        def without_activations(tensor: TensorRef, codec: str = "") -> int:
            return 0 if tensor.name in {"g", "x"} else self.sizes(tensor, codec)

        ((_, *timeline),) = memory_timeline(program, without_activations)
        fixed: dict[int, int] = {}
        for instruction, num_bytes in zip(instructions, timeline, strict=True):
            if isinstance(instruction, Backward):
                fixed[instruction.block] = max(num_bytes, fixed.get(instruction.block, 0))
        return fixed


def _num_in_flight(instructions: Instructions) -> int:
    """Return how many microbatches have run a forward and not the backward of one block, at most."""
    running: Counter[int] = Counter()
    largest = 1
    for instruction in instructions:
        if isinstance(instruction, Forward):
            running[instruction.block] += 1
            largest = max(largest, running[instruction.block])
        elif isinstance(instruction, Backward) and instruction.computes_input_grad:
            running[instruction.block] -= 1
    return largest


@dataclass(frozen=True, slots=True)
class _State:
    """A choice for the first blocks of a stage.

    Args:
        seconds: that it takes.
        saved_bytes: of a microbatch.
        peak_bytes: the most bytes during the backward of one of them, with one microbatch in flight.
        mode: of the last of them.
        before: the choice for the others; None for no block.
    """

    seconds: float = 0.0
    saved_bytes: int = 0
    peak_bytes: int = 0
    mode: ActivationMode = "keep"
    before: _State | None = None


def solve_stage(
    stage: StageOptions, limit_bytes: int, excluded: Collection[str] = ()
) -> tuple[ActivationMode, ...] | None:
    """Return the modes of a stage's blocks that take least time within a limit by the formula; None if none do.

    Args:
        stage: its blocks.
        limit_bytes: that a rank may have.
        excluded: modes that are not used.

    Example:
        >>> options = BlockOption("keep", 0.0, 8), BlockOption("recompute", 1.0, 1)
        >>> blocks = tuple(BlockOptions(block, options, activation_bytes=8, fixed_bytes=0) for block in range(3))
        >>> solve_stage(StageOptions((0,), blocks, num_in_flight=1), limit_bytes=18)
        ('recompute', 'keep', 'keep')
    """
    states = [_State()]
    others = stage.num_in_flight - 1
    for block in stage.blocks:
        candidates = []
        for state in states:
            peak_bytes = max(state.peak_bytes, state.saved_bytes + block.activation_bytes + block.fixed_bytes)
            for option in block.options:
                saved_bytes = state.saved_bytes + option.saved_bytes
                if option.mode not in excluded and peak_bytes + others * saved_bytes <= limit_bytes:
                    seconds = state.seconds + option.seconds
                    candidates.append(_State(seconds, saved_bytes, peak_bytes, option.mode, state))
        states = _thin_out(_drop_beaten(candidates))
    if not states:
        return None
    best = min(states, key=lambda state: (state.seconds, state.peak_bytes, state.saved_bytes))
    modes: list[ActivationMode] = []
    while best.before is not None:
        modes.append(best.mode)
        best = best.before
    return tuple(reversed(modes))


def _drop_beaten(states: Sequence[_State]) -> list[_State]:
    """Return the choices that no other one beats in time, in what is saved, and in the peak."""
    best: list[_State] = []
    steps: list[tuple[int, int]] = []  # saved bytes and peaks of what was faster, none of which beats another
    for state in sorted(states, key=lambda state: (state.seconds, state.saved_bytes, state.peak_bytes)):
        if any(saved <= state.saved_bytes and peak <= state.peak_bytes for saved, peak in steps):
            continue
        own = state.saved_bytes, state.peak_bytes
        steps = [one for one in steps if not (own[0] <= one[0] and own[1] <= one[1])] + [own]
        best.append(state)
    return best


def _thin_out(states: Sequence[_State]) -> list[_State]:
    """Return at most ``MAX_STATES`` choices, from the fastest to the one that saves least, at equal distances."""
    if len(states) <= MAX_STATES:
        return list(states)
    step = (len(states) - 1) / (MAX_STATES - 1)
    return [states[round(index * step)] for index in range(MAX_STATES)]
