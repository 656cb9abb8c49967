"""What a model would take, without running it: its operations on tensors without values, and the roof of a device.

An operation takes as long as its arithmetic or as the memory that it reads and writes, whichever is longer. What calls
cost, what caches save, and how far kernels stay below the roof is not in it.

Source:
    Williams, Waterman and Patterson, Roofline: an insightful visual performance model, CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from counterpoint.cutting.cost import Kernel, Meter
from counterpoint.cutting.seeds import silent
from counterpoint.model.timing import NOTHING, Machine, PieceTime, Point, Timing, known_pieces, known_weights
from counterpoint.profiler.subject import Subject, storages
from counterpoint.runtime.build import call_form
from counterpoint.simulator.costs import ADAM_PASSES
from counterpoint.simulator.moves import ADD_PASSES
from counterpoint.world.cluster import Device

MATRIX = 2
"""Dims of a parameter whose gradient is a product."""


def count(subject: Subject, name: str, device: Device, *, samples: Sequence[int]) -> Timing:
    """Return how long the pieces of a model would take at the roof of a device; nothing is computed.

    Args:
        subject: what is counted.
        name: of the device.
        device: its arithmetic and its memory.
        samples: sizes of microbatches.
    """
    return Timing(
        model=type(subject.model).__name__,
        pieces=known_pieces(subject.spec),
        weights=known_weights(subject.spec),
        machine=Machine(name, 1, subject.face.kind.__name__, is_measured=False),
        points=tuple(_point(subject, device, size) for size in sorted(set(samples))),
        update_s_per_byte=ADAM_PASSES / device.memory_bytes_per_s,
        add_s_per_byte=ADD_PASSES / device.memory_bytes_per_s,
    )


def seconds_at_roof(kernels: Sequence[Kernel], device: Device) -> float:
    """Return how long kernels take one after the other.

    Example:
        >>> seconds_at_roof([Kernel(60, 10), Kernel(0, 20)], Device(cost_per_s=10.0, memory_bytes_per_s=5.0))
        10.0
    """
    return sum(max(one.flops / device.cost_per_s, one.moved_bytes / device.memory_bytes_per_s) for one in kernels)


class Shadow:
    """A model without values, run piece by piece.

    Args:
        subject: the model.
        device: at whose roof.
        samples: in its microbatch.
    """

    def __init__(self, subject: Subject, device: Device, samples: int) -> None:
        self.subject, self.device, self.samples = subject, device, samples
        feed = subject.feed(samples, 1)
        self.inputs = subject.cut.flatten_inputs(call_form(feed.inputs(0)))
        pieces = range(len(subject.spec.pieces))
        self.segments = [subject.cut.segment(at, at + 1, training=True) for at in pieces]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.params = {name: self.mode.from_tensor(param) for name, param in subject.model.named_parameters()}
        self.buffers = {name: self.mode.from_tensor(buffer) for name, buffer in subject.model.named_buffers()}
        self.values: dict[int, Tensor] = {at: self.mode.from_tensor(value) for at, value in enumerate(self.inputs)}
        self.targets = tree_map_only(Tensor, self.mode.from_tensor, feed.targets(0))
        self.seen = storages([self.params, self.buffers, self.values, self.targets])

    def piece(self, at: int) -> PieceTime:
        """Run a piece forward and backward; those before it have been run."""
        segment, fresh = self.segments[at], dict[int, int]()
        leaves = [
            self.values[place].detach().requires_grad_(self.values[place].requires_grad) for place in segment.inputs
        ]

        def note(tensor: Tensor) -> Tensor:
            fresh.update(storages(tensor))
            return tensor

        with self.mode, torch.autograd.graph.saved_tensors_hooks(note, _same), Meter() as forward:
            outputs = segment(leaves, self.params, self.buffers, silent)
            if not segment.outputs:
                outputs = (self.subject.loss(self.subject.cut.unflatten_output(outputs), self.targets),)
        self.values.update(zip(segment.outputs, outputs, strict=bool(segment.outputs)))
        fresh.update(storages(outputs if segment.outputs else ()))
        kept = sum(size for address, size in fresh.items() if address not in self.seen)
        self.seen.update(fresh)
        made = self.samples * self.subject.spec.pieces[at].output_bytes
        forward_s = seconds_at_roof(forward.kernels, self.device)
        backward = self.backward(outputs, leaves, segment.params)
        return PieceTime(forward_s, *backward, float(made), float(kept), self.added_s(segment.params))

    def added_s(self, names: Sequence[str]) -> float:
        """Return the seconds of adding gradients to earlier ones; products add those of matrices."""
        own = [self.params[name] for name in names if self.params[name].requires_grad]
        num_bytes = sum(param.nbytes for param in own if param.dim() != MATRIX)
        return ADD_PASSES * num_bytes / self.device.memory_bytes_per_s

    def backward(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], names: Sequence[str]
    ) -> tuple[float, float, float]:
        """Return the seconds of a backward, of its part for inputs, and of the rest."""
        roots = [output for output in outputs if output.requires_grad]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        weights = [self.params[name] for name in names if self.params[name].requires_grad]
        whole_s, input_s = (self.differentiate(roots, wanted) for wanted in ([*inputs, *weights], inputs))
        return whole_s, input_s, max(whole_s - input_s, 0.0)

    def differentiate(self, roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
        """Return the seconds of making gradients."""
        if not roots or not wanted:
            return 0.0
        with self.mode:
            above = [torch.ones_like(root) for root in roots]
            with Meter() as meter:
                torch.autograd.grad(roots, wanted, above, retain_graph=True, allow_unused=True)
        return seconds_at_roof(meter.kernels, self.device)


def _point(subject: Subject, device: Device, samples: int) -> Point:
    shadow = Shadow(subject, device, samples)
    pieces = tuple(shadow.piece(at) for at in range(len(subject.spec.pieces)))
    total = NOTHING
    for piece in pieces:
        total = total.plus(piece)
    return Point(samples, pieces, total)


def _same(tensor: Tensor) -> Tensor:
    return tensor
