"""What instructions cost by the clock: seconds of computing that were measured, piece by piece, instead of counted."""

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
    Forward,
    Free,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
    weight,
)
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.memory_traffic import ADD_PASSES
from counterpoint.simulator.network import CommInstruction, P2PInstruction


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of a model that was timed; what goes over links costs what it does by other costs.

    Args:
        blocks: what each block takes for a microbatch, as the program names them.
        fixed: what calls cost beside that.
        update_s_per_byte: of parameters.
        add_s_per_byte: of gradients, to add them to others.
        merges: of each block, what it takes to put together what batch norm has seen of all microbatches.
        size_of: bytes of a whole value on one rank.
        others: costs of the same model on the same cluster, for links.
    """

    blocks: tuple[LayerProfile, ...]
    overheads: Overheads
    update_s_per_byte: float
    grad_accumulate_s_per_byte: float
    batch_norm_merge_s: tuple[float, ...]
    size_of: SizeFn
    link_costs: CostModel

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the seconds of a block's pieces, or of an update by its bytes, and what goes before it."""
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
        """Return the fixed seconds of a call.

        That of an update has those of the whole step; of a rank that updates nothing, its commit has them, and merges.
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

    def grad_accumulate_s(self, block: int) -> float:
        """Return what was measured: less than nothing where to write a gradient anew takes longer."""
        return self.blocks[block].accumulate_s

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return what it costs by the other costs."""
        return self.link_costs.link_s(instruction, fraction, rank)

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return what it costs by the other costs."""
        return self.link_costs.shared_link_s(instruction, fraction, rank)

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return what it costs by the other costs."""
        return self.link_costs.cpu_s(instruction, fraction, rank, shares_memory=shares_memory)

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell what the other costs say."""
        return self.link_costs.is_streamed(instruction, rank)

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return a part of what it takes to add a gradient of so many bytes to another one."""
        return (
            0.0
            if isinstance(instruction, Commit)
            else self.grad_accumulate_s_per_byte * self.size_of(instruction.tensor) / ADD_PASSES
        )

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an update by its bytes and its fixed cost, and the answer by the other costs."""
        return self._update_s(unit) + self.overheads.update_s, self.link_costs.server_update_s(unit, server, worker)[1]

    def _update_s(self, unit: Unit) -> float:
        return self.update_s_per_byte * self.size_of(weight(unit))


def measured_costs(
    model: ModelSpec,
    profile: ModelProfile,
    link_costs: CostModel,
    size_of: SizeFn,
    *,
    samples_per_microbatch: int,
    global_num_microbatches: int,
) -> CostModel:
    """Return the costs of a model that was timed.

    Args:
        model: the model with the blocks that the program names.
        timing: of its pieces.
        others: costs of the same model on the same cluster, for links.
        size_of: bytes of a whole value on one rank.
        samples_per_micro: samples in one microbatch.
        num_micros: microbatches of a step, of all ranks.
    """
    point, fixed = profile.at_microbatch_size(samples_per_microbatch), profile.overheads
    merging_s = 0.0
    if point.single_microbatch is not None:
        merging_s = 0.0 if global_num_microbatches == 1 else max(0.0, fixed.step_s - fixed.single_microbatch_step_s)
        point, fixed = (
            point.for_single_microbatch() if global_num_microbatches == 1 else point,
            replace(fixed, step_s=fixed.single_microbatch_step_s),
        )
    blocks = tuple(point.block_time(block) for block in model.blocks)
    counts = [len(block.params) for block in model.blocks]
    merges = tuple(merging_s * count / (sum(counts) or 1) for count in counts)
    return MeasuredCosts(blocks, fixed, profile.update_s_per_byte, profile.add_s_per_byte, merges, size_of, link_costs)
