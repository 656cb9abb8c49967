"""Costs from a measured profile: seconds of computing per layer instead of operation counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.model.model_profile import LayerProfile, ModelProfile, Overheads
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Compute,
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.memory_traffic import ADD_PASSES
from counterpoint.simulator.network import CommInstruction, P2PInstruction


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of a profiled model; communication is costed by another cost model.

    Args:
        blocks: times of each block of the program for one microbatch.
        overheads: fixed cost of calls and steps.
        update_s_per_byte: seconds of an update per byte of parameters, or of their master weights.
        grad_accumulate_s_per_byte: seconds of adding one gradient to another, per byte.
        batch_norm_merge_s: for each block, the time to merge the batch-norm statistics of all microbatches.
        size_of: bytes of a whole tensor on one rank.
        link_costs: costs of communication of the same model on the same cluster.
    """

    blocks: tuple[LayerProfile, ...]
    overheads: Overheads
    update_s_per_byte: float
    grad_accumulate_s_per_byte: float
    batch_norm_merge_s: tuple[float, ...]
    size_of: SizeFn
    link_costs: CostModel

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the seconds of a block's layers, or of an update by its bytes with what precedes it."""
        match instruction:
            case Forward(block) | Recompute(block):
                return self.blocks[block].forward_s
            case Backward(block, part="input"):
                return self.blocks[block].backward_input_s
            case Backward(block, part="weight"):
                return self.blocks[block].backward_weight_s
            case Backward(block):
                return self.blocks[block].backward_s
            case Update(unit):
                return self._update_s(unit) * float(fraction) + (
                    self.batch_norm_merge_s[unit[0]] if len(unit) == 1 else 0.0
                )

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return the fixed cost of a call.

        An update includes the fixed cost of the step; on a rank without updates the commit does, with all merges.
        """
        match instruction:
            case Forward() | Recompute():
                return self.overheads.forward_s
            case Backward():
                return self.overheads.backward_s
            case Update():
                return self.overheads.update_s + self.overheads.step_s
            case Commit():
                return self.overheads.step_s + sum(self.batch_norm_merge_s)
            case Collective() | Send() | Recv() | Push() | Pull() | ApplyPushes() | Free() | SwapGradBuffers():
                return 0.0
            case Fetch() | Offload():
                return 0.0

    def grad_accumulate_s(self, block: int) -> float:
        """Return the measured time, which is negative where writing a new gradient is slower than adding to one."""
        return self.blocks[block].accumulate_s

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the value of ``link_costs``."""
        return self.link_costs.link_s(instruction, fraction, rank)

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the value of ``link_costs``."""
        return self.link_costs.shared_link_s(instruction, fraction, rank)

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return the value of ``link_costs``."""
        return self.link_costs.cpu_s(instruction, fraction, rank, shares_memory=shares_memory)

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return the value of ``link_costs``."""
        return self.link_costs.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return the fraction of the measured accumulation time per byte that is one pass."""
        return (
            0.0
            if isinstance(instruction, Commit)
            else self.grad_accumulate_s_per_byte * self.size_of(instruction.tensor) / ADD_PASSES
        )

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return the value of ``link_costs``."""
        return self.link_costs.offload_s(instruction, fraction)

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an update by its bytes plus its fixed cost, and the reply by ``link_costs``."""
        return self._update_s(unit) + self.overheads.update_s, self.link_costs.server_update_s(unit, server, worker)[1]

    def _update_s(self, unit: Unit) -> float:
        return self.update_s_per_byte * self.size_of(TensorRef("master_weight", unit))


def measured_costs(
    model: ModelSpec,
    profile: ModelProfile,
    link_costs: CostModel,
    size_of: SizeFn,
    *,
    samples_per_microbatch: int,
    global_num_microbatches: int,
) -> CostModel:
    """Return the costs of a profiled model.

    Args:
        model: the model with the blocks that the program names.
        profile: times of its layers.
        link_costs: costs of communication of the same model on the same cluster.
        size_of: bytes of a whole tensor on one rank.
        samples_per_microbatch: samples in one microbatch.
        global_num_microbatches: microbatches of a step, of all ranks.
    """
    layer_times, overheads = profile.at_microbatch_size(samples_per_microbatch), profile.overheads
    merge_s = 0.0
    if layer_times.single_microbatch is not None:
        merge_s = (
            0.0 if global_num_microbatches == 1 else max(0.0, overheads.step_s - overheads.single_microbatch_step_s)
        )
        layer_times, overheads = (
            layer_times.for_single_microbatch() if global_num_microbatches == 1 else layer_times,
            replace(overheads, step_s=overheads.single_microbatch_step_s),
        )
    blocks = tuple(layer_times.block_time(block) for block in model.blocks)
    num_params = [len(block.params) for block in model.blocks]
    block_merge_s = tuple(merge_s * count / (sum(num_params) or 1) for count in num_params)
    return MeasuredCosts(
        blocks, overheads, profile.update_s_per_byte, profile.add_s_per_byte, block_merge_s, size_of, link_costs
    )
