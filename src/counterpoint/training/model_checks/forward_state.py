"""Find what a forward keeps outside of parameters and buffers, which ranks with a trace or parts of a batch do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.errors import DataError, PlanError
from counterpoint.partitioning.dry_run import (
    BufferSlots,
    Inputs,
    ModuleAttributes,
    preserve_state,
    raise_dtype_error,
    split_call_args,
)
from counterpoint.partitioning.own_generators import OWN_DRAWS_RULE, find_generators, read_states
from counterpoint.runtime.microbatches import BatchMemory, Memory, SlicedBatch, copy_tensors
from counterpoint.runtime.rng.draw_sites import other_rng_state
from counterpoint.runtime.sample_independence import find_state_dependence
from counterpoint.training.model_checks.embedding_checks import FrequencyScalingDetector


@dataclass(frozen=True, slots=True)
class ForwardState:
    """What a forward has changed for good.

    Args:
        attributes: of the model, which it has changed or added.
        difference: of the outputs of a second forward on the same inputs, relative to the largest value.
        uses_other_generators: whether it draws from a generator of Python or numpy, or one of its own.
        scales_by_frequency: whether it divides gradients of a table by how often the batch has an index.
        changed_inputs: the indices of the tensors among its inputs that it changes in place.
        changed_params: names of the parameters that it changes in place.
        replaced_buffers: names of the buffers that it replaces by other tensors.
        reads_values: whether its Python code reads values of tensors, if that is known.
    """

    attributes: tuple[str, ...] = ()
    difference: float = 0.0
    uses_other_generators: bool = False
    scales_by_frequency: bool = False
    changed_inputs: tuple[int, ...] = ()
    changed_params: tuple[str, ...] = ()
    replaced_buffers: frozenset[str] = frozenset()
    reads_values: bool = False

    @staticmethod
    def find(model: nn.Module, inputs: Inputs) -> ForwardState:
        """Run the model in training mode; a second time, if it has changed an attribute.

        Args:
            model: the module; its state is preserved.
            inputs: those of a microbatch.

        Raises:
            DataError: the inputs have other dtypes than the parameters, which a trace does not show.
        """
        attributes, slots = ModuleAttributes(model), BufferSlots(model)
        versions = [param._version for param in model.parameters()]  # noqa: SLF001 - there is no other way to see changes
        try:
            detector = FrequencyScalingDetector()
            copies = copy_tensors(inputs)
            with detector:
                first, uses_other_generators = _run(model, copies, attributes, slots)
            tensors = [leaf for leaf in tree_leaves(copies) if isinstance(leaf, Tensor)]
            changed_inputs = tuple(index for index, leaf in enumerate(tensors) if leaf._version)  # noqa: SLF001 - as torch counts changes
            changed = attributes.find_changed()
            difference = _difference(first, _run(model, copy_tensors(inputs), attributes, slots)[0]) if changed else 0.0
        except Exception as error:  # noqa: BLE001 - training raises it again, with its location
            raise_dtype_error(error, f"the forward of {type(model).__name__}", inputs, model.parameters())
            return ForwardState()
        finally:
            attributes.restore()
        restored = {buffer.untyped_storage()._cdata for buffer in model.buffers() if buffer.layout == torch.strided}  # noqa: SLF001 - its identity
        changed_params = tuple(
            name
            for (name, param), version in zip(model.named_parameters(), versions, strict=False)
            if param._version != version and param.untyped_storage()._cdata not in restored  # noqa: SLF001 - as above
        )
        return ForwardState(
            tuple(changed),
            difference,
            uses_other_generators,
            detector.is_used,
            changed_inputs,
            changed_params,
            frozenset(slots.replaced),
        )

    def require_no_changed_params(self, model: nn.Module, plan: str) -> None:
        """Check that the forward leaves parameters as they are.

        Tables with ``max_norm``, which shorten their rows, have an error of their own.

        Args:
            model: that was run.
            plan: as text, for the message.

        Raises:
            PlanError: it changes one.
        """
        tables = [path for path, module in model.named_modules() if getattr(module, "max_norm", None) is not None]
        names = [name for name in self.changed_params if name.rpartition(".")[0] not in tables]
        if names:
            raise PlanError(
                f"the forward of {type(model).__name__} changes the parameter {names[0]} whenever it runs, but under "
                f"{plan} it runs on parts of a batch, and ranks have copies or shards of the parameters; change it "
                "after each step, inside `with step.full_weights(writeback=True) as model:`"
            )

    def require_none(self, model: nn.Module, plan: str, way: str) -> None:
        """Check that an output does not depend on earlier forwards.

        Args:
            model: that was run.
            plan: as text, for the message.
            way: how the plan runs it.

        Raises:
            PlanError: it does.
        """
        if self.difference:
            raise PlanError(
                f"the forward of {type(model).__name__} changes the attribute {self.attributes[0]}, and computes with "
                f"it: on the same inputs its output is another one the second time, by {self.difference:.1e} of the "
                f"largest value; {plan} runs {way}, so the attribute would not be that of one forward on each batch; "
                "give the value to forward as an input, keep it as a buffer (register_buffer), or train with one "
                "microbatch for each replica of a whole model (data, zero of level 1 or 2)"
            )

    def require_independent(self, model: nn.Module, inputs: Inputs, plan: str, num_microbatches: int) -> None:
        """Check that what the forward keeps does not mix the samples of a batch, of which it sees only some.

        Args:
            model: that was run.
            inputs: those of a microbatch.
            plan: as text, for the message.
            num_microbatches: of a batch.

        Raises:
            PlanError: it does.
        """
        error = find_state_dependence(model, inputs) if self.difference and num_microbatches > 1 else 0.0
        if error:
            raise PlanError(
                f"the forward of {type(model).__name__} computes the attribute {self.attributes[0]} from all samples "
                "that it sees, as a mean over a batch, and the next forward reads it: the output for a sample changes "
                f"by {error:.1e} of the largest value without the others; {plan} computes a batch as "
                f"{num_microbatches} separate microbatches, so the attribute would not be that of the whole batch; "
                "compute it from the outputs between the steps and give it to forward as an input, train with one "
                "microbatch on one rank, or pass cross_sample='accept' if each microbatch is intended to be a batch of "
                "its own"
            )

    def require_no_traced_draws(self, model: nn.Module) -> None:
        """Check that a trace does not keep numbers that Python or numpy has drawn.

        Raises:
            PlanError: it does.
        """
        if self.uses_other_generators:
            raise PlanError(
                f"the forward of {type(model).__name__} draws from a generator of Python or numpy, or from one of its "
                f"own, {OWN_DRAWS_RULE}"
            )


class InputReuse:
    """Checks that memory which a forward changes in place is not read again, where ranks leave inputs as they are.

    Args:
        model: the name of its class.
        changed: the indices of the tensors among the inputs of a forward that it changes.
        plan: the plan.
        is_kept: whether the ranks change none.
        is_kept_elsewhere: whether those in other processes, which do not read the inputs, change none.
    """

    def __init__(
        self, model: str, changed: Sequence[int], plan: str, *, is_kept: bool, is_kept_elsewhere: bool
    ) -> None:
        self.model, self.changed, self.plan = model, changed, plan
        self.is_kept, self.is_kept_elsewhere = is_kept, is_kept_elsewhere
        self.newest: int | None = None  # number of the batch, of an asynchronous pipeline
        self.read: list[Memory] = []  # inputs of earlier steps

    def check_batch(self, batch: object, submitted: Sequence[SlicedBatch]) -> None:
        """Check what the user has passed, once, though an asynchronous pipeline is flushed over several steps.

        Args:
            batch: what ranks read.
            submitted: what the user has passed.
        """
        newest = getattr(batch, "batches", None)
        key = max(newest, default=None) if isinstance(newest, dict) else None
        if key is None or key != self.newest:
            self.newest = key
            for part in submitted:
                self.require_none(part)

    def require_none(self, part: SlicedBatch) -> None:
        """Check the tensors of a batch.

        Raises:
            DataError: a tensor that the forward changes is also a target, or was an input of an earlier step.
        """
        is_kept = self.is_kept or part.origins is not None
        if not is_kept and not self.is_kept_elsewhere:
            return
        memory = BatchMemory.of(part.batch) if part.origins is None else part.origins
        changed = [memory.inputs[index] for index in self.changed if index < len(memory.inputs)]
        self.read = [entry for entry in self.read if not entry.storage.expired()]  # type: ignore[no-untyped-call]
        for own in changed:
            if any(own.overlaps(other) for other in memory.targets):
                self._refuse(part, "which is also a target")
            if is_kept and any(own.overlaps(other) for other in self.read):
                self._refuse(part, "which was one of an earlier step, too")
        if is_kept:
            self.read += changed

    def _refuse(self, part: SlicedBatch, what: str) -> NoReturn:
        if part.origins is None:
            why = f"under {self.plan} ranks run the operations of one call, or stages in other processes"
            remedies = "pass a copy (x.clone()), or use a strategy that keeps the model whole (data, zero of level 1 "
            remedies += "or 2, server)"
        else:
            why = "the ranks train on copies of accumulated batches, and of those in flight in an asynchronous pipeline"
            remedies = "or pass a copy (x.clone())"
        raise DataError(
            f"the forward of {self.model} changes an input in place, {what}, so that a plain loop reads the changed "
            f"values there, but {why}, which do not change it; write the forward without in-place operations "
            f"(x = x * 2 for x *= 2), {remedies}"
        )


def _run(
    model: nn.Module, inputs: Inputs, attributes: ModuleAttributes, slots: BufferSlots
) -> tuple[list[Tensor], bool]:
    """Return the output tensors, and whether another generator than torch's was used; attributes stay changed."""
    args, kwargs = split_call_args(inputs)
    with preserve_rng(), preserve_state(model, attributes=attributes), torch.enable_grad():
        generators = find_generators(model)
        before = other_rng_state(), read_states(generators)
        output = model(*args, **kwargs)
        slots.find_replaced()
        uses_other_generators = (other_rng_state(), read_states(generators)) != before
    return [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], uses_other_generators


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest relative difference; 0 if it is rounding."""
    if [leaf.shape for leaf in first] != [leaf.shape for leaf in second]:
        return math.inf
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        if one.is_floating_point() and one.numel() and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            error = float((one - other).abs().nan_to_num().max()) / (float(one.abs().nan_to_num().max()) or 1.0)
            largest = max(largest, error if error > torch.finfo(one.dtype).eps ** 0.5 else 0.0)
    return largest
