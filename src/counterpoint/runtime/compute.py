"""Forwards and backwards of one rank: segments of the model with autograd cut at their ends.

A *bundle* is what is alive at a boundary between blocks. It is kept here detached, with a note which of its
tensors carry a gradient; the gradients of a bundle are kept apart from those of values that only pass by a
segment, so that the partial gradients of sliced blocks can be summed before the two are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterpoint.cutting.cut import Segment
from counterpoint.cutting.eager import tell_where
from counterpoint.errors import DataError
from counterpoint.runtime.again import Memory, Once, fresh
from counterpoint.runtime.bundles import Bundle, Grads, no_gradients
from counterpoint.runtime.direct import Directly, Place, run_backward
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.later import Desk, Job, later_places
from counterpoint.runtime.normalizing import Norms
from counterpoint.runtime.seeds import Dice, seed_of
from counterpoint.runtime.shares import Shares
from counterpoint.runtime.store import Store


@dataclass(frozen=True, slots=True)
class Model:
    """What is computed with: the cut model's functions and its two ends.

    Args:
        segments: by first block and one past the last.
        num_blocks: blocks of the whole model.
        flatten: from a feed's inputs to the first bundle.
        unflatten: from the last bundle to the model's output.
        loss: from the model's output and the targets to a scalar, the mean over the samples.
        draws: whether the model draws random numbers.
    """

    segments: Mapping[tuple[int, int], Segment]
    num_blocks: int
    flatten: Callable[[Any], tuple[Tensor, ...]]
    unflatten: Callable[[Sequence[Tensor]], Any]
    loss: Callable[[Any, Any], Tensor]
    draws: bool


class Compute:
    """The compute words of one rank.

    Args:
        model: what is computed with.
        store: the rank's parameters and buffers.
        dice: the random state.
        desk: where weight gradients are put off; None where all backwards are whole.
    """

    def __init__(self, model: Model, store: Store, dice: Dice, desk: Desk | None = None) -> None:
        self.model = model
        self.store = store
        self.dice = dice
        self.desk = desk
        self.places: Mapping[int, Place] = {}  # where gradients of weights may be written straight to
        self.put_off: dict[tuple[int, int], list[Job]] = {}
        self.feed: Feed | None = None
        self.shares = Shares({})
        self.stride = 0
        self.bundles: dict[tuple[int, int], Bundle] = {}
        self.tapes: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
        self.grads: dict[tuple[int, int], Grads] = {}
        self.passing: dict[tuple[int, int], Grads] = {}
        self.losses: dict[int, float] = {}
        self.spent: Sequence[Tensor] = ()  # the last loss: its graph, freed of tensors, is taken apart after a forward
        self.norms: Norms | None = None  # what modules of batch norm do, where a plan changes that
        self.again = Memory()  # what is computed again for its backward
        self.unused = "error"  # what a parameter without a gradient means; a commit looks
        self.by_first = {first: (stop, segment) for (first, stop), segment in model.segments.items()}
        self.by_stop = {stop: (first, segment) for (first, stop), segment in model.segments.items()}

    def between(self, first: int, last: int) -> Iterator[Segment]:
        """Yield the segments of a run of blocks."""
        block = first
        while block <= last:
            block, segment = self.by_first[block]
            yield segment

    def begin(self, feed: Feed, shares: Shares, stride: int = 0) -> None:
        """Start a step on a global batch.

        Args:
            feed: the batch, or those under way.
            shares: the part of each microbatch's mean loss in the loss that is differentiated.
            stride: in a stream, how many microbatches a batch has; what is under way then stays.
        """
        self.feed = feed
        self.shares = shares
        self.stride = stride
        self.places = self.store.landings if self.desk is None else later_places(self.store, self.desk)
        self.losses.clear()
        if self.norms is not None:
            self.norms.begin(is_stream=bool(stride))
        books_of_a_step = (self.bundles, self.tapes, self.grads, self.passing, self.put_off, self.again.kept)
        for books in books_of_a_step if not stride else ():
            books.clear()

    def is_empty(self, micro: int) -> bool:
        """Tell whether a microbatch has no samples, so that nothing is computed for it."""
        assert self.feed is not None, "a step has begun"
        return self.feed.sizes[micro] == 0

    def forward(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks ``first`` to ``last`` forward and keep what backward needs."""
        if self.is_empty(micro):
            self.keep_up(first, last, micro)
            return
        block = first
        while block <= last:
            stop, segment = self.by_first[block]
            leaves = self.entrance(block, micro).leaves()
            if self.again.covers(block, micro):
                once = Once(segment, leaves, self.store.buffers, self.again.changing.get(block))
                with once.without_tape():
                    outputs = self.apply(block, leaves, micro, version)
                self.again.keep((block, micro), once, outputs, self.place(block, stop, micro, leaves))
                if once.is_fed:
                    self.bundles.pop((block, micro), None)
            else:
                outputs = self.apply(block, leaves, micro, version)
                self.tapes[block, micro] = (leaves, outputs)
            if stop < self.model.num_blocks:
                self.bundles[stop, micro] = Bundle.of(outputs)
            block = stop
        self.keep_up(first, last, micro)

    def recompute(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks forward again from what their forward has read, for their backward."""
        block, before = first, (first, micro)
        while block <= last and not self.is_empty(micro):
            stop, _ = self.by_first[block]
            with self.again.take((block, micro)) as once:
                leaves = fresh(self.tapes[before][1] if once.is_fed else once.leaves)
                outputs = self.apply(block, leaves, micro, version, once.buffers)
                once.require_same(outputs, self.place(block, stop, micro, leaves))
            before = (block, micro)
            self.tapes[before] = (leaves, outputs)
            block = stop

    def apply(
        self,
        block: int,
        leaves: Sequence[Tensor],
        micro: int,
        version: int,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """Call one segment on leaves of autograd; return what it gives, at the end the loss."""
        if self.stride:  # microbatches are counted over all batches, and draw as each in its own
            self.dice.step, self.dice.micro = divmod(micro, self.stride)
        else:
            self.dice.micro = micro
        stop, segment = self.by_first[block]
        seed = seed_of(self.dice, draws=self.model.draws)
        try:
            with self.directly(), self.normalizing(block, micro, is_again=buffers is not None):
                outputs = segment(leaves, self.store.weights(version), buffers or self.store.buffers, seed)
        except Exception as error:
            tell_where(error, self.place(block, stop, micro, leaves))
            raise
        if stop == self.model.num_blocks:
            outputs = self.spent = (self.lose(outputs, micro),)
        return outputs

    def normalizing(self, block: int, micro: int, *, is_again: bool = False) -> AbstractContextManager[object]:
        """Have batch norm do what it does in this plan, if there is any; again, it takes in no statistics."""
        if self.norms is None:
            return nullcontext()
        assert self.feed is not None, "a step has begun"
        return self.norms.around(block, micro, self.feed.sizes, is_again=is_again)

    def keep_up(self, first: int, last: int, micro: int) -> None:
        """Bring running statistics of what replicas normalize together to those that had no samples."""
        if self.norms is not None:
            assert self.feed is not None, "a step has begun"
            names = [name for segment in self.between(first, last) for name in segment.buffers]
            self.norms.keep_up(names, first, micro, self.feed.sizes)

    def place(self, block: int, stop: int, micro: int, values: Sequence[Tensor]) -> str:
        """Return which blocks run on which samples, as text for errors."""
        assert self.feed is not None, "a step has begun"
        blocks = f"block {block}" if stop == block + 1 else f"blocks {block} to {stop - 1}"
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        return (
            f"{blocks} of {self.model.num_blocks} on microbatch {micro} of step {self.dice.step}, which has "
            f"{self.feed.sizes[micro]} of the batch's {sum(self.feed.sizes.values())} samples, with inputs of the "
            f"shapes {shapes}"
        )

    def entrance(self, block: int, micro: int) -> Bundle:
        """Return the bundle before a block; that of the first block is read from the feed."""
        if block > 0:
            return self.bundles[block, micro]
        assert self.feed is not None, "a step has begun"
        values = self.model.flatten(self.feed.inputs(micro))
        return Bundle(values, (False,) * len(values))

    def lose(self, outputs: Sequence[Tensor], micro: int) -> Tensor:
        """Return the microbatch's part of the step's loss, and note its mean loss."""
        assert self.feed is not None, "a step has begun"
        loss: Any = self.model.loss(self.model.unflatten(outputs), self.feed.targets(micro))
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise DataError(
                f"the loss of microbatch {micro} {found}; it must be a tensor of one number, the mean over the "
                "samples: leave reduction='mean', and return it before item() or float()"
            )
        self.losses[micro] = float(loss.detach())
        weight = self.shares.weights[micro]
        weighted: Tensor = loss * weight if weight != 1.0 else loss
        return weighted

    def backward(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks ``last`` down to ``first`` backward; gradients are added to the parameters'."""
        if self.is_empty(micro):
            return
        stop = last + 1
        while stop > first:
            block, _ = self.by_stop[stop]
            leaves, outputs = self.tapes.pop((block, micro))
            if stop == self.model.num_blocks:
                roots, gradients, passed = list(outputs), no_gradients(1), no_gradients(len(leaves))
            else:
                roots, gradients, passed = self.roots(leaves, outputs, self.taken(stop, micro))
            if any(root.requires_grad for root in roots):
                with self.normalizing(block, micro, is_again=True):  # as where the model checkpoints
                    self.learn(roots, gradients)
                self.store.hand_over(version)
            self.grads[block, micro] = [leaf.grad if leaf.requires_grad else None for leaf in leaves]
            self.passing[block, micro] = passed
            self.bundles.pop((block, micro), None)
            stop = block

    def backward_input(self, first: int, last: int, micro: int) -> None:
        """Run blocks backward as :meth:`backward` does, but put off what only makes gradients of weights."""
        assert self.desk is not None, "a row with parts of backwards has one"
        for start, stop in self.segments_between(first, last):
            with self.desk.noting() as jobs:
                self.backward(start, stop - 1, micro)
            self.put_off[start, micro] = jobs

    def backward_weight(self, first: int, last: int, micro: int) -> None:
        """Make the gradients of weights that blocks have put off."""
        with torch.no_grad():
            for start, _ in self.segments_between(first, last):
                for job in self.put_off.pop((start, micro)):
                    job()

    def segments_between(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the first block and one past the last of each segment of a run, the last segment first."""
        stop = last + 1
        while stop > first:
            start, _ = self.by_stop[stop]
            yield start, stop
            stop = start

    def directly(self) -> AbstractContextManager[object]:
        """Have gradients of weights written straight to where they belong, if there is such a place."""
        return Directly(self.places) if self.places else nullcontext()

    def learn(self, roots: Sequence[Tensor], gradients: Grads) -> None:
        """Run autograd; gradients are added to the parameters'."""
        self.store.is_learning = True
        try:
            if self.places or self.norms is not None:
                with self.directly():
                    run_backward(roots, gradients)
            else:
                torch.autograd.backward(roots, gradients)
        finally:
            self.store.is_learning = False

    def roots(
        self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Grads
    ) -> tuple[list[Tensor], Grads, Grads]:
        """Split a bundle's gradients into those of the segment's own outputs and those that pass by it."""
        position = {id(leaf): index for index, leaf in enumerate(leaves)}
        roots: list[Tensor] = []
        used: Grads = []
        passed = no_gradients(len(leaves))
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is None or not output.requires_grad:
                continue
            if id(output) in position:
                index = position[id(output)]
                before = passed[index]
                passed[index] = gradient if before is None else before + gradient
            else:
                roots.append(output)
                used.append(gradient)
        return roots, used, passed

    def taken(self, block: int, micro: int) -> Grads:
        """Return the gradients of the bundle before a block, complete, and forget them."""
        own = self.grads.pop((block, micro))
        passed = self.passing.pop((block, micro), no_gradients(len(own)))
        return [a if b is None else b if a is None else a + b for a, b in zip(own, passed, strict=True)]

    def loss_behind(self, micro: int) -> list[Tensor]:
        """Return what goes with a gradient to the stage before: in a stream the loss, which all stages decide by."""
        return [torch.tensor(self.losses[micro], dtype=torch.float64)] if self.stride else []

    def take_loss(self, micro: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Note the loss that came with a gradient; return the gradient, as a part of what is decided on here."""
        if not self.stride:
            return tensors
        self.losses[micro] = float(tensors[0])
        ratio = self.shares.ratios.get(micro, 1.0)
        return [tensor * ratio for tensor in tensors[1:]] if ratio != 1.0 else tensors[1:]

    def partial_output(self, block: int, micro: int) -> Tensor | None:
        """Return the partial output of a sliced block, to be summed in place; None when there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_stop[block + 1]
        bundle = self.bundles[block + 1, micro]
        index = segment.outputs.index(segment.partial_outputs[0])
        fresh = bundle.values[index].clone(memory_format=torch.contiguous_format)
        bundle.values = (*bundle.values[:index], fresh, *bundle.values[index + 1 :])
        return fresh

    def partial_gradient(self, block: int, micro: int) -> Tensor | None:
        """Return the partial input gradient of a sliced block, to be summed in place; None when there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_first[block]
        index = segment.inputs.index(segment.partial_inputs[0])
        gradients = self.grads[block, micro]
        gradient = gradients[index]
        if gradient is None:
            return None
        gradients[index] = gradient.contiguous()
        return gradients[index]
