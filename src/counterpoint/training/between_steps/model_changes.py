"""What the user changes in model and optimizer between two steps: taken over by the ranks, or refused.

::

    buffers                                             loaded into the ranks
    frozen or thawed parameters, new groups, modes      ranks are built again
    modules, parameters and buffers added or removed    an error, with the remedy
    weights, and attributes that ranks have copies of   an error, with the remedy
    options, attributes, batch                          a digest in the commit, which is the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from counterpoint.errors import DataError
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.partitioning.dry_run import BufferSlots, assign_values
from counterpoint.runtime.loss.loss_parameters import find_loss_module
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.training.agreement.step_facts import StepFacts
from counterpoint.training.agreement.weight_values import checksum_of
from counterpoint.training.between_steps.attribute_changes import AttributeCheck
from counterpoint.training.between_steps.stale_weights import without_stale_reads
from counterpoint.training.built_ranks import BuiltRanks
from counterpoint.training.model_tensors import find_shared_memory, named_tensors

DTYPE_OF, VERSION_OF, ADDRESS_OF = attrgetter("dtype"), attrgetter("_version"), methodcaller("data_ptr")


class ModelChanges:
    """Finds what was changed since the last step.

    Args:
        built: the ranks.
        model: the user's model.
        trained: the model with the parameters of its loss.
        loss: the user's loss.
        optimizer_spec: the user's optimizer.
        runs: what ranks run; copies of the model and a trace of it have the attributes of the first step.

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
        runs: Literal["model", "copies", "trace"],
    ) -> None:
        self.built = built
        self.optimizer_spec = optimizer_spec
        self.structure = StructureCheck(model, *filter(None, [find_loss_module(loss)]))
        self.guards = ParameterGuards([*self.structure.param_tensors, *optimizer_spec.params.values()])
        self.guards_hold = False  # in this step
        self.weights = ParameterMutationCheck(trained, built.ranks, built.world.fabrics[0].num_ranks)
        self.buffers = BufferChanges(model, built.ranks)
        self.attributes = AttributeCheck()
        if runs != "model":
            self.attributes.watch(model, is_traced=runs == "trace")
        self.step_facts: StepFacts | None = None
        if not built.is_single_process:
            losses = {"the loss": loss} if isinstance(loss, nn.Module) else {}
            self.step_facts = StepFacts(optimizer_spec.optimizer, {"the model": model, **losses}, self.buffers, loss)

    def record(self) -> None:
        """Take the present weights and buffers as those that the ranks have."""
        self.weights.record_values()
        self.buffers.record()

    def carry_over(self) -> None:
        """Load buffers that were changed into the ranks.

        Raises:
            PlanError: the optimizer has got hooks that ranks cannot run.
            DataError: a buffer was replaced by one of another shape or dtype; or a module or parameter was added,
                removed or replaced.
        """
        self.guards_hold = self.guards.hold()
        self.structure.require_unchanged(self.built.plan, has_same_dtypes=self.guards_hold)
        self.optimizer_spec.require_no_step_hooks()
        self.buffers.carry_over()

    def find_rebuild_reason(self) -> str:
        """Return the change for which ranks must be built again; empty if there is none."""
        spec = self.optimizer_spec
        with without_stale_reads():
            change = spec.find_new_groups(is_same_trainable=self.guards_hold)
            if not change and not self.guards_hold:
                self.guards.record()
        change = change or self.attributes.find_new_modes()
        if change:
            return change
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

    def prepare_evaluation(self, run_forward: Callable[[], object]) -> None:
        """Load buffers that were changed into the ranks, and check what ranks cannot take over, for an evaluation.

        Args:
            run_forward: runs the model once.

        Raises:
            DataError: modules, parameters, attributes or weights were changed.
        """
        self.structure.require_unchanged(self.built.plan)
        self.buffers.carry_over()
        self.attributes.require_unchanged(self.built.plan, run_forward)
        measures = self.weights.measures
        self.weights.require_unchanged(self.built.plan)
        self.weights.measures = measures  # of the next step, too

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
            self.buffers.end_step()
            self.weights.record_samples()


class ParameterGuards:
    """Detects in one native call that parameters have the properties that they had.

    These are dtype, device, ``requires_grad``, shape and strides. It is what torch's compiler checks before it runs a
    graph; reading each of them from Python takes a tenth of a millisecond for 400 parameters.

    Args:
        params: whose identity is checked elsewhere.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = (*dict.fromkeys(params),)
        self._guards: TensorGuards | None = None
        can_guard = all(type(param) in {Tensor, nn.Parameter} and param.layout == torch.strided for param in params)
        self._num_records = NUM_RECORDS if can_guard else 0  # that are left

    def hold(self) -> bool:
        """Return whether nothing has changed; False if it is not known, as in an autocast of the caller."""
        return self._guards is not None and self._guards.check(*self.params)

    def record(self) -> None:
        """Take the present properties as those that parameters have; only a few times, because it takes longer."""
        if self._num_records:
            self._num_records -= 1
            shapes: Any = [[*param.shape] for param in self.params]
            strides: Any = [[*param.stride()] for param in self.params]
            self._guards = TensorGuards(*self.params, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


NUM_RECORDS = 3


class StructureCheck:
    """Detects modules and parameters that were added, removed or replaced, and buffers that were added or removed.

    A parameter that was converted to another dtype, as by ``model.half()``, is found, too. Ranks run and train what the
    model had in the first step, also where they run the user's own model.

    Args:
        *models: the user's model, and a module that computes the loss.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.slots: list[tuple[str, dict[str, Any], str, object]] = []
        self.dicts: list[dict[str, Any]] = []
        self.identified: list[dict[str, Any]] = []  # whose values must stay the same objects
        self.names: list[str] = []  # of the modules that have the dicts
        for path, module in [pair for model in models for pair in model.named_modules()]:
            for key in _REGISTRIES:
                values = vars(module)[key]
                self.dicts.append(values)
                self.names.append(path)
                self.slots += [(f"{path}.{name}".lstrip("."), values, name, value) for name, value in values.items()]
                if values and key != "_buffers":
                    self.identified.append(values)
        self.empty = [values for values in self.dicts if not values]  # most of them
        self.filled = [values for values in self.dicts if values]
        self.lengths = [*map(len, self.filled)]
        self.values = [values.values() for values in self.identified]
        self.objects = [*chain.from_iterable(self.values)]
        self.params = [(name, value) for name, _, _, value in self.slots if isinstance(value, nn.Parameter)]
        self.param_tensors = [param for _, param in self.params]
        self.dtypes = self._read_dtypes()

    def require_unchanged(self, plan: str, *, has_same_dtypes: bool = False) -> None:
        """Check that the model has the modules, parameters and buffers that it had.

        Args:
            plan: of the ranks, for the error.
            has_same_dtypes: whether it is known that parameters have the dtypes that they had.

        Raises:
            DataError: it has not.
        """
        is_same_size = not any(self.empty) and [*map(len, self.filled)] == self.lengths
        if is_same_size and all(map(is_, chain.from_iterable(self.values), self.objects)):
            if not has_same_dtypes:
                self._require_same_dtypes(plan)
            return
        name, change, current = next(self._find_changes(), ("a module", "replaced", None))
        if change == "replaced" and isinstance(current, nn.Parameter):
            raise DataError(
                f"{name} of the model was replaced by another parameter between two steps, but under {plan} ranks "
                "train the one that it was; change its values inside `with step.full_weights(writeback=True) as "
                "model:`, or close() and call parallelize(...) again (or make a new Trainer)"
            )
        raise DataError(
            f"{name} of the model was {change} between two steps, but under {plan} ranks train the model as it was in "
            "the first step; close(), which gives the model the trained weights, and then change it and call "
            "parallelize(...) again (or make a new Trainer), with an optimizer that holds its parameters"
        )

    def _read_dtypes(self) -> list[torch.dtype]:
        with without_stale_reads():
            return [*map(DTYPE_OF, self.param_tensors)]

    def _require_same_dtypes(self, plan: str) -> None:
        dtypes = self._read_dtypes()
        if dtypes == self.dtypes:
            return
        name, old, new = next(
            (name, old, new)
            for (name, _), old, new in zip(self.params, self.dtypes, dtypes, strict=True)
            if old is not new
        )
        raise DataError(
            f"{name} of the model was converted from {dtype_name(old)} to {dtype_name(new)} between two steps, but "
            f"under {plan} ranks train it as it was in the first step; close(), and then convert the model and call "
            "parallelize(...) again (or make a new Trainer), with a new optimizer"
        )

    def _find_changes(self) -> Iterator[tuple[str, str, object]]:
        """Yield the names of what was changed, and how; replaced and removed ones first."""
        for name, values, key, value in self.slots:
            if key not in values:
                yield name, "removed", None
            elif values[key] is not value and any(values is one for one in self.identified):
                yield name, "replaced", values[key]
        known = {(id(values), key) for _, values, key, _ in self.slots}
        for path, values in zip(self.names, self.dicts, strict=True):
            for key, value in values.items():
                if (id(values), key) not in known:
                    yield f"{path}.{key}".lstrip("."), "added", value


_REGISTRIES = ("_modules", "_parameters", "_buffers")


class ParameterMutationCheck:
    """Detects changes of the user's parameters, which ranks would not see.

    Changes in place are found by torch's version counters. These do not count changes through ``.data`` or numpy, so
    that sums of values and of squares are compared, too, in steps before which the trained values were loaded into the
    model; and some values of each parameter of which the processes of a host share one copy.

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
        self.tensors = [param for _, param in self.params]
        self.stores = stores
        own = {id(param) for param in model.parameters()}
        self.own_views = [
            OwnViews(storage, model)
            for store in stores
            for unit in store.units.values()
            if store.weight_versions is None and unit.role.local_shard == WHOLE
            for storage in unit.flat_params
            if all(id(param) in own for param in storage.params.values())
        ]
        self.versions = self.version_counters()
        self.measures: list[str] = []  # of the values, if the model may have been read since the last step

    def version_counters(self) -> list[int]:
        """Return the version counter of each checked parameter."""
        return [*map(VERSION_OF, self.tensors)]

    def record_values(self) -> None:
        """Accept the current values as those that the ranks have."""
        self.versions, self.measures = self.version_counters(), self.measure_values()
        for views in self.own_views:
            views.samples = None  # until the next step

    def record_samples(self) -> None:
        """Take note of some values of the weights that a step has updated in place."""
        for views in self.own_views:
            views.samples = views.read_samples()

    def require_same_samples(self, plan: str) -> None:
        """Check that the weights have the values of :meth:`record_samples`.

        Raises:
            DataError: they have others.
        """
        name = next(filter(None, (views.find_changed() for views in self.own_views)), "")
        if name:
            raise DataError(
                f"{name} of the model was changed between two steps, through .data or numpy or by another process of "
                f"this host, but under {plan} these processes share one copy of the weights, in which each of them "
                "would make the change again; change weights inside "
                "`with step.full_weights(writeback=True) as model:`, or between step.export_weights() and "
                "step.import_weights()"
            )

    def require_same_places(self, plan: str, location: str) -> None:
        """Check that parameters have the memory that ranks update.

        Raises:
            DataError: one has another.
        """
        name = next(filter(None, (views.find_moved() for views in self.own_views)), "")
        if name:
            raise DataError(
                f"{name} of the model was given other memory {location}between two steps (param.data = ...), but under "
                f"{plan} the ranks update the memory that it had; change values in place, inside "
                "`with step.full_weights(writeback=True) as model:`, or between step.export_weights() and "
                "step.import_weights()"
            )

    def measure_values(self) -> list[str]:
        """Return the sums of each checked parameter's values and squares; as text, because nan equals no nan."""
        return [_sum_and_squares(param.detach()) for _, param in self.params]

    def require_unchanged(self, plan: str, location: str = "") -> None:
        """Check that the model's weights were not changed since the ranks got them.

        Args:
            plan: the plan of the ranks.
            location: the process, for the error.

        Raises:
            DataError: they were changed.
        """
        self.require_same_places(plan, location)
        if not self.params:
            return
        self._require_same_versions(plan, location)
        self.require_same_samples(plan)

    def _require_same_versions(self, plan: str, location: str) -> None:
        versions, measures = self.version_counters(), self.measure_values() if self.measures else []
        if versions == self.versions and measures == self.measures:
            self.measures = []
            return
        before, after = (
            zip(self.versions, self.measures or self.versions, strict=True),
            zip(versions, measures or versions, strict=True),
        )
        names = [name for (name, _), old, new in zip(self.params, before, after, strict=True) if old != new]
        is_shared = any(flat_params.grads.is_shared for store in self.stores for flat_params in store.flat_params())
        shared_note = "the ranks train one copy in shared memory, so any of them may have used old or new values"
        note = shared_note if is_shared else "the ranks train copies, and at most one of them was changed"
        raise DataError(
            f"{names[0]}{f' and {len(names) - 1} other parameters' if names[1:] else ''} of the model changed "
            f"{location}between two steps, but under {plan} {note}; in a loop of your own call step.export_weights() "
            "before the change and step.import_weights() after it; with a Trainer, change weights before fit() or "
            "between two calls"
        )


class OwnViews:
    """The user's own parameters that are views of flat weights, which ranks update.

    Args:
        storage: has the weights.
        model: whose parameters they are.

    Attributes:
        samples: some values of each parameter after the last step; None if they are not known.
    """

    def __init__(self, storage: FlatParams, model: nn.Module) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self.storage = storage
        slots = [slot for slot in storage.layout.slots if slot.stop > slot.start]  # an empty one has no address
        self.tensors = [storage.params[slot.name] for slot in slots]
        self.names = [names[id(param)] for param in self.tensors]
        self.offsets = [slot.start * storage.weights.element_size() for slot in slots]
        spread = [torch.linspace(slot.start, slot.stop - 1, NUM_SAMPLES, dtype=torch.float64) for slot in slots]
        self.indices = torch.cat(spread).round().long() if spread else torch.empty(0, dtype=torch.long)
        self.samples: Tensor | None = None

    def find_moved(self) -> str:
        """Return the name of a parameter that has other memory than its part of the flat weights; empty for none."""
        start = self.storage.weights.data_ptr()
        with without_stale_reads():
            places = [*map(ADDRESS_OF, self.tensors)]
        expected = [start + offset for offset in self.offsets]
        if places == expected:
            return ""
        return next(name for name, place, own in zip(self.names, places, expected, strict=True) if place != own)

    def read_samples(self) -> Tensor | None:
        """Return the bits of some values of each parameter, evenly spaced; None if no other process has the weights."""
        weights = self.storage.weights
        if not self.storage.grads.is_shared:
            return None
        return weights.detach().view(BITS_OF[weights.element_size()]).index_select(0, self.indices)

    def find_changed(self) -> str:
        """Return the name of a parameter whose samples have changed; empty for none."""
        if self.samples is None:
            return ""
        samples = self.read_samples()
        if samples is None or torch.equal(samples, self.samples):
            return ""
        return self.names[int((samples != self.samples).nonzero()[0]) // NUM_SAMPLES]


NUM_SAMPLES = 8
"""Values of each parameter that are compared, evenly spaced from the first to the last."""
BITS_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as long as floating point numbers, so that nan equals itself."""
CHUNK_VALUES = 1 << 16  # measured at once, so that no copy of a whole parameter in float64 is made


def _sum_and_squares(value: Tensor) -> str:
    values = torch.view_as_real(value) if value.is_complex() else value
    total, squares = 0.0, 0.0
    for chunk in torch.split(values.reshape(-1), CHUNK_VALUES):
        in_double = chunk.double()
        total += float(in_double.sum())
        squares += float(in_double.square().sum())
    return f"{total!r} {squares!r}"


class BufferChanges:
    """Gives ranks the buffers of the user's model that code between steps has changed or replaced.

    It finds them by torch's version counters and by what is registered. Changes through ``.data`` and numpy are not
    counted: they are found by the values of the smallest buffers on the host; in others they are not seen.

    Args:
        model: the user's model.
        ranks: of this process; those that run the model itself have its buffers.

    Attributes:
        changed: by name, the buffers that were changed since the last step.
    """

    def __init__(self, model: nn.Module, ranks: Collection[RankRuntime]) -> None:
        self.ranks = ranks
        self.model, self.slots = model, BufferSlots(model)
        held = {id(buffer) for rank in ranks for buffer in rank.interpreter.store.buffers.values()}
        named = [*model.named_buffers()]
        self.held_buffers = [(name, buffer) for name, buffer in named if id(buffer) in held]
        self.buffers = [(name, buffer) for name, buffer in named if id(buffer) not in held]
        self.held_versions: list[int] = []
        self.versions: list[int] = []
        self.values: list[Tensor] = []
        self.compared: list[int] = []  # indices of the buffers whose values are compared in every step
        self.changed: dict[str, Tensor] = {}
        self.record()

    def record(self) -> None:
        """Take the present values as those that the ranks know."""
        with without_stale_reads():
            self.versions = _read_versions(self.buffers)
            self.held_versions = _read_versions(self.held_buffers)
            self.values = [buffer.clone() for _, buffer in self.buffers]
            self.compared = _smallest_on_host(self.values)

    def carry_over(self) -> None:
        """Load the buffers that were changed since :meth:`record` into all ranks.

        Raises:
            DataError: one was replaced by a tensor of another shape or dtype, or while another tensor has its memory.
        """
        if not self.slots.slots:
            return  # the model had no buffers, and StructureCheck finds new ones
        with without_stale_reads(), torch.no_grad():
            self._require_own_memory()
            self.slots.adopt()
            if not self.find_changes():
                return
            for name, buffer in self.buffers:
                if name in self.changed:
                    for rank in self.ranks:
                        assign_values(rank.interpreter.store.buffers[name], buffer)
        self.record()

    def _require_own_memory(self) -> None:
        """Check that no other tensor of the model has the memory of a buffer that was replaced.

        Raises:
            DataError: one has, and would get the new values, which are copied into that memory.
        """
        replaced = [
            (full_name, name, buffer)
            for full_name, buffers, name, buffer in self.slots.slots
            if buffers.get(name, buffer) is not buffer
        ]
        if not replaced:
            return
        tensors = [*self.model.named_parameters(), *named_tensors(self.model)]
        named = [(name, tensor, False) for name, tensor in tensors]
        for full_name, name, buffer in replaced:
            others = [each for each in named if each[0] != full_name]
            for pair in find_shared_memory([(full_name, buffer, True), *others]):
                other = next((found for found, is_replaced in pair if not is_replaced), "")
                if any(is_replaced for _, is_replaced in pair):
                    self.slots.restore()
                    raise DataError(
                        f"the buffer {full_name} was replaced by another tensor between two steps, and {other} has the "
                        f"memory of the one that it was, into which ranks copy the new values, so that {other} would "
                        f"change with it; give {other} a copy (self.{name}.clone()) when the model is made, or change "
                        "the buffer in place (copy_(...)) if both are meant to change"
                    )

    def find_changes(self) -> bool:
        """Add to ``changed`` what was changed since :meth:`record`; return whether anything may have been."""
        versions, held_versions = _read_versions(self.buffers), _read_versions(self.held_buffers)
        with without_stale_reads():
            is_unchanged = all(_are_equal(self.buffers[index][1], self.values[index]) for index in self.compared)
            if is_unchanged and versions == self.versions and held_versions == self.held_versions:
                return False
            for (name, buffer), value in zip(self.buffers, self.values, strict=True):
                if buffer.dtype != value.dtype or buffer.shape != value.shape:
                    raise DataError(
                        f"the buffer {name}, {value.dtype} {tuple(value.shape)}, became {buffer.dtype} "
                        f"{tuple(buffer.shape)} between two steps; ranks and checkpoints hold buffers of one shape and "
                        "dtype: close(), and then change it and call parallelize(...) again (or make a new Trainer)"
                    )
                if not _are_equal(buffer, value):
                    self.changed[name] = buffer
        for (name, buffer), before, now in zip(self.held_buffers, self.held_versions, held_versions, strict=True):
            if now != before:
                self.changed[name] = buffer
        return True

    def digest_changes(self) -> Iterator[int]:
        """Yield a number for each buffer that was changed since the last step: of its name and its values."""
        if not self.changed:
            return
        with without_stale_reads():
            for name, buffer in self.changed.items():
                yield _digest_buffer(buffer, crc32(name.encode()))

    def describe(self) -> list[list[str]]:
        """Return the buffers by name, each with a digest of its values if this process has those of the step."""
        held = {name for name, _ in self.held_buffers}
        with without_stale_reads():
            return [
                [
                    f"{name} of the model",
                    f"a buffer with digest {_digest_buffer(buffer):08x}"
                    if name in held or name in self.changed
                    else "what the last step has left",
                ]
                for name, buffer in sorted(self.held_buffers + self.buffers)
            ]

    def end_step(self) -> None:
        """Take note that a step was taken, which itself may have changed the buffers that ranks hold."""
        self.changed.clear()
        self.held_versions = _read_versions(self.held_buffers)


MAX_COMPARED_VALUES = 1 << 16
"""Of buffers that are compared in every step."""


def _smallest_on_host(values: Sequence[Tensor]) -> list[int]:
    """Return the indices of the smallest tensors, which have so many values together as a step may compare."""
    on_host = [index for index, value in enumerate(values) if value.is_cpu and value.layout == torch.strided]
    by_size = sorted(on_host, key=lambda index: values[index].numel())
    totals = accumulate(values[index].numel() for index in by_size)
    return [index for index, total in zip(by_size, totals, strict=True) if total <= MAX_COMPARED_VALUES]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same form and the same values; nan equals nan."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return (
        one.is_floating_point()
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _read_versions(buffers: Collection[tuple[str, Tensor]]) -> list[int]:
    return [buffer._version for _, buffer in buffers]  # noqa: SLF001 - there is no other way to see changes


def _digest_buffer(buffer: Tensor, start: int = 0) -> int:
    """Return a checksum of a buffer's bytes; of its form only on a device, where reading would wait for it."""
    form = crc32(f"{dtype_name(buffer.dtype)} {tuple(buffer.shape)}".encode(), start)
    if not buffer.is_cpu or buffer.layout != torch.strided or not buffer.numel():
        return form
    return checksum_of(buffer, form)
