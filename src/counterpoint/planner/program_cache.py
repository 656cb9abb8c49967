"""Cache what many plans have in common: partitioned models, rank programs, and their times and memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction

from counterpoint.compiler.compile import message_size_fn
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.planner.plan_simulation import backward_slices, build_costs, has_divisible_backward
from counterpoint.planner.prepare import storage_sizes
from counterpoint.program.comm_matching import TypeIndices, index_by_type
from counterpoint.program.comm_volume import SizeFn, sent_bytes
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Fetch,
    Free,
    Instruction,
    Offload,
    Pull,
    Push,
    Recv,
    Send,
    Update,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rank_classes import RankProgramSignatures
from counterpoint.simulator.bucketed_backward import BackwardSlice, SplitBackward, split_rank_backward
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.instruction_times import InstructionTimes, time_instructions
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.network import CommInstruction, P2PInstruction
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.strategies.recomputation import Recomputation
from counterpoint.strategies.single_device import single_device_program
from counterpoint.strategies.strategy import Strategy
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """What rank programs need and send that are equal but for ranks and microbatches."""

    sent_bytes: Fraction
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class CachedRankProgram:
    """A rank program with all that is known of it without the other ranks.

    Args:
        instructions: of the rank, split if its backward is.
        type_indices: indices of instructions by type.
        signature: number of a class of rank programs that are equal but for ranks and microbatches, and cost the same.
        rank: whose program it is, if ranks differ.
        unsplit: the rank program before its backward is split, which determines memory and traffic.
        unsplit_signature: the signature of that.
        costs: of its instructions, on each cluster.
    """

    instructions: Instructions
    type_indices: TypeIndices
    signature: int
    rank: int
    unsplit: RankProgram
    unsplit_signature: int
    costs: tuple[CostModel, ...]


@dataclass(frozen=True, slots=True)
class CachedCosts:
    """Costs that are computed once for all microbatches.

    Args:
        costs: the cost model.
        cache: values by instruction.
    """

    costs: CostModel
    cache: dict[Hashable, float] = field(default_factory=dict)

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the cached cost."""
        if isinstance(instruction, Update):
            key: Hashable = (Update, instruction.unit, fraction.numerator, fraction.denominator)
        else:
            key = (type(instruction), instruction.block, instruction.part if isinstance(instruction, Backward) else "")
        if key not in self.cache:
            self.cache[key] = self.costs.compute_s(instruction, fraction)
        return self.cache[key]

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return the cost."""
        return self.costs.launch_overhead_s(instruction)

    def grad_accumulate_s(self, block: int) -> float:
        """Return the cost."""
        return self.costs.grad_accumulate_s(block)

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the cached cost."""
        key = ("link", _key_without_microbatch(instruction), fraction.numerator, fraction.denominator, rank)
        if key not in self.cache:
            self.cache[key] = self.costs.link_s(instruction, fraction, rank)
        return self.cache[key]

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the cached cost."""
        key = ("shared_link", _key_without_microbatch(instruction), fraction.numerator, fraction.denominator, rank)
        if key not in self.cache:
            self.cache[key] = self.costs.shared_link_s(instruction, fraction, rank)
        return self.cache[key]

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return the cached cost."""
        key = (
            "cpu",
            _key_without_microbatch(instruction),
            fraction.numerator,
            fraction.denominator,
            rank,
            shares_memory,
        )
        if key not in self.cache:
            self.cache[key] = self.costs.cpu_s(instruction, fraction, rank, shares_memory=shares_memory)
        return self.cache[key]

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return whether the message is streamed."""
        return self.costs.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return the cached cost."""
        key = (
            "pass",
            _key_without_microbatch(instruction)
            if isinstance(instruction, Commit)
            else (instruction.tensor.name, instruction.tensor.blocks),
        )
        if key not in self.cache:
            self.cache[key] = self.costs.memory_pass_s(instruction)
        return self.cache[key]

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return the cost."""
        return self.costs.offload_s(instruction, fraction)

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return the cost."""
        return self.costs.server_update_s(unit, server, worker)


def _key_without_microbatch(instruction: CommInstruction) -> Hashable:
    """Return all that the cost of an instruction depends on, except the fraction that it communicates."""
    match instruction:
        case Collective(_, tensor, group):
            return instruction.op_name, tensor.name, tensor.blocks, group
        case Send(tensor, peer, codec) | Push(tensor, peer, codec) | Recv(tensor, peer, codec):
            return type(instruction), tensor.name, tensor.blocks, peer, codec
        case Pull(tensor, peer):
            return type(instruction), tensor.name, tensor.blocks, peer
        case Commit(group):
            return group


@dataclass(slots=True)
class PlanModelCache:
    """A model with the blocks of a plan, for one microbatch size, and all that is known of its rank programs.

    Args:
        model: with these blocks.
        clusters: where it runs; hosts are those of the first one.
        samples: of one microbatch.
        global_num_microbatches: microbatches of a step, of all ranks.
        profile: measured times of the model's layers; None to use operation counts.
    """

    model: ModelSpec
    clusters: tuple[Cluster, ...]
    samples: int
    global_num_microbatches: int
    profile: ModelProfile | None = None
    sizes: SizeFn = field(init=False)
    storage_sizes: SizeFn = field(init=False)
    costs: tuple[CachedCosts, ...] = field(init=False)
    is_chain: bool = field(init=False)
    signatures: RankProgramSignatures = field(default_factory=RankProgramSignatures)
    signature_ids: dict[Hashable, int] = field(default_factory=dict)
    footprints: dict[int, RankFootprint] = field(default_factory=dict)
    times: dict[tuple[int, int, int], InstructionTimes] = field(default_factory=dict)
    shared_link_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rank_programs: dict[Hashable, CachedRankProgram] = field(default_factory=dict)
    stage_programs: dict[Hashable, RankProgram] = field(default_factory=dict)
    inner_programs: dict[Hashable, Program] = field(default_factory=dict)
    backward_slices: dict[BucketConfig, tuple[BackwardSlice, ...]] = field(default_factory=dict)
    recomputed_blocks: dict[Recomputation, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = message_size_fn(self.model, self.samples)
        self.storage_sizes = storage_sizes(self.model, self.samples, self.profile)
        costs = build_costs(
            self.clusters,
            self.model,
            samples=self.samples,
            global_num_microbatches=self.global_num_microbatches,
            profile=self.profile,
        )
        self.costs = tuple(map(CachedCosts, costs))
        self.is_chain = _is_chain(self.model)

    @property
    def cluster(self) -> Cluster:
        """The first of the clusters."""
        return self.clusters[0]

    def inner_program(self, num_microbatches: int, tensor: tuple[Strategy, ...]) -> Program:
        """Return the single-device program, or its first tensor-parallel rank with empty other ranks."""
        key = num_microbatches, tensor
        if key not in self.inner_programs:
            program = single_device_program(self.model, num_microbatches)
            for strategy in tensor:
                first, *others = strategy.lower(program, self.model).rank_programs
                program = Program((first, *(RankProgram(()) for _ in others)))
            self.inner_programs[key] = program
        return self.inner_programs[key]

    def blocks_to_recompute(self, recomputation: Recomputation) -> frozenset[int]:
        """Return the blocks that are recomputed.

        Raises:
            PlanError: no block matches.
        """
        if recomputation not in self.recomputed_blocks:
            self.recomputed_blocks[recomputation] = recomputation.select_blocks(self.model)
        return self.recomputed_blocks[recomputation]

    def cache_program(self, rank_program: RankProgram, rank: int, split: SplitBackward | None) -> CachedRankProgram:
        """Return the rank program of a rank with all that it determines; its instructions are split if given."""
        unsplit_signature = self._signature_id(rank_program, ())
        simulated, signature, costs = rank_program, unsplit_signature, tuple[CostModel, ...](self.costs)
        if split is not None:
            (simulated,) = split.variant.program.rank_programs
            signature = self._signature_id(simulated, split.slices)
            costs = tuple(split.cost_model(cost_model) for cost_model in self.costs)
        rank_key = rank if self.cluster.levels or self.cluster.slow_links or self.cluster.speeds else 0
        return CachedRankProgram(
            simulated.body, index_by_type(simulated.body), signature, rank_key, rank_program, unsplit_signature, costs
        )

    def footprint(self, cached: CachedRankProgram) -> RankFootprint:
        """Return the memory and traffic of a rank program."""
        if cached.unsplit_signature not in self.footprints:
            program = Program((cached.unsplit,))
            self.footprints[cached.unsplit_signature] = RankFootprint(
                sent_bytes(program, self.sizes)[0], peak_memory_bytes(program, self.storage_sizes)[0]
            )
        return self.footprints[cached.unsplit_signature]

    def instruction_times(self, cached: CachedRankProgram, cluster_index: int) -> InstructionTimes:
        """Return the times of a rank program's instructions on one of the clusters."""
        key = cached.signature, cached.rank, cluster_index
        if key not in self.times:
            self.times[key] = time_instructions(
                cached.instructions, cached.costs[cluster_index], rank=cached.rank, cluster=self.cluster
            )
        return self.times[key]

    def split_backward(self, rank_program: RankProgram, buckets: BucketConfig) -> SplitBackward | None:
        """Return a step in which all ranks have equal programs with split backwards; None if nothing can be split."""
        if not has_divisible_backward(self.model):
            return None
        if buckets not in self.backward_slices:
            self.backward_slices[buckets] = backward_slices(
                self.model, self.costs[0], buckets, self.samples, self.profile
            )
        return split_rank_backward(rank_program, self.backward_slices[buckets], self.cluster)

    def _signature_id(self, rank_program: RankProgram, slices: tuple[BackwardSlice, ...]) -> int:
        return self.signature_ids.setdefault(
            (self.signatures.intern(rank_program, rank_program.body), slices), len(self.signature_ids)
        )


def _is_chain(model: ModelSpec) -> bool:
    """Return whether each block sends to the next one only, and no two blocks share weights.

    Then a stage's program depends on the partition of other stages only in the names of what it sends and receives.
    """
    edges = model.edges
    chain_edges = [edge.endpoints for edge in edges if edge.grad_bytes is not None]
    return (
        len(edges) == len(chain_edges)
        and chain_edges == [(block, block + 1) for block in range(model.num_blocks - 1)]
        and all(len(unit) == 1 for unit in model.units)
    )
