"""Reads of the user's model between steps: right, or refused, where the ranks train copies or shards of its weights.

A parameter of the model that no rank of this process trains whole is out of date after a step. Its class then derives
from :class:`StaleTensor`, so that torch passes every operation on it, a forward, ``state_dict()`` or ``norm()`` alike,
to :meth:`StaleWeights.load` first::

    step | read, read | step | step | read        the first read after a step loads all weights;
           load                       load        without a read a step costs nothing

Where all ranks are in this process, the weights are then loaded into the model. In other processes they would have to
take part, so the read is refused, with the calls that gather.
"""

from __future__ import annotations

import copy
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
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "is_cpu", "is_cuda", "is_meta",
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


class StaleWeights:
    """The parameters and buffers of the user's model that a step leaves out of date.

    Args:
        tensors: by name, of the model; each is a parameter or a buffer.
        plan: of the ranks, for errors.
        export: loads the trained weights into the model; None if ranks in other processes would have to take part.
    """

    def __init__(self, tensors: Mapping[str, Tensor], plan: str, export: Callable[[], None] | None) -> None:
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.plan = plan
        self.export = export
        self.is_stale = False
        stale_classes = {
            plain: type(f"Stale{plain.__name__}", (StaleTensor, plain), {"stale_weights": self})
            for plain in (nn.Parameter, Tensor)
        }
        self._classes = [  # the plain class of each tensor, and the one while it is stale; users' own classes stay
            (tensor, type(tensor), stale_classes[type(tensor)])
            for tensor in tensors.values()
            if type(tensor) in stale_classes
        ]

    def mark(self) -> None:
        """Mark all tensors as out of date, after a step."""
        self.is_stale = True
        for tensor, _, stale_class in self._classes:
            tensor.__class__ = stale_class

    def unmark(self) -> None:
        """Make all tensors plain: before a step, or when their values have been loaded."""
        self.is_stale = False
        for tensor, plain_class, _ in self._classes:
            tensor.__class__ = plain_class

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Make all tensors plain inside, for code of the runtime that handles the model."""
        was_stale = self.is_stale
        self.unmark()
        try:
            yield
        finally:
            if was_stale:
                self.mark()

    def load(self, tensor: Tensor) -> None:
        """Load the weights of all ranks into the model, because ``tensor`` is read.

        Raises:
            DataError: other processes would have to take part.
        """
        if self.export is None:
            raise DataError(
                f"{self.names[id(tensor)]} of the model is read after a step, but under {self.plan} this process does "
                "not have the trained values; read them inside `with step.full_weights() as model:`, or after "
                "step.export_weights(), which all ranks call"
            )
        self.export()
