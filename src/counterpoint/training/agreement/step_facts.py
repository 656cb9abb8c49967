"""What ranks are given for a step and must be the same on all of them, although it may change between steps.

Every commit carries a digest of it: the options of the optimizer, such as the learning rate; the batch, where each rank
passes all of it, by its form and some of its values; the autocast; and the plain attributes, modes and buffers of model
and loss that were changed between steps. Only where digests differ, the values are exchanged, and the error names ranks
and values.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from operator import is_, itemgetter
from types import CodeType, FunctionType
from typing import Any, Protocol, cast
from zlib import crc32

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_flatten

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.runtime.microbatches import (
    AccumulatedBatches,
    AsyncPipelineBatches,
    MicrobatchSource,
    SlicedBatch,
    batch_leaves,
    current_autocasts,
)
from counterpoint.runtime.sample_layout import SamplePart
from counterpoint.training.agreement.rank_facts import (
    describe_group,
    describe_value,
    first_difference,
    plain_attributes,
)

CHANGE_EQUALLY = (
    "all ranks train one model: step schedulers, and set options of the optimizer and attributes, equally "
    "on all of them"
)
NUM_COMPARED = 16
"""Values of each tensor of a batch that are compared in a step."""
IMMUTABLE = (bool, int, float, str, type(None))
TRAINING_OF = itemgetter("training")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SETTERS = {"train", "eval", "setattr", "__setattr__", "__dict__", "vars"}
NOT_IN_A_STEP = {"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters", "_reset_parameters"}
"""Methods of torch's modules that only build, describe or restore them."""
DIGEST_BITS = 52  # of which a float64 has all
NAN = -0.4142
"""In place of numbers that are not equal to themselves, whose hash is that of an object."""


class ChangedBuffers(Protocol):
    """The buffers of a model that the user has changed since the last step."""

    def digest_changes(self) -> Iterator[int]:
        """Yield a number for each of them."""
        ...

    def describe(self) -> list[list[str]]:
        """Return all buffers, each with a text that differs if its values do."""
        ...


class StepFacts:
    """What this rank was given for a step.

    Args:
        optimizer: whose options are used.
        modules: the model, and a loss that is a module, by a name for errors.
        buffers: tells which buffers of the model were changed.
        loss: the user's, which may run any code.

    Attributes:
        digest: of the present step; 0 if this rank has nothing to compare.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        modules: Mapping[str, nn.Module],
        buffers: ChangedBuffers,
        loss: Callable[..., object],
    ) -> None:
        self.optimizer = optimizer
        self.buffers = buffers
        self.settings = ModuleSettings(modules, has_own_code=has_own_code(loss, *modules.values()))
        self.changes_in_step = may_change_settings(loss, *modules.values())
        self.options: tuple[list[object], tuple[object, ...]] = ([], ())  # the last values and their digests
        self.batch: MicrobatchSource | None = None
        self.digest = 0

    def begin_step(self, batch: MicrobatchSource) -> None:
        """Take note of what the user has given for a step."""
        self.batch, self.digest = batch, 0
        if any(batch.sizes.values()):
            changes = (*self.settings.find_changes(), *self.buffers.digest_changes())
            parts = (*self.digest_options(), *digest_batch(batch), *digest_autocasts(), *changes)
            self.digest = (hash(parts) & ((1 << DIGEST_BITS) - 1)) or 1

    def end_step(self) -> None:
        """Take note of the attributes and modes that the step itself has changed, which are not compared."""
        if self.changes_in_step:
            self.settings.end_step()

    def digest_options(self) -> tuple[object, ...]:
        """Return a digest of each option of the optimizer; the last ones if these are the same objects."""
        values = [*self.option_values()]
        last, digests = self.options
        if len(values) != len(last) or not all(map(is_, values, last)):
            digests = tuple(map(digest_option, values))
            is_constant = all(isinstance(value, IMMUTABLE) for value in chain.from_iterable(map(_items, values)))
            self.options = (values if is_constant else [], digests)
        return digests

    def option_values(self) -> Iterator[object]:
        """Yield the options of all groups, without parameters and their names."""
        for group in self.optimizer.param_groups:
            for key, value in group.items():
                if key not in {"params", "param_names"}:
                    yield value

    def require_same(self, fabric: Fabric, group: Group, step: int) -> None:
        """Exchange what the members of a commit were given; all of them call it, because digests differ.

        Raises:
            DataError: it differs.
        """
        gathered = cast("list[Any]", fabric.gather_values("what a step was given", self.describe(), group))
        given = {rank: facts for rank, facts in zip(group, gathered, strict=True) if facts}
        difference = first_difference([*given.values()], [*given], CHANGE_EQUALLY)
        if difference:
            raise DataError(f"the ranks were given different values for step {step}: {difference}")

    def describe(self) -> list[list[str]]:
        """Return what this rank was given by name; nothing if it has no samples."""
        if self.batch is None or not self.digest:
            return []
        facts = [
            [f"{key} of the optimizer's group {index}", text]
            for index, options in enumerate(self.optimizer.param_groups)
            for key, text in describe_group(options).items()
        ]
        autocasts = [f"{device} {dtype}" for device, is_enabled, dtype in current_autocasts() if is_enabled]
        return [
            *facts,
            ["the autocast of the call", ", ".join(autocasts) or "none"],
            *self.settings.describe(),
            *describe_batch(self.batch),
            *self.buffers.describe(),
        ]


class ModuleSettings:
    """The plain attributes and the modes of modules, which are read together before and after a step.

    Only if one of them differs from the last time, it is looked for what has changed.

    Args:
        modules: by a name for errors.
        has_own_code: whether a step runs code that is not torch's, which may read any mode.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, has_own_code: bool = True) -> None:
        self.attributes = PlainAttributes(modules)
        self.modes = ModuleModes(modules, has_own_code=has_own_code)
        self.holders: tuple[dict[str, Any], ...] = ()
        self.keys: tuple[str, ...] = ()
        self.last: list[object] = []
        self.changes: tuple[int, ...] = ()  # of the last time
        self.find_places()

    def find_places(self) -> None:
        """Take note of where the settings are, those of a module after each other."""
        by_module: dict[int, list[tuple[dict[str, Any], str]]] = {}
        modes = [(attributes, "training") for _, of_root, _ in self.modes.roots for attributes in of_root]
        for place in chain(modes, zip(self.attributes.holders, self.attributes.keys, strict=True)):
            by_module.setdefault(id(place[0]), []).append(place)
        places = [*chain.from_iterable(by_module.values())]
        self.holders, self.keys = tuple(holder for holder, _ in places), tuple(key for _, key in places)
        self.last = []

    def read(self) -> list[object]:
        """Return the present values."""
        return [*map(dict.get, self.holders, self.keys)]

    def find_changes(self) -> tuple[int, ...]:
        """Return a digest of each setting that has another value than at first."""
        values = self.read()
        if values != self.last:
            self.changes = (*self.attributes.find_changes(), *self.modes.find_changes())
            self.last = values
        return self.changes

    def describe(self) -> list[list[str]]:
        """Return the settings by name."""
        return [*self.attributes.describe(), *self.modes.describe()]

    def end_step(self) -> None:
        """Leave out what has changed since :meth:`find_changes`."""
        if self.read() != self.last:
            self.attributes.end_step()
            self.modes.end_step()
            self.find_places()


class PlainAttributes:
    """The numbers, texts and flags among the attributes of modules, and which of them the user changes between steps.

    What a step itself has changed once, such as a counter in a forward, is left out from then on. So is what no code
    reads, such as ``in_features`` of a ``Linear``: see :func:`reads`.

    Args:
        modules: by a name for errors.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        entries = [
            (f"{path}.{key}".lstrip(".") + f" of {what}", vars(module), key)
            for what, root in modules.items()
            for path, module in root.named_modules()
            for key, value in plain_attributes(module)
            if isinstance(value, IMMUTABLE) and reads(module, key)
        ]
        self.names = [name for name, _, _ in entries]
        self.holders = [attributes for _, attributes, _ in entries]
        self.keys = [key for _, _, key in entries]
        self.first = self.read()
        self.before = self.first

    def read(self) -> list[object]:
        """Return the present values."""
        return [*map(dict.get, self.holders, self.keys)]

    def find_changes(self) -> Iterator[int]:
        """Yield a digest of each attribute that has another value than at first."""
        self.before = self.read()
        if self.before != self.first:
            for name, first, value in zip(self.names, self.first, self.before, strict=True):
                if value != first:
                    yield crc32(f"{name}={value!r}".encode())

    def describe(self) -> list[list[str]]:
        """Return the attributes by name."""
        return [[name, describe_value(value)] for name, value in zip(self.names, self.before, strict=True)]

    def end_step(self) -> None:
        """Leave out what has changed since :meth:`find_changes`."""
        after = self.read()
        if after != self.before:
            kept = [index for index, value in enumerate(after) if value == self.before[index]]
            self.names = [self.names[index] for index in kept]
            self.holders = [self.holders[index] for index in kept]
            self.keys = [self.keys[index] for index in kept]
            self.first, self.before = ([values[index] for index in kept] for values in (self.first, self.before))


class ModuleModes:
    """The modes, training or evaluation, of modules, and which of them the user changes between steps.

    A root that is in evaluation mode as a whole is put back by the step into the modes that it had at first. What a
    step itself has changed otherwise is left out from then on. So is what no code reads: where all code is torch's, a
    ``Linear`` computes the same in both modes.

    Args:
        modules: roots, by a name for errors.
        has_own_code: whether a step runs other code, which may read any mode.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, has_own_code: bool = True) -> None:
        self.names: list[str] = []
        self.roots: list[tuple[nn.Module, list[dict[str, Any]], list[bool]]] = []
        for what, root in modules.items():
            named = [*root.named_modules()] if has_own_code else [*_find_mode_readers(root)]
            self.names += [f"{path}.training".lstrip(".") + f" of {what}" for path, _ in named]
            flags = [one.training or not root.training for _, one in named]
            self.roots.append((root, [vars(one) for _, one in named], flags))
        self.first = self.before = [flag for _, _, flags in self.roots for flag in flags]
        self.left_out: set[int] = set()

    def read(self) -> list[bool]:
        """Return the modes in which the next step runs the modules."""
        flags: list[bool] = []
        for root, attributes, first in self.roots:
            flags += map(TRAINING_OF, attributes) if root.training else first
        return flags

    def find_changes(self) -> Iterator[int]:
        """Yield a digest of each module that is in another mode than at first."""
        self.before = self.read()
        if self.before != self.first:
            for index, (name, first, value) in enumerate(zip(self.names, self.first, self.before, strict=True)):
                if value is not first and index not in self.left_out:
                    yield crc32(f"{name}={value}".encode())

    def describe(self) -> list[list[str]]:
        """Return the modes by name."""
        return [[name, str(value)] for name, value in zip(self.names, self.before, strict=True)]

    def end_step(self) -> None:
        """Leave out what has changed since :meth:`find_changes`."""
        after = self.read()
        if after != self.before:
            self.left_out |= {index for index, value in enumerate(after) if value is not self.before[index]}


def _find_mode_readers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a root of torch's modules, and those whose mode is read by them or by a module that they are in."""
    named = dict(root.named_modules())
    readers = tuple(f"{path}." if path else "" for path, module in named.items() if reads(module, "training"))
    yield from ((path, module) for path, module in named.items() if not path or f"{path}.".startswith(readers))


def reads(module: nn.Module, name: str) -> bool:
    """Tell whether code that a step runs may read an attribute of a module.

    The methods of torch's own modules are looked through; of other modules, and of those with hooks or methods of
    their own, any attribute may be read.

    Args:
        module: that has the attribute.
        name: of the attribute.

    Example:
        >>> reads(nn.LayerNorm(4), "eps"), reads(nn.Linear(4, 4), "in_features"), reads(nn.Dropout(), "p")
        (True, False, True)
    """
    names = None if _is_changed(module) else _names_read_by(cast("Hashable", type(module)))
    return names is None or name in names


def may_change_settings(loss: Callable[..., object], *modules: nn.Module) -> bool:
    """Tell whether a step may set attributes or modes of modules: only torch's own code is known not to.

    Args:
        loss: of the step.
        modules: roots of those that it runs.

    Example:
        >>> layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> may_change_settings(nn.functional.mse_loss, layers), may_change_settings(lambda x, y: x.sum(), layers)
        (False, True)
    """
    kinds: set[Any] = {type(module) for root in modules for module in root.modules()}
    return has_own_code(loss, *modules) or any(map(_sets_attributes, kinds))


def has_own_code(loss: Callable[..., object], *modules: nn.Module) -> bool:
    """Tell whether a step runs code that is not torch's.

    Args:
        loss: of the step.
        modules: roots of those that it runs.
    """
    function = loss.func if isinstance(loss, partial) else loss
    if not isinstance(loss, nn.Module) and not getattr(function, "__module__", "").startswith("torch."):
        return True
    parts = (module for root in modules for module in root.modules())
    return any(_is_changed(part) or _names_read_by(cast("Hashable", type(part))) is None for part in parts)


def _is_changed(module: nn.Module) -> bool:
    """Tell whether a module has hooks, or methods that its class has not."""
    attributes = vars(module)
    return any(attributes.get(hooks) for hooks in HOOKS) or any(callable(value) for value in attributes.values())


@cache
def _names_read_by(kind: Hashable) -> frozenset[str] | None:
    """Return the names in the methods of a class of torch's that run in a step; None for a class of others."""
    methods = _find_methods(cast("type[nn.Module]", kind))
    if methods is None:
        return None
    return frozenset(name for code in chain.from_iterable(methods.values()) for name in code.co_names)


@cache
def _sets_attributes(kind: Hashable) -> bool:
    """Tell whether ``forward``, or a method that it calls, may set attributes; True for a class that is not torch's."""
    methods = _find_methods(cast("type[nn.Module]", kind))
    if methods is None:
        return True
    called, found = {"forward"}, {"forward"}
    while found:
        codes = [*chain.from_iterable(methods.get(name, ()) for name in found)]
        if any(step.opname in {"STORE_ATTR", "DELETE_ATTR"} for code in codes for step in dis.get_instructions(code)):
            return True
        found = {name for code in codes for name in code.co_names} - called
        called |= found
    return not SETTERS.isdisjoint(called)


def _find_methods(kind: type[nn.Module]) -> dict[str, list[CodeType]] | None:
    """Return the code of each method of a class of torch's that runs in a step; None for a class of others.

    Each name has the code of all bases, and that of the functions inside of a method.
    """
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    if not all(base.__module__.startswith("torch.") for base in bases):
        return None
    methods: dict[str, list[CodeType]] = {}
    for name, member in chain.from_iterable(vars(base).items() for base in bases):
        function = member.fget if isinstance(member, property) else member
        if name not in NOT_IN_A_STEP and isinstance(function, FunctionType):
            methods.setdefault(name, []).extend(_with_inner(function.__code__))
    return methods


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def digest_option(value: object) -> object:
    """Return an option as what has the same hash in every process."""
    if value is None or isinstance(value, str):
        return _text_digest(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(digest_option, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return crc32(describe_value(value).encode())


@cache
def _text_digest(value: object) -> int:
    return crc32(str(value).encode())


def digest_autocasts() -> Iterator[int]:
    """Yield a number for each autocast that is enabled."""
    for device, is_enabled, dtype in current_autocasts():
        if is_enabled:
            yield _text_digest((device, dtype))


def submitted_batch(batch: MicrobatchSource) -> tuple[Any, ...] | None:
    """Return the batch that the user has passed, or those that were accumulated, if every rank passes all of it."""
    if isinstance(batch, AsyncPipelineBatches):
        newest = max(batch.batches, default=None)
        return None if newest is None else submitted_batch(batch.batches[newest])
    if isinstance(batch, AccumulatedBatches):
        return tuple(part.batch for part in batch.batches)
    return batch.batch if isinstance(batch, SlicedBatch) else None


def submitted_parts(batch: MicrobatchSource) -> list[SlicedBatch]:
    """Return what :func:`submitted_batch` returns, with where its tensors were."""
    if isinstance(batch, AsyncPipelineBatches):
        newest = max(batch.batches, default=None)
        return [] if newest is None else submitted_parts(batch.batches[newest])
    parts = batch.batches if isinstance(batch, AccumulatedBatches) else [batch]
    return [part for part in parts if isinstance(part, SlicedBatch)]


def digest_batch(batch: MicrobatchSource) -> Iterator[object]:
    """Yield numbers that are different for most other batches: of its form, and of some values."""
    values = submitted_batch(batch)
    if values is None:
        return
    if not (isinstance(values[0], Tensor) and isinstance(values[1], Tensor)):
        leaves, spec = tree_flatten(values)
        yield crc32(repr(spec).encode())
        parts: Iterable[Any] = chain.from_iterable(tree_flatten(part_value(leaf))[0] for leaf in leaves)
    else:
        parts = values
    for leaf in parts:
        if isinstance(leaf, Tensor):
            yield from (_text_digest(leaf.dtype), *leaf.shape, digest_values(leaf))
        else:
            yield crc32(describe_value(leaf).encode())


def part_value(leaf: object) -> object:
    """Return what a leaf of a batch was made of."""
    return leaf.value if isinstance(leaf, SamplePart) else leaf


def digest_values(tensor: Tensor) -> int:
    """Return a digest of some values of a tensor, evenly spaced; 0 on a device, where reading would wait for it."""
    if not tensor.is_cpu or not tensor.numel() or tensor.layout != torch.strided:
        return 0
    part = tensor if tensor.is_contiguous() else tensor[:1].contiguous()
    stride = math.ceil(part.numel() / NUM_COMPARED)
    some = part.as_strided((math.ceil(part.numel() / stride),), (stride,)).tolist()
    return hash(tuple([NAN if value != value else value for value in some])) & 0xFFFFFFFF


def describe_batch(batch: MicrobatchSource) -> list[list[str]]:
    """Return the form and the content of the batch that the user has passed."""
    values = submitted_batch(batch)
    if values is None:
        return []
    contents = [f"{digest_values(leaf):08x}" for leaf in batch_leaves(values) if isinstance(leaf, Tensor)]
    return [
        ["the form of the batch", describe_form(values)],
        ["the content of the batch", f"digest {' '.join(contents)}"],
    ]


def describe_form(values: tuple[Any, ...]) -> str:
    """Return the structure of a batch, the shapes of its tensors, and its other values.

    Example:
        >>> describe_form(({"x": torch.ones(4, 2), "flag": True}, torch.ones(4)))
        'float32 (4, 2), True, float32 (4,) in tuple[dict[x, flag], *]'
    """
    parts = [
        f"{dtype_name(leaf.dtype)} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else describe_value(leaf)
        for leaf in batch_leaves(values)
    ]
    return f"{', '.join(parts)} in {format_structure(values)}"


def format_structure(values: object) -> str:
    """Return the nesting of values, a leaf as ``*``."""
    if isinstance(values, Mapping):
        return f"dict[{', '.join(str(key) for key in values)}]"
    if isinstance(values, tuple | list):
        return f"{type(values).__name__}[{', '.join(map(format_structure, values))}]"
    return "*"
