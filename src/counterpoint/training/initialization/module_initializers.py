"""Initialize some parameters of a model by the functions of its modules, without memory for the others.

A model is initialized as ``model.apply(initialize)`` does it: each module once, after its children. ``initialize``
calls the module's ``reset_parameters()``, if it has one, and then ``init_weights(module)``, if the user gives one::

    blocks.0.fc                 reset_parameters()  uniform_(weight)         uniform_(bias)
                                                    key (seed, path, 0)      key (seed, path, 1)
    blocks.0.norm               reset_parameters()  fill_(weight)            zero_(bias)
    blocks.0, blocks, the model

Each random operation of a module has a generator of its own, whose seed is a hash of the run's seed, the module's path,
and the operation's number in that module. So the values of a parameter do not depend on what else is initialized: the
functions run on a copy of the model on the meta device, where operations cost nothing, and only the parameters that are
asked for have memory. Which functions write a parameter is known from one run in which none has.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from counterpoint.errors import PlanError
from counterpoint.partitioning.meta_copy import copy_to_meta
from counterpoint.training.options import InitWeights

RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""What torch calls the method of a module that initializes it."""


def derive_key(seed: int, path: str, number: int) -> int:
    """Return the seed of the generator of one random operation.

    Args:
        seed: of the run.
        path: of the module that is initialized.
        number: of the operation in this module, from 0.
    """
    digest = sha256(f"initialize {seed} {path} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class InitializerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each random operation its key, and notes which tensors are written.

    Args:
        seed: of the run.
        path: of the module that is initialized.
    """

    def __init__(self, seed: int, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.path, self.num_draws = seed, path, 0
        self.written: set[int] = set()  # storages

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operation of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Run an operation.

        Raises:
            PlanError: it draws from a generator of the user's.
        """
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            if any(isinstance(leaf, torch.Generator) for leaf in (*args, *kwargs.values())):
                raise PlanError(
                    f"the initialization of module {self.path!r} draws from a torch.Generator of its own, so that its "
                    "values would depend on what else is initialized in this process; draw from torch's default "
                    "generator, which is seeded for each operation"
                )
            torch.default_generator.manual_seed(derive_key(self.seed, self.path, self.num_draws))
            self.num_draws += 1
        if func._schema.is_mutable:  # noqa: SLF001 - it has no public name
            self._note_written(func, args, kwargs)
        return func(*args, **kwargs)

    def _note_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        arguments = func._schema.arguments  # noqa: SLF001 - as above
        given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = tree_leaves(given.get(argument.name))
                self.written.update(storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor))


def storage_id(tensor: Tensor) -> int:
    """Return what is equal for all views of a tensor, also on the meta device."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - others are 0 on the meta device
    return address


class ModuleInitializers:
    """The functions that initialize a model's parameters and buffers.

    Args:
        model: the user's, some of whose parameters or buffers are on the meta device; it is copied, not changed.
        seed: of the run.
        init_weights: called with each module, after its ``reset_parameters()``.

    Raises:
        PlanError: the model cannot be copied, or a function fails on the meta device.
    """

    def __init__(self, model: nn.Module, seed: int, init_weights: InitWeights | None = None) -> None:
        try:
            self._skeleton = copy_to_meta(model)
        except TypeError as error:
            raise PlanError(
                f"{type(model).__name__} is on the meta device, but cannot be copied, as its initialization needs: "
                f"{error}; make what cannot be copied when it is first used, or build the model on the CPU"
            ) from error
        self._seed, self._init_weights = seed, init_weights
        self._modules = list(children_first(self._skeleton))
        self._tensors = dict((*self._skeleton.named_parameters(), *self._skeleton.named_buffers()))
        own = {id(tensor): name for name, tensor in self._tensors.items()}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in self._tensors}
        for module in self._skeleton.modules():
            for table in (module._parameters, module._buffers):  # noqa: SLF001 - where initializers find them
                for key, tensor in table.items():
                    if tensor is not None:
                        self._places[own[id(tensor)]].append((table, key))
        self._written = {path: self._initialize(path, module, {}) for path, module in self._modules}

    def find_unwritten(self) -> list[str]:
        """Return the parameters and buffers that no function writes."""
        return [name for name in self._tensors if not any(name in names for names in self._written.values())]

    def find_module(self, name: str) -> str:
        """Return the path and type of the module that has a parameter or buffer, for errors."""
        path = name.rpartition(".")[0]
        kind = type(self._skeleton.get_submodule(path)).__name__
        return f"module {path!r} ({kind})" if path else kind

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Initialize tensors in place.

        Args:
            tensors: whole parameters and buffers by name.

        Raises:
            PlanError: a function reads parameters that have no memory.
        """
        for path, module in self._modules:
            if not self._written[path].isdisjoint(tensors):
                self._initialize(path, module, tensors)

    def _initialize(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """Run the functions of one module; return what they write.

        Args:
            path: of the module.
            module: of the copy.
            tensors: that have memory; the others are on the meta device.
        """
        mode = InitializerMode(self._seed, path)
        with self._registered(tensors) as registered, preserved_generators(self._seed, path):
            try:
                with torch.no_grad(), mode:
                    self._call(module)
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"the initialization of {self.find_module(f'{path}.')} failed: "
                    f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}; it runs on the meta device, "
                    "with memory for some of the parameters only: write each one from its shape alone, read no value "
                    "(item()), copy none from another, or give weights=... to read them from files"
                ) from error
            return self._find_written(mode, registered, tensors)

    def _call(self, module: nn.Module) -> None:
        reset = next(filter(callable, (getattr(module, name, None) for name in RESET_METHODS)), None)
        if reset is not None:
            reset()
        if self._init_weights is not None:
            self._init_weights(module)

    @contextmanager
    def _registered(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Let modules have these tensors inside, and theirs on the meta device afterwards."""
        registered = dict(self._tensors)
        for name, tensor in tensors.items():
            is_param = isinstance(self._tensors[name], nn.Parameter)
            registered[name] = nn.Parameter(tensor, requires_grad=False) if is_param else tensor
        try:
            for name in tensors:
                for table, key in self._places[name]:
                    table[key] = registered[name]
            yield registered
        finally:
            for name, places in self._places.items():
                for table, key in places:
                    table[key] = self._tensors[name]

    def _find_written(
        self, mode: InitializerMode, registered: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
    ) -> frozenset[str]:
        """Return the names of what was written or replaced; adopt the values of what was replaced.

        Raises:
            PlanError: it was replaced by another shape or dtype.
        """
        written = set()
        for name, tensor in registered.items():
            table, key = self._places[name][0]
            found = table.get(key)
            if found is not tensor:
                if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                    given = "None" if found is None else f"{found.dtype} {tuple(found.shape)}"
                    raise PlanError(
                        f"the initialization of {self.find_module(name)} replaces {name}, {tensor.dtype} "
                        f"{tuple(tensor.shape)}, by {given}; register it in its final shape and dtype"
                    )
                if name in tensors:
                    tensors[name].copy_(found.detach())
            if found is not tensor or storage_id(tensor) in mode.written:
                written.add(name)
        return frozenset(written)


def children_first(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path of each module and the module, once, in the order of ``nn.Module.apply``."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        yield from children_first(child, f"{path}.{name}".lstrip("."), seen)
    yield path, module


@contextmanager
def preserved_generators(seed: int, path: str) -> Iterator[None]:
    """Seed the generators of Python and NumPy for a module inside, and restore theirs and torch's afterwards."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(derive_key(seed, path, -1))
    if numpy is not None:
        numpy.random.seed(derive_key(seed, path, -2) & 0xFFFFFFFF)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
