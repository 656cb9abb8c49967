"""Give parameters and buffers on torch's meta device their first values, directly where they are to be.

Where all ranks are in one process, the model gets its values at once. With one rank in each process, buffers and frozen
parameters do, and trainable parameters when ranks are built, unit by unit; in between they have stand-ins::

    parallelize()      first step: trace, check     build ranks, unit by unit          steps            close()
    meta               stand-ins                    write() --> flat weights, shards   (no memory)      meta
                                                       ^
                       initializers of modules, or weight files: only the ranges that this rank keeps

:meth:`InitialValues.write` is the one function that materializes a unit.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from typing import TypeVar

import torch
from torch import Tensor, nn

from counterpoint.checkpoint.tensor_slice import dtype_name
from counterpoint.checkpoint.weight_files import StoredTensor, WeightFiles
from counterpoint.errors import CheckpointError, PlanError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.runtime.loss.loss_parameters import find_loss_module
from counterpoint.runtime.params.flat_layout import FirstValues, ParamValues
from counterpoint.training.agreement.rank_facts import digest
from counterpoint.training.initialization.module_initializers import ModuleInitializers
from counterpoint.training.initialization.stand_in_memory import StandInMemory
from counterpoint.training.options import InitWeights, TrainingOptions

ModelT = TypeVar("ModelT", bound=nn.Module)
MAX_NAMES = 5
"""How many names an error lists."""
MAX_TEXT = 100
"""Longer lists of names are compared by a digest."""


def materialize(
    model: ModelT,
    *,
    seed: int = 0,
    init_weights: InitWeights | None = None,
    weights: str | PathLike[str] | None = None,
) -> ModelT:
    """Give all parameters and buffers on the meta device values on the CPU, the same that ranks would get.

    Args:
        model: changed in place; what has values keeps them, unless they are in the files.
        seed: of the run.
        init_weights: called with each module, children first, after its ``reset_parameters()``.
        weights: a safetensors file, an index of some, or a folder of either.

    Returns:
        The model.

    Raises:
        PlanError: a parameter has no initializer.
        CheckpointError: the files are not of this model.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(2, 1)
        >>> materialize(model).weight.device
        device(type='cpu')
    """
    values = InitialValues.find(model, seed, init_weights, weights)
    if values is not None:
        values.fill_now(values.names)
    return model


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """The part of a parameter that a tensor-parallel rank has.

    Args:
        dim: that is divided.
        count: into how many parts.
        index: of the part.
    """

    dim: int
    count: int
    index: int


class InitialValues:
    """The first values of a model's parameters and buffers.

    Args:
        model: some of whose tensors are on the meta device.
        initializers: of those that no file has; None if there are none.
        files: has the others; None for none.
        stored_names: the name in the files, by the first name in the model.

    Attributes:
        names: of the tensors on the meta device.
        deferred: the parameters that get their values when ranks are built.
        is_pending: whether these have none yet.
    """

    def __init__(
        self,
        model: nn.Module,
        initializers: ModuleInitializers | None,
        files: WeightFiles | None,
        stored_names: Mapping[str, str],
    ) -> None:
        self.model, self.stored_names = model, stored_names
        self._initializers, self._files = initializers, files
        self.names = [name for name, tensor in named_tensors(model) if tensor.is_meta]
        self.deferred: dict[str, nn.Parameter] = {}
        self.is_pending = False

    @staticmethod
    def find(
        model: nn.Module, seed: int, init_weights: InitWeights | None, weights: str | PathLike[str] | None
    ) -> InitialValues | None:
        """Return where a model's tensors on the meta device get their values from; None if it has none.

        Args:
            model: the user's.
            seed: of the run.
            init_weights: the user's function.
            weights: the user's files.

        Raises:
            PlanError: a tensor has no initializer, or the model has no tensor on the meta device that needs one.
            CheckpointError: the files are not of this model.
        """
        meta = {name: tensor for name, tensor in named_tensors(model) if tensor.is_meta}
        require_no_meta_attributes(model)
        if not meta:
            require_no_sources(model, init_weights, weights)
            return None
        require_replaceable(model, meta)
        files = None if weights is None else WeightFiles.open(fspath(weights))
        stored_names = {} if files is None else match_names(model, files, meta)
        initializers = None
        if meta.keys() - stored_names.keys():
            initializers = ModuleInitializers(model, seed, init_weights)
            require_initializers(initializers, meta.keys() - stored_names.keys())
        return InitialValues(model, initializers, files, stored_names)

    def begin(self, *, defers: bool) -> None:
        """Give the model memory: values for all, or stand-ins for trainable parameters, which ranks get later.

        Args:
            defers: whether they do.
        """
        params = dict(self.model.named_parameters())
        deferred = {name for name in self.names if defers and name in params and params[name].requires_grad}
        self.fill_now([name for name in self.names if name not in deferred])
        if self._files is not None:
            self._load_others()
        with StandInMemory() as memory:
            for name in sorted(deferred):
                replace_tensor(params[name], memory.make_tensor(params[name]))
        self.deferred = {name: params[name] for name in deferred}
        self.is_pending = bool(deferred)

    def fill_now(self, names: Iterable[str]) -> None:
        """Give tensors on the meta device memory and their values."""
        tensors = dict(named_tensors(self.model))
        filled = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype) for name in names}
        self.write([ParamValues(name, 0, values.view(-1)) for name, values in filled.items()], {})
        for name, values in filled.items():
            replace_tensor(tensors[name], values)

    def _load_others(self) -> None:
        """Read values from the files for tensors that had some."""
        assert self._files is not None, "there are files"
        for name, tensor in named_tensors(self.model):
            if name in self.stored_names and name not in self.names:
                values = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._files.read(self.stored_names[name], 0, values)
                with torch.no_grad():
                    assign_values(tensor.detach(), values)

    def for_rank(self, slices: Mapping[str, LocalSlice]) -> FirstValues | None:
        """Return the first values of one rank; None if parameters have theirs.

        Args:
            slices: the part that the rank has of each tensor-parallel parameter.
        """
        return FirstValues(self.deferred.keys(), partial(self.write, slices=slices)) if self.is_pending else None

    def write(self, targets: Sequence[ParamValues], slices: Mapping[str, LocalSlice]) -> None:
        """Write the first values of some ranges of parameters: the ones that a rank keeps of a unit.

        Of a file those bytes are read. Initializers need whole parameters, which are freed at the end.

        Args:
            targets: the ranges.
            slices: the part that the rank has of each tensor-parallel parameter; ranges are in it.
        """
        tensors = dict(named_tensors(self.model))
        whole: dict[str, Tensor] = {}
        for name, _, values in targets:
            if name not in self.stored_names:
                tensor, is_all = tensors[name], values.numel() == tensors[name].numel()
                whole[name] = values.view(tensor.shape) if is_all else torch.empty(tensor.shape, dtype=tensor.dtype)
        if whole:
            assert self._initializers is not None, "found for what no file has"
            self._initializers.write(whole)
        for name, first, values in targets:
            for start, offset, count in find_runs(tuple(tensors[name].shape), slices.get(name), first, values.numel()):
                part = values[offset : offset + count]
                if name not in whole:
                    assert self._files is not None, "it has the name"
                    self._files.read(self.stored_names[name], start, part)
                elif count < whole[name].numel():
                    part.copy_(whole[name].view(-1)[start : start + count])

    def finish(self) -> None:
        """Forget where values come from: ranks have them."""
        self.is_pending, self._initializers, self._files = False, None, None

    def return_to_meta(self) -> None:
        """Give the model's trainable parameters no memory again: those that were on the meta device go back to it."""
        for param in self.deferred.values():
            if not param.is_meta:
                replace_tensor(param, torch.empty_like(param, device="meta"))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer once, with its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def find_runs(
    shape: tuple[int, ...], part: LocalSlice | None, first: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """Yield contiguous runs of a parameter that are a range of a rank's part of it, as in torch's ``chunk``.

    Args:
        shape: of the whole parameter.
        part: the rank's; None for all of it.
        first: the first element of the range in the part, flattened.
        count: of elements.

    Yields:
        The first element in the whole parameter, flattened, where the run is in the range, and its length.

    Example:
        >>> list(find_runs((2, 4), LocalSlice(1, 2, 1), 1, 3))
        [(3, 0, 1), (6, 1, 2)]
    """
    if part is None or part.count == 1:
        yield first, 0, count
        return
    inner = math.prod(shape[part.dim + 1 :])
    chunk = -(-shape[part.dim] // part.count)
    begin, length = (
        part.index * chunk * inner,
        (min(shape[part.dim], (part.index + 1) * chunk) - part.index * chunk) * inner,
    )
    done = 0
    while done < count:
        row, column = divmod(first + done, length)
        run = min(length - column, count - done)
        yield row * shape[part.dim] * inner + begin + column, done, run
        done += run


def replace_tensor(tensor: Tensor, values: Tensor) -> None:
    """Let a parameter or buffer have other memory, on whichever device; it stays the same object."""
    is_param = isinstance(tensor, nn.Parameter)
    new = nn.Parameter(values, requires_grad=tensor.requires_grad) if is_param else values
    # torch.utils.swap_tensors, but for its check of weak references, which stay right: torch's LSTM has some
    torch._C._swap_tensor_impl(tensor, new)  # noqa: SLF001 - as above


def match_names(model: nn.Module, files: WeightFiles, meta: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name in the files for each tensor that they have, by its first name in the model.

    Args:
        model: the user's.
        files: of the user.
        meta: tensors that need values.

    Raises:
        CheckpointError: a parameter or a persistent buffer is missing, or a tensor is of no model, or of another one.
    """
    saved = set(model.state_dict(keep_vars=True))
    first_names = {id(tensor): name for name, tensor in named_tensors(model)}
    every = [
        (name, tensor)
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
        if name in saved
    ]
    known = dict(every)
    unexpected = [name for name in files.tensors if name not in known]
    if unexpected:
        raise CheckpointError(
            f"{files.path} has {_list_names(unexpected)}, which {type(model).__name__} does not have"
            f"{_nearest(unexpected[0], known)}; give the weights of this model"
        )
    stored = {first_names[id(tensor)]: name for name, tensor in every if name in files.tensors}
    needed = {first_names[id(tensor)] for tensor in known.values()}
    missing = [name for name in meta if name in needed and name not in stored]
    if missing:
        raise CheckpointError(
            f"{files.path} does not have {_list_names(missing)} of {type(model).__name__}"
            f"{_nearest(missing[0], files.tensors)}; a file has all parameters and persistent buffers that are on the "
            "meta device: give all files, or build what they do not have on the CPU"
        )
    for name, tensor in every:
        if name in files.tensors:
            _require_same_form(name, tensor, files.tensors[name])
    return stored


def _require_same_form(name: str, tensor: Tensor, stored: StoredTensor) -> None:
    """Raise unless a stored tensor has the shape and dtype of the model's.

    Raises:
        CheckpointError: it has not.
    """
    own, found = (tensor.dtype, tuple(tensor.shape)), (stored.dtype, stored.shape)
    if own != found:
        remedy = "build the model with the sizes of the file"
        if own[1] == found[1]:
            remedy = f"convert the model, which costs nothing on the meta device: model.to({found[0]})"
        raise CheckpointError(
            f"{stored.path} has {name} in {dtype_name(found[0])} {found[1]}, the model in {dtype_name(own[0])} "
            f"{own[1]}; {remedy}"
        )


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} others" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (the nearest name to {name} is {near[0]})" if near else ""


def require_initializers(initializers: ModuleInitializers, names: Iterable[str]) -> None:
    """Check that functions initialize these tensors.

    Raises:
        PlanError: none initializes one of them.
    """
    unwritten = sorted(set(initializers.find_unwritten()).intersection(names))
    if unwritten:
        raise PlanError(
            f"{_list_names(unwritten)} {'is' if len(unwritten) == 1 else 'are'} on the meta device, where tensors have "
            f"no values, and neither reset_parameters() of {initializers.find_module(unwritten[0])} nor init_weights "
            "writes them; give the module a method reset_parameters() that does, or give init_weights=..., a function "
            "that gets each module, or weights=..., a safetensors file"
        )


def require_no_sources(model: nn.Module, init_weights: InitWeights | None, weights: str | PathLike[str] | None) -> None:
    """Check that no values are given for a model that has its own.

    Raises:
        PlanError: some are.
    """
    given = [name for name, value in (("init_weights", init_weights), ("weights", weights)) if value is not None]
    if given:
        raise PlanError(
            f"{given[0]} gives values to parameters on the meta device, but {type(model).__name__} has none there; "
            f'build it inside `with torch.device("meta"):`, or omit {given[0]} and call '
            f"{'model.apply(...)' if given == ['init_weights'] else 'model.load_state_dict(...)'}"
        )


def require_no_meta_attributes(model: nn.Module) -> None:
    """Check that no plain attribute of a module is a tensor on the meta device, which nothing could give values.

    Raises:
        PlanError: one is.
    """
    own = {id(tensor) for _, tensor in named_tensors(model)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and id(value) not in own:
                raise PlanError(
                    f"the attribute {f'{path}.{name}'.lstrip('.')} is a tensor on the meta device, and neither a "
                    "parameter nor a buffer, so that nothing gives it values; register it as a buffer that "
                    "reset_parameters() writes, or make it with device='cpu'"
                )


def require_replaceable(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors on the meta device can be given memory.

    Raises:
        PlanError: one is of a class of its own, or has hooks on its gradient.
    """
    for name, tensor in tensors.items():
        if type(tensor) not in {nn.Parameter, Tensor}:
            raise PlanError(
                f"{name} on the meta device is a {type(tensor).__name__}; only plain parameters and buffers get "
                "values from initializers and files: build this one on the CPU"
            )
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # noqa: SLF001 - no other way
            raise PlanError(
                f"{name} of {type(model).__name__} is on the meta device and has a hook on its gradient, which would "
                "be lost when it gets memory; register hooks in the loss or the forward, or build it on the CPU"
            )


def begin_model(
    model: nn.Module, loss: object, options: TrainingOptions, environment: RankEnvironment | None
) -> InitialValues | None:
    """Give a model on the meta device memory before its ranks are built; None for a model that has values.

    Args:
        model: the user's.
        loss: the user's.
        options: of the run.
        environment: of this process; if there are others, parameters get their values when ranks are built.

    Raises:
        PlanError: something cannot get values.
        CheckpointError: the files are not of this model.
    """
    own, module = {id(one) for one in model.parameters()}, find_loss_module(loss)
    for name, param in () if module is None else module.named_parameters():
        if param.is_meta and id(param) not in own:
            raise PlanError(f"{name} of the loss is on the meta device; build the loss outside of torch.device('meta')")
    values = InitialValues.find(model, options.seed, options.init_weights, options.weights)
    if values is not None:
        device = options.device if environment is None or options.device is not None else environment.device
        has_peers = environment is not None and environment.world_size > 1
        values.begin(defers=has_peers and (device is None or str(device) == "cpu"))
    return values


def describe_sources(values: InitialValues | None) -> list[list[str]]:
    """Return what gets first values, and from where, which must be equal on all ranks."""
    names = [] if values is None else values.names
    sources = [f"{name}{' of a file' if values and name in values.stored_names else ''}" for name in names]
    text = ", ".join(sources) or "nothing"
    return [["what is on the meta device", text if len(text) < MAX_TEXT else f"{len(names)} tensors, {digest(text)}"]]
