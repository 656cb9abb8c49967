"""The same training as a plain torch loop: the reference for single-process training, and through it for every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.sampler import split_batch
from counterpoint.program.instruction import Forward
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.rng.draw_sites import find_draw_sites
from counterpoint.runtime.rng.sample_rng import SampleRange, SampleRNG
from counterpoint.testing.parity_models import ParityModel, TrainConfig

BufferIncrements = list[dict[int, dict[str, Tensor]]]
"""By step and microbatch, the increment of every running statistic."""


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Result of the loop.

    Args:
        losses: of every step.
        params: the trained parameters.
        initial_buffers: before the first step.
        buffer_increments: by step and microbatch: ``after = 0.9 before + increment``.
    """

    losses: tuple[float, ...]
    params: dict[str, Tensor]
    initial_buffers: dict[str, Tensor]
    buffer_increments: BufferIncrements


def train_reference(parity_model: ParityModel, config: TrainConfig) -> ReferenceRun:
    """Train a model in a plain loop: accumulate over microbatches, clip, step."""
    model = parity_model.build()
    optimizer = config.optimizer(model.parameters())
    rng = SampleRNG(0, sites=find_draw_sites(model, parity_model.batches[0][0]))
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(partial(_begin_call, rng, path))
    initial_buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: list[float] = []
    increments: BufferIncrements = []
    for step, (inputs, targets) in enumerate(parity_model.batches):
        loss_sum = 0.0
        increments.append({})
        for micro, (start, stop) in enumerate(split_batch(len(inputs), config.num_microbatches)):
            if start == stop:
                continue
            for buffer in model.buffers():
                buffer.zero_()
            rng.begin_microbatch(step, micro, SampleRange(start, stop - start, len(inputs)))
            with InterceptFunctions(rng.functions):
                output = model(inputs[start:stop])
            loss = parity_model.loss(output, targets[start:stop]) * ((stop - start) / len(inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            increments[-1][micro] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return ReferenceRun(
        tuple(losses), {name: param.detach() for name, param in model.named_parameters()}, initial_buffers, increments
    )


def _begin_call(rng: SampleRNG, path: str, _module: nn.Module, _inputs: object) -> None:
    rng(path)


def expected_buffers(reference: ReferenceRun, compiled: CompiledPlan) -> dict[str, Tensor]:
    """Return the buffers that a plan must end with: running statistics are averaged over the replicas.

    A replica's moving average includes only its own microbatches. The mean is weighted by the number of microbatches of
    each replica per step. A counter is that of the first replica with the most microbatches.
    """
    expected = {}
    for name, initial in reference.initial_buffers.items():
        replicas = _microbatches_by_replica(compiled, name.rpartition(".")[0])
        values = [
            _moving_average(reference.buffer_increments, name, initial, microbatches) for microbatches in replicas
        ]
        if initial.is_floating_point():
            total = sum(
                (len(microbatches) * value for microbatches, value in zip(replicas, values, strict=True)), initial * 0
            )
            expected[name] = total / sum(map(len, replicas))
        else:
            expected[name] = values[max(range(len(values)), key=lambda index: len(replicas[index]))]
    return expected


def _microbatches_by_replica(compiled: CompiledPlan, module: str) -> list[Sequence[int]]:
    """Return, for every rank that runs a module, its microbatches in order."""
    blocks = {
        index
        for index, block in enumerate(compiled.model.blocks)
        if any(name.rpartition(".")[0] == module for name in block.params)
    }
    by_rank = (
        tuple(
            instruction.micro
            for instruction in rank_program.body
            if isinstance(instruction, Forward) and instruction.block in blocks
        )
        for rank_program in compiled.step_variants[-1].program.rank_programs
    )
    return [microbatches for microbatches in by_rank if microbatches]


def _moving_average(
    increments: Sequence[Mapping[int, Mapping[str, Tensor]]], name: str, initial: Tensor, microbatches: Sequence[int]
) -> Tensor:
    """Return a buffer after all steps of a replica with these microbatches; empty ones have no effect."""
    value = initial.clone()
    for step in increments:
        for microbatch in microbatches:
            if microbatch in step:
                value = (
                    0.9 * value + step[microbatch][name]
                    if value.is_floating_point()
                    else value + step[microbatch][name]
                )
    return value
