"""The same training as a plain torch loop: what the solo run, and through it every plan, must equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.data.sampler import split_batch
from counterpoint.program.instruction import Forward
from counterpoint.runtime.rng import ModuleRNG
from counterpoint.testing.parity_models import ParityModel, TrainConfig

BufferIncrements = list[dict[int, dict[str, Tensor]]]
"""For each step and microbatch what it adds to every running statistic."""


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """What came of the loop.

    Args:
        losses: of every step.
        params: the trained parameters.
        first: the buffers before the first step.
        added: for each step and microbatch what it adds to the buffers: ``after = 0.9 before + added``.
    """

    losses: tuple[float, ...]
    params: dict[str, Tensor]
    initial_buffers: dict[str, Tensor]
    buffer_increments: BufferIncrements


def train_reference(parity_model: ParityModel, config: TrainConfig) -> ReferenceRun:
    """Return the model trained in a loop as anybody would write it: accumulate over microbatches, clip, step."""
    model = parity_model.build()
    optimizer = config.optimizer(model.parameters())
    dice = ModuleRNG(0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(partial(_seed_module, dice, path))
    first = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: list[float] = []
    added: BufferIncrements = []
    for dice.step, (inputs, targets) in enumerate(parity_model.batches):
        loss_sum = 0.0
        added.append({})
        for dice.micro, (start, stop) in enumerate(split_batch(len(inputs), config.num_microbatches)):
            if start == stop:
                continue
            for buffer in model.buffers():
                buffer.zero_()
            loss = parity_model.loss(model(inputs[start:stop]), targets[start:stop]) * ((stop - start) / len(inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            added[-1][dice.micro] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return ReferenceRun(tuple(losses), {name: param.detach() for name, param in model.named_parameters()}, first, added)


def _seed_module(dice: ModuleRNG, path: str, _module: nn.Module, _inputs: object) -> None:
    dice(path)


def expected_buffers(reference: ReferenceRun, compiled: CompiledPlan) -> dict[str, Tensor]:
    """Return the buffers a plan must end with: running statistics are the mean over the replicas of each one's own.

    A replica's moving average sees only that replica's microbatches. The mean is weighted by how many microbatches
    each replica runs in a step. A counter is that of the first replica with the most microbatches.
    """
    expected = {}
    for name, first in reference.initial_buffers.items():
        replicas = _microbatches_by_replica(compiled, name.rpartition(".")[0])
        own = [_moving_average(reference.buffer_increments, name, first, micros) for micros in replicas]
        if first.is_floating_point():
            total = sum((len(micros) * value for micros, value in zip(replicas, own, strict=True)), first * 0)
            expected[name] = total / sum(map(len, replicas))
        else:
            expected[name] = own[max(range(len(own)), key=lambda index: len(replicas[index]))]
    return expected


def _microbatches_by_replica(compiled: CompiledPlan, module: str) -> list[Sequence[int]]:
    """Return for every rank that runs a module which microbatches it runs, in order."""
    inside = {
        index
        for index, block in enumerate(compiled.model.blocks)
        if any(name.rpartition(".")[0] == module for name in block.params)
    }
    rows = (
        tuple(word.micro for word in row.body if isinstance(word, Forward) and word.block in inside)
        for row in compiled.step_variants[-1].program.rank_programs
    )
    return [micros for micros in rows if micros]


def _moving_average(
    increments: Sequence[Mapping[int, Mapping[str, Tensor]]], name: str, initial: Tensor, micros: Sequence[int]
) -> Tensor:
    """Return a buffer after all steps on a replica with these microbatches; empty ones change nothing."""
    value = initial.clone()
    for step in increments:
        for micro in micros:
            if micro in step:
                value = 0.9 * value + step[micro][name] if value.is_floating_point() else value + step[micro][name]
    return value
