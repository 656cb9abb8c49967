"""Find whether a forward reads values of tensors, by which other batches may take another way through its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class ValueReadDetector:
    """Finds whether Python code reads a value of a tensor, or a size that depends on values.

    A condition of an ``if`` reads one, and so do ``x[mask]``, ``nonzero`` and ``repeat_interleave``: the number of rows
    that they return is one that the samples of a batch decide on together.

    Attributes:
        has_read: whether it has.

    Example:
        >>> reads = ValueReadDetector()
        >>> with reads:
        ...     _ = torch.ones(3)[torch.tensor([True, False, True])]
        >>> reads.has_read
        True
    """

    def __init__(self) -> None:
        self.has_read = False
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        """Watch what runs inside; once more, if it was left."""
        self._modes.enter_context(_CallWatch(self))
        self._modes.enter_context(_OperationWatch(self))
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self._modes.close()


class _CallWatch(TorchFunctionMode):
    """Sees the calls that read memory without an operation of torch, such as ``tolist``."""

    def __init__(self, detector: ValueReadDetector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - any function of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function."""
        self.detector.has_read = self.detector.has_read or func in MEMORY_READS
        return func(*args, **(kwargs or {}))


MEMORY_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__})
"""Functions that return values of tensors to Python and run no operation of torch that says so."""


class _OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations whose results in Python depend on values, in whatever function of torch they are."""

    def __init__(self, detector: ValueReadDetector) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.detector = detector

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import its compiler to disable it here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - any operation of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Run the operation."""
        self.detector.has_read = self.detector.has_read or _reads_values(func, args)
        return func(*args, **(kwargs or {}))


def _reads_values(func: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401 - as above
    """Tell whether an operation returns a value to Python, or has an output whose size depends on values."""
    if func is torch.ops.aten.index.Tensor:  # an index of whole numbers has outputs of its own size
        return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
