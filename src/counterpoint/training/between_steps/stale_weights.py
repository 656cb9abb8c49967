"""Reads of the user's model between steps: right, or refused, where the ranks train copies or shards of its weights.

A parameter of the model that no rank of this process trains whole is out of date after a step. Its class then derives
from :class:`StaleTensor`, so that torch passes every operation on it, a forward, ``state_dict()`` or ``norm()`` alike,
to :meth:`StaleWeights.load` first::

    step | read, read | step | step | read        the first read after a step loads all weights;
           load                       load        without a read a step costs nothing

Where all ranks are in this process, the weights are then loaded into the model. In other processes they would have to
take part, so the read is refused, with the calls that gather. The gradients of the step are treated alike: a parameter
whose gradient is not its own derives from :class:`WithoutOwnGrad`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.errors import DataError

without_stale_reads = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - it has no public name
"""Context in which operations on stale tensors are torch's own: for code that reads no values."""

_METADATA_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cpu", "is_cuda", "is_meta",
    "is_sparse", "ndim", "nbytes", "itemsize", "names", "output_nr", "retains_grad", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks",
)  # fmt: skip

_METADATA_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "get_device", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__len__",
)  # fmt: skip

_METADATA_FNS = frozenset(
    [getattr(Tensor, name).__get__ for name in _METADATA_ATTRIBUTES if hasattr(getattr(Tensor, name, None), "__get__")]
    + [getattr(Tensor, name) for name in _METADATA_METHODS]
    + [getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""What may be asked of a stale tensor: nothing of it is a value."""

GRAD: Any = Tensor.grad
"""Torch's own attribute."""

GRAD_DROPPING_FNS = frozenset({"zero_grad", "_apply"})
"""Functions that ask for a gradient only to drop it, or to move it with the parameter."""


class StaleWeights:
    """The parameters and buffers of the user's model that a step leaves out of date, or without their gradients.

    Args:
        tensors: by name, of the model; each is a parameter or a buffer.
        plan: of the ranks, for errors.
        export: loads the trained weights into the model; None if ranks in other processes would have to take part.
        grads: the gradients that parameters do not have themselves.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        plan: str,
        export: Callable[[], None] | None,
        grads: StaleGrads | None = None,
    ) -> None:
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.plan = plan
        self.export = export
        self.grads = grads or StaleGrads({}, plan, dict, is_single_process=True)
        self.is_stale = False
        self.is_marked = False
        attributes = {"stale_weights": self, "stale_grads": self.grads}
        without_grad = type("ParameterWithoutOwnGrad", (WithoutOwnGrad, nn.Parameter), attributes)
        stale_param = type("StaleParameter", (StaleTensor, nn.Parameter), attributes)
        stale_classes = {
            nn.Parameter: type("StaleParameterWithoutOwnGrad", (StaleTensor, WithoutOwnGrad, nn.Parameter), attributes),
            Tensor: type("StaleTensorOfModel", (StaleTensor, Tensor), attributes),
        }
        self._classes = []  # of each tensor: the plain one, that when its values are loaded, that while they are stale
        for tensor in {id(tensor): tensor for tensor in (*tensors.values(), *self.grads.params.values())}.values():
            is_marked = isinstance(tensor, StaleTensor | WithoutOwnGrad)  # by ranks that share it
            plain = (nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor) if is_marked else type(tensor)
            if plain not in stale_classes:  # users' own classes stay
                continue
            has_grads = id(tensor) in self.grads.names
            current = without_grad if has_grads else plain
            stale = stale_classes[plain] if has_grads or plain is Tensor else stale_param
            self._classes.append((tensor, plain, current, stale if id(tensor) in self.names else current))

    def mark(self) -> None:
        """Mark all tensors as out of date, after a step."""
        self.is_stale = self.is_marked = True
        for tensor, _, _, stale_class in self._classes:
            tensor.__class__ = stale_class

    def mark_current(self) -> None:
        """Mark all tensors as up to date: their values have been loaded, but not their gradients."""
        self.is_stale, self.is_marked = False, True
        for tensor, _, current_class, _ in self._classes:
            tensor.__class__ = current_class

    def unmark(self) -> None:
        """Make all tensors plain, for code of the runtime that handles the model."""
        self.is_stale = self.is_marked = False
        for tensor, plain_class, _, _ in self._classes:
            tensor.__class__ = plain_class

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Make all tensors plain inside, and mark them again as they were."""
        was_stale, was_marked = self.is_stale, self.is_marked
        self.unmark()
        try:
            yield
        finally:
            if was_stale:
                self.mark()
            elif was_marked:
                self.mark_current()

    def load(self, tensor: Tensor) -> None:
        """Load the weights of all ranks into the model, because ``tensor`` is read.

        Raises:
            DataError: other processes would have to take part.
        """
        if self.export is None:
            plain_class = next(plain for other, plain, *_ in self._classes if other is tensor)
            name, replaced = self.names[id(tensor)], ""
            if not issubclass(plain_class, nn.Parameter):
                replaced = f"; to change this buffer, replace it by another tensor on all ranks (model.{name} = tensor)"
            raise DataError(
                f"{name} of the model is read{' or changed in place' if replaced else ''} after a step, but under "
                f"{self.plan} this process does not have the trained values; read them inside `with "
                f"step.full_weights() as model:`, or after step.export_weights(), which all ranks call{replaced}"
            )
        self.export()


class StaleTensor(Tensor):
    """A tensor whose values are loaded, or refused, before anything reads them."""

    stale_weights: StaleWeights

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Load the values if the function may read them; then call it."""
        kwargs = kwargs or {}
        if func not in _METADATA_FNS:
            for leaf in tree_leaves([args, kwargs]):
                if isinstance(leaf, StaleTensor):
                    leaf.stale_weights.load(leaf)
        with without_stale_reads():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - a parameter or buffer
        """Load the values, and copy what is then a plain tensor."""
        self.stale_weights.load(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as torch's
        """Load the values, and pickle what is then a plain tensor."""
        self.stale_weights.load(self)
        return self.__reduce_ex__(protocol)


class StaleGrads:
    """The gradients of the last step, which ranks have in other tensors than the parameters of the user's model.

    Args:
        params: by name, of the model.
        plan: of the ranks, for errors.
        read: returns the gradients by name; raises if the ranks do not have them.
        is_single_process: whether all ranks are in this process.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        plan: str,
        read: Callable[[], Mapping[str, Tensor]],
        *,
        is_single_process: bool,
    ) -> None:
        self.params, self.plan, self.read, self.is_single_process = params, plan, read, is_single_process
        self.names = {id(param): name for name, param in params.items()}
        self.is_loaded = False
        self.loaded: list[tuple[str, Tensor, int]] = []  # gradients, with their version counters

    def load(self, param: Tensor) -> None:
        """Give all parameters their gradients, because that of ``param`` is read.

        Raises:
            DataError: other processes would have to take part, or there are none.
        """
        if self.is_loaded:
            return
        if not self.is_single_process:
            raise DataError(
                f"the grad of {self.names[id(param)]} is read after a step, but under {self.plan} ranks in other "
                "processes have a part of it; call step.gradients(), or step.grad_norms(), on all ranks; clip_norm=... "
                "clips gradients"
            )
        grads = {name: grad for name, grad in self.read().items() if name in self.params}
        self.is_loaded = True
        for name, grad in grads.items():
            param = self.params[name]
            param.grad = grad.to(param.device)
            self.loaded.append((name, param.grad, param.grad._version))  # noqa: SLF001 - to see changes

    def drop(self) -> None:
        """Drop the gradients before the next step.

        Raises:
            DataError: one was changed in place.
        """
        loaded, self.loaded, self.is_loaded = self.loaded, [], False
        for name, grad, _ in loaded:
            if get_own_grad(self.params[name]) is grad:
                self.params[name].grad = None
        for name, grad, version in loaded:
            if grad._version != version:  # noqa: SLF001 - there is no other way to see it
                raise DataError(
                    f"the grad of {name} was changed after the step, which had applied it already, so this has no "
                    "effect; clip_norm=... and clip_value=... clip gradients before the update; write other changes "
                    "into the loss"
                )


class WithoutOwnGrad(Tensor):
    """A parameter whose gradient is loaded, or refused, when it is read."""

    stale_grads: StaleGrads

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the last step."""
        own = get_own_grad(self)
        if own is None and sys._getframe(1).f_code.co_name not in GRAD_DROPPING_FNS:  # noqa: SLF001 - see there
            self.stale_grads.load(self)
            own = get_own_grad(self)
        return own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Set it."""
        with without_stale_reads():
            GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        """Drop it."""
        self.grad = None

    def detach(self) -> Tensor:
        """Return the values, as torch's own."""
        _require_no_new_parameter(self.stale_grads.names.get(id(self), "a parameter"), self.stale_grads.plan)
        return super().detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy a plain parameter."""
        copied = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied


def get_own_grad(param: Tensor) -> Tensor | None:
    """Return what torch has as a parameter's gradient."""
    with without_stale_reads():
        grad: Tensor | None = GRAD.__get__(param)
        return grad


def _require_no_new_parameter(name: str, plan: str) -> None:
    """Raise if torch's class of parameters asks for a tensor's values, to make another parameter of the very tensor.

    Raises:
        DataError: it does.
    """
    if sys._getframe(2).f_code.co_name == "__new__":  # noqa: SLF001 - see there
        raise DataError(
            f"{name} of the model is made another parameter between two steps, as by registering a parametrization "
            f"(weight_norm), but under {plan} ranks train the one that it was; do it before the first step, or close() "
            "and call parallelize(...) again; nn.Parameter(param.detach().clone()) makes a copy"
        )
