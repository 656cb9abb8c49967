"""Forwards and backwards of one rank: segments of the model with autograd cut at their ends.

Values that segments make for each other are kept here one by one, detached, with a note whether a gradient can come
back for them. What their readers add to a gradient is added up as it comes, from this rank's segments and from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from counterpoint.cutting.cut import Segment
from counterpoint.cutting.eager import tell_where
from counterpoint.errors import DataError
from counterpoint.runtime.again import Memory, Once
from counterpoint.runtime.casting import under
from counterpoint.runtime.direct import Directly, Ways, run_backward
from counterpoint.runtime.entropy import Briefly
from counterpoint.runtime.feed import Feed, Window
from counterpoint.runtime.later import Desk, Job, ways_of
from counterpoint.runtime.model import Kept, Model, spent_by
from counterpoint.runtime.normalizing import Norms
from counterpoint.runtime.seeds import Dice, seed_of
from counterpoint.runtime.shares import Shares
from counterpoint.runtime.store import Store
from counterpoint.runtime.watching import Watching

Grads = list["Tensor | None"]


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
        self.ways = Ways()
        self.put_off: dict[tuple[int, int], list[Job]] = {}
        self.feed: Feed | None = None
        self.shares = Shares({})
        self.stride = 0
        self.values: dict[tuple[int, int], Kept] = {}  # by value and microbatch
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.tapes: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
        self.losses: dict[int, float] = {}
        self.spent: Sequence[Tensor] = ()  # the last loss: its graph, freed of tensors, is taken apart after a forward
        self.norms: Norms | None = None  # what modules of batch norm do, where a plan changes that
        self.again = Memory()  # what is computed again for its backward
        self.unused = "error"  # what a parameter without a gradient means; a commit looks
        self.by_first = {first: (stop, segment) for (first, stop), segment in model.segments.items()}
        self.by_stop = {stop: (first, segment) for (first, stop), segment in model.segments.items()}
        self.spent_by = spent_by(model.segments)

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
        self.ways = ways_of(self.store, self.desk)
        self.losses.clear()
        if self.norms is not None:
            self.norms.begin(is_stream=bool(stride))
        if not stride:
            self.drop_values()

    def drop_values(self) -> None:
        """Forget what forwards have made."""
        for books in (self.values, self.gradients, self.tapes, self.put_off, self.again.kept):
            books.clear()

    def drop(self) -> None:
        """Forget all that is under way."""
        self.drop_values()
        self.spent = ()
        if self.norms is not None:
            self.norms.drop()

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
            leaves = self.leaves(segment, micro)
            if self.again.covers(block, micro):
                once = Once(segment, leaves, self.store.buffers, self.again.changing.get(block))
                with once.without_tape():
                    outputs = self.apply(block, leaves, micro, version)
                self.again.keep((block, micro), once, outputs, self.place(block, stop, micro, leaves))
                if self.again.is_fed(block, micro):
                    self.forget(once, self.model.strands.get((block - 1, block), ()), micro)
            else:
                outputs = self.apply(block, leaves, micro, version)
                self.tapes[block, micro] = (leaves, outputs)
            if stop < self.model.num_blocks:
                for at, output in zip(segment.outputs, outputs, strict=True):
                    self.values[at, micro] = Kept(output.detach(), output.requires_grad)
            block = stop
        self.keep_up(first, last, micro)

    def forget(self, once: Once, fed: Sequence[int], micro: int) -> None:
        """Keep nothing of what the recomputation of the block before makes again, which only this block reads."""
        once.forget(fed)
        for at in fed:
            self.values.pop((at, micro), None)

    def recompute(self, first: int, last: int, micro: int, version: int = 0) -> None:
        """Run blocks forward again from what their forward has read, for their backward."""
        block = first
        made: dict[int, Tensor] = {}
        while block <= last and not self.is_empty(micro):
            stop, segment = self.by_first[block]
            with self.again.take((block, micro)) as once:
                leaves = once.fresh_leaves(made)
                outputs = self.apply(block, leaves, micro, version, once.buffers)
                once.require_same(outputs, self.place(block, stop, micro, leaves))
            self.tapes[block, micro] = (leaves, outputs)
            made = dict(zip(segment.outputs, outputs, strict=stop < self.model.num_blocks))
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
        self.dice.step, self.dice.micro = self.of_batch(micro)
        stop, segment = self.by_first[block]
        seed = seed_of(self.dice, draws=self.model.draws)
        try:
            with self.casting(micro), self.watching(block, micro, is_again=buffers is not None):
                outputs = segment(leaves, self.store.weights(version), buffers or self.store.buffers, seed)
        except Exception as error:
            tell_where(error, self.place(block, stop, micro, leaves))
            raise
        if stop == self.model.num_blocks:
            with self.casting(micro), Briefly():
                outputs = self.spent = (self.lose(outputs, micro),)
        return outputs

    def of_batch(self, micro: int) -> tuple[int, int]:
        """Return the step of a microbatch, and which of that it is; a stream counts those of all batches."""
        return divmod(micro, self.stride) if self.stride else (self.dice.step, micro)

    def casting(self, micro: int) -> AbstractContextManager[object]:
        """Have the autocasts of the call that brought a microbatch, also where a later one comes to it."""
        return under(self.feed.casts(micro)) if isinstance(self.feed, Window) else nullcontext()

    def watching(self, block: int, micro: int, *, is_again: bool = False) -> AbstractContextManager[object]:
        """Have gradients of weights written straight to where they belong, if there is such a place.

        Batch norm does what it does in this plan, if there is any; again, it takes in no statistics.
        """
        assert self.feed is not None, "a step has begun"
        normal = self.norms.instead(block, micro, self.feed.sizes, is_again=is_again) if self.norms is not None else {}
        if any(self.ways):
            return Directly(self.ways, normal)
        return Watching(normal) if normal else nullcontext()

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
        step, number = self.of_batch(micro)
        count = sum(size for other, size in self.feed.sizes.items() if self.of_batch(other)[0] == step)
        return (
            f"{blocks} of {self.model.num_blocks} on microbatch {number} of step {step}, which has "
            f"{self.feed.sizes[micro]} of the batch's {count} samples, with inputs of the shapes {shapes}"
        )

    def leaves(self, segment: Segment, micro: int) -> list[Tensor]:
        """Return what a segment takes, each to be differentiated by itself; the model's inputs are read from the feed.

        The model's inputs come first, and there is no gradient of them.
        """
        count = sum(at < self.model.num_inputs for at in segment.inputs)
        taken: list[Tensor] = []
        if count:
            assert self.feed is not None, "a step has begun"
            inputs = self.model.flatten(self.feed.inputs(micro))
            taken = [inputs[at] for at in segment.inputs[:count]]
        for value, carries in (self.values[at, micro] for at in segment.inputs[count:]):
            taken.append(value.detach().requires_grad_() if carries else value)
        return taken

    def lose(self, outputs: Sequence[Tensor], micro: int) -> Tensor:
        """Return the microbatch's part of the step's loss, and note its mean loss."""
        assert self.feed is not None, "a step has begun"
        loss: Any = self.model.loss(self.model.unflatten(outputs), self.feed.targets(micro))
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            found = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise DataError(
                f"the loss of microbatch {self.of_batch(micro)[1]} {found}; it must be a tensor of one number, the "
                "mean over the samples: leave reduction='mean', and return it before item() or float()"
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
            block, segment = self.by_stop[stop]
            leaves, outputs = self.tapes.pop((block, micro))
            roots, gradients = self.roots(segment, outputs, micro)
            if any(root.requires_grad for root in roots):
                with self.casting(micro), self.watching(block, micro, is_again=True):  # as where it checkpoints
                    self.learn(roots, gradients)
                self.store.hand_over(version)
            for at, leaf in zip(segment.inputs, leaves, strict=True):
                if leaf.grad is not None and at >= self.model.num_inputs:
                    self.add_gradient(at, micro, leaf.grad)
            for at in (*segment.outputs, *self.spent_by[block]):
                self.values.pop((at, micro), None)
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

    def learn(self, roots: Sequence[Tensor], gradients: Grads) -> None:
        """Run autograd; gradients are added to the parameters'."""
        self.store.is_learning = True
        try:
            if any(self.ways) or self.norms is not None:
                run_backward(roots, gradients)
            else:
                torch.autograd.backward(roots, gradients)
        finally:
            self.store.is_learning = False

    def roots(self, segment: Segment, outputs: Sequence[Tensor], micro: int) -> tuple[list[Tensor], Grads]:
        """Return what autograd starts from, with the gradients that have come for it, which are forgotten here."""
        if not segment.outputs:  # the model's last one: its output has become the loss, or a block that nobody reads
            return list(outputs), [None] * len(outputs)
        roots: list[Tensor] = []
        gradients: Grads = []
        for at, output in zip(segment.outputs, outputs, strict=True):
            gradient = self.gradients.pop((at, micro), None)
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient)
        return roots, gradients

    def add_gradient(self, at: int, micro: int, gradient: Tensor) -> None:
        """Add what a reader of a value contributes to its gradient."""
        before = self.gradients.get((at, micro))
        self.gradients[at, micro] = gradient if before is None else before + gradient

    def loss_behind(self, micro: int) -> list[Tensor]:
        """Return what goes with a gradient to the stage before: in a stream the loss, which all stages decide by."""
        return [torch.tensor(self.losses[micro], dtype=torch.float64)] if self.stride else []

    def take_loss(self, micro: int, peer: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Note the loss that came with a gradient; return the gradient, as a part of what is decided on here."""
        if not self.stride:
            return tensors
        self.losses[micro] = float(tensors[0])
        ratio = self.shares.ratios.get((micro, peer), 1.0)
        return [tensor * ratio for tensor in tensors[1:]] if ratio != 1.0 else tensors[1:]

    def partial_output(self, block: int, micro: int) -> Tensor | None:
        """Return the partial output of a sliced block, to be summed in place; None when there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_stop[block + 1]
        (at,) = segment.partial_outputs
        kept = self.values[at, micro]
        fresh = kept.value.clone(memory_format=torch.contiguous_format)
        self.values[at, micro] = Kept(fresh, kept.carries)
        return fresh

    def partial_gradient(self, block: int, micro: int) -> Tensor | None:
        """Return the partial input gradient of a sliced block, to be summed in place; None when there is none."""
        if self.is_empty(micro):
            return None
        _, segment = self.by_first[block]
        (at,) = segment.partial_inputs
        gradient = self.gradients.get((at, micro))
        if gradient is None:
            return None
        self.gradients[at, micro] = gradient.contiguous()
        return self.gradients[at, micro]
