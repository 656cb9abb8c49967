"""What the user changes in model and optimizer between two steps: taken over by the ranks, or refused.

::

    buffers                                             loaded into the ranks
    frozen, thawed or added parameters, modes           ranks are built again
    weights, and attributes that ranks have copies of   an error, with the remedy
    options, attributes, batch                          a digest in the commit, which is the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.partitioning.dry_run import BufferSlots, TrainingModes, assign_values
from counterpoint.runtime.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.training.between_steps.stale_weights import without_stale_reads
from counterpoint.training.built_ranks import BuiltRanks
from counterpoint.training.rank_facts import NamedFacts, describe_mode, describe_structure, first_difference
from counterpoint.training.step_facts import StepFacts


class ModelChanges:
    """Finds what was changed since the last step.

    Args:
        built: the ranks.
        model: the user's model.
        trained: the model with the parameters of its loss.
        loss: the user's loss.
        optimizer_spec: the user's optimizer.
        has_copies: whether ranks run copies of the model, or a trace of it, with the attributes of the first step.

    Attributes:
        step_facts: what processes compare in every step; None if all ranks are in this process.
    """

    def __init__(
        self,
        built: BuiltRanks,
        model: nn.Module,
        trained: nn.Module,
        loss: LossFunction,
        optimizer_spec: OptimizerSpec,
        *,
        has_copies: bool,
    ) -> None:
        self.built = built
        self.optimizer_spec = optimizer_spec
        self.weights = ParameterMutationCheck(trained, built.ranks, built.world.fabrics[0].num_ranks)
        self.buffers = BufferChanges(model, built.ranks)
        self.attributes = AttributeCheck()
        if has_copies:
            self.attributes.watch(model)
        self.step_facts: StepFacts | None = None
        if not built.is_single_process:
            losses = {"the loss": loss} if isinstance(loss, nn.Module) else {}
            self.step_facts = StepFacts(optimizer_spec.optimizer, {"the model": model, **losses})

    def record(self) -> None:
        """Take the present weights and buffers as those that the ranks have."""
        self.weights.record_versions()
        self.buffers.record()

    def carry_over(self) -> None:
        """Load buffers that were changed into the ranks.

        Raises:
            PlanError: the optimizer has got hooks that ranks cannot run.
            DataError: a buffer was replaced by one of another shape or dtype.
        """
        self.optimizer_spec.require_no_step_hooks()
        self.buffers.carry_over()

    def find_rebuild_reason(self) -> str:
        """Return the change for which ranks must be built again; empty if there is none."""
        spec = self.optimizer_spec
        with without_stale_reads():
            has_new_groups = spec.has_new_groups()
        if has_new_groups:
            return "parameters of the model were frozen, made trainable or added to the optimizer"
        if self.attributes.has_new_modes():
            return "modules of the model were put into training or evaluation mode"
        if spec.has_new_state and spec.merges_params and not spec.has_mergeable_state():
            return "optimizer state was loaded in which step counts differ"
        return ""

    def begin_step(self, batch: MicrobatchSource, run_forward: Callable[[], object]) -> None:
        """Check what ranks cannot take over, and note what all ranks are to be given alike.

        Args:
            batch: of the step.
            run_forward: runs the model once.

        Raises:
            DataError: weights or attributes were changed.
        """
        self.attributes.require_unchanged(self.built.plan, run_forward)
        if self.step_facts is not None:
            self.step_facts.begin_step(batch)
        else:
            self.weights.require_unchanged(self.built.plan)

    def require_same_weights(self, rank: int) -> None:
        """Check a rank's weights in its step, where an error tells the other processes.

        Raises:
            DataError: weights were changed.
        """
        if not self.built.is_single_process:
            self.weights.require_unchanged(self.built.plan, f"on rank {rank} ")

    def end_step(self) -> None:
        """Take note of a step that was taken."""
        if self.step_facts is not None:
            self.step_facts.end_step()


class ParameterMutationCheck:
    """Detects in-place changes of the user's parameters by torch's version counters; ``.data`` does not count.

    Args:
        model: the user's model.
        ranks: the ranks of this process.
        num_ranks: the ranks of the whole plan.
    """

    def __init__(self, model: nn.Module, ranks: Collection[RankRuntime], num_ranks: int) -> None:
        stores = [rank.interpreter.store for rank in ranks]
        units = [unit for store in stores for unit in store.units.values() if not unit.flat_params]
        updated_in_place = {
            id(param) for unit in units for param in unit.params.values()
        }  # the optimizer itself changes these
        if num_ranks == 1:
            updated_in_place |= {id(param) for param in stores[0].params.values()}
        self.params = [(name, param) for name, param in model.named_parameters() if id(param) not in updated_in_place]
        self.stores = stores
        self.versions: list[int] = []
        self.record_versions()

    def version_counters(self) -> list[int]:
        """Return the version counter of each checked parameter."""
        return [param._version for _, param in self.params]  # noqa: SLF001 - there is no other way to see it

    def record_versions(self) -> None:
        """Accept the current values as those that the ranks have."""
        self.versions = self.version_counters()

    def require_unchanged(self, plan: str, location: str = "") -> None:
        """Check that the model's weights were not changed since the ranks got them.

        Args:
            plan: the plan of the ranks.
            location: the process, for the error.

        Raises:
            DataError: they were changed.
        """
        if not self.params:
            return
        versions = self.version_counters()
        if versions == self.versions:
            return
        pairs = zip(self.versions, versions, strict=True)
        names = [name for (name, _), (old, new) in zip(self.params, pairs, strict=True) if old != new]
        is_shared = any(flat_params.grads.is_shared for store in self.stores for flat_params in store.flat_params())
        shared_note = "the ranks train one copy in shared memory, so any of them may have used old or new values"
        note = shared_note if is_shared else "the ranks train copies, and at most one of them was changed"
        raise DataError(
            f"{names[0]}{f' and {len(names) - 1} other parameters' if names[1:] else ''} of the model changed "
            f"{location}between two steps, but under {plan} {note}; in a loop of your own call step.export_weights() "
            "before the change and step.import_weights() after it; with a Trainer, change weights before fit() or "
            "between two calls"
        )


class AttributeCheck:
    """Detects changes of the model's plain attributes between steps, such as a temperature or the rate of a dropout.

    Ranks that run copies of the model, or a trace of it, have the values of the first step. Attributes that the model's
    own forward changes, which user code may call between steps, are left out; of torch's modules only floats are
    compared.
    """

    def __init__(self) -> None:
        self.watched: list[tuple[str, dict[str, Any], str, object]] = []
        self.modes: list[tuple[nn.Module, bool]] = []  # of the model and its submodules

    def watch(self, model: nn.Module) -> None:
        """Compare the attributes of a model with their present values from now on."""
        self.watched = [(name, attributes, key, attributes[key]) for name, attributes, key in _plain_attributes(model)]
        self.modes = TrainingModes(model).flags

    def has_new_modes(self) -> bool:
        """Return whether submodules of a model in training were put into another mode than they had."""
        return (
            bool(self.modes)
            and self.modes[0][0].training
            and any(module.training is not training for module, training in self.modes)
        )

    def require_unchanged(self, plan: str, run_forward: Callable[[], object]) -> None:
        """Check that the attributes have the values of the first step.

        Args:
            plan: of the ranks, for the error.
            run_forward: runs the model once.

        Raises:
            DataError: one has another value, and a forward does not change it.
        """
        if not self._find_changed():
            return
        self._leave_out_changed_by(run_forward)
        for name, value, current in self._find_changed():
            raise DataError(
                f"{name} of the model was changed from {value!r} to {current!r} between two steps, but under {plan} "
                "ranks run the model as it was in the first step; give the value to forward as an input, which may "
                "differ in every step, or close() and call parallelize(...) again (or make a new Trainer)"
            )

    def _find_changed(self) -> list[tuple[str, object, object]]:
        return [
            (name, value, attributes.get(key))
            for name, attributes, key, value in self.watched
            if attributes.get(key) is not value and attributes.get(key) != value
        ]

    def _leave_out_changed_by(self, run_forward: Callable[[], object]) -> None:
        before = [attributes.get(key) for _, attributes, key, _ in self.watched]
        with suppress(Exception):  # the step fails likewise, with its location
            run_forward()
        kept = []
        for entry, value in zip(self.watched, before, strict=True):
            _, attributes, key, _ = entry
            if attributes.get(key) == value:
                kept.append(entry)
            else:
                attributes[key] = value
        self.watched = kept


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the full name, the dictionary and the key of attributes that are numbers, texts or None."""
    for path, module in model.named_modules():
        kinds = (float,) if type(module).__module__.startswith("torch.nn.") else (bool, int, float, str, type(None))
        for key, value in vars(module).items():
            if isinstance(value, kinds) and key != "training" and not key.startswith("_"):
                yield f"{path}.{key}".lstrip("."), vars(module), key


class BufferChanges:
    """Gives ranks the buffers of the user's model that code between steps has changed or replaced.

    It finds them by torch's version counters and by what is registered; changes through ``.data`` are not seen.

    Args:
        model: the user's model.
        ranks: of this process; those that run the model itself have its buffers.
    """

    def __init__(self, model: nn.Module, ranks: Collection[RankRuntime]) -> None:
        self.ranks = ranks
        self.slots = BufferSlots(model)
        own = {id(buffer) for rank in ranks for buffer in rank.interpreter.store.buffers.values()}
        self.buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in own]
        self.versions: list[int] = []
        self.values: list[Tensor] = []
        self.record()

    def record(self) -> None:
        """Take the present values as those that the ranks know."""
        with without_stale_reads():
            self.versions = self._read_versions()
            self.values = [buffer.clone() for _, buffer in self.buffers]

    def carry_over(self) -> None:
        """Load the buffers that were changed since :meth:`record` into all ranks.

        Raises:
            DataError: one was replaced by a tensor of another shape or dtype.
        """
        with without_stale_reads(), torch.no_grad():
            self.slots.adopt()
            if self._read_versions() == self.versions:
                return
            for (name, buffer), value in zip(self.buffers, self.values, strict=True):
                if not torch.equal(buffer, value):
                    for rank in self.ranks:
                        assign_values(rank.interpreter.store.buffers[name], buffer)
        self.record()

    def _read_versions(self) -> list[int]:
        return [buffer._version for _, buffer in self.buffers]  # noqa: SLF001 - there is no other way to see changes


def require_same_changes(fabric: Fabric, model: nn.Module, change: str) -> None:
    """Check that all processes have made the same change; a collective call.

    Args:
        fabric: this rank's fabric.
        model: this rank's model.
        change: what has changed, for the error of a process that waits for others.

    Raises:
        PlanError: other parameters are trainable, or modules are in another mode.
    """
    facts = [*describe_structure(model)[0], ["the model", describe_mode(model)]]
    label = f"what all ranks do because {change}"
    gathered = fabric.gather_values(label, cast("Json", facts), tuple(range(fabric.num_ranks)))
    difference = first_difference(cast("list[NamedFacts]", gathered))
    if difference:
        raise PlanError(f"the ranks do not train the same model: {difference}")
