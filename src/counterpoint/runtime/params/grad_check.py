"""Check that the gradients of every microbatch are finite, where backward leaves them.

Reading all gradients once more would cost a tenth of a step of a large multilayer perceptron, where memory bandwidth is
the bottleneck. But the gradient of a large linear layer is a product of two much smaller matrices. Its elements are at
most ``batch * max|grad_output| * max|input|``: if that is a finite number of the dtype, so is the gradient, and only
the two factors are read::

    grad_output.T  [outputs x batch]  @  input  [batch x inputs]   ->   weight.grad  [outputs x inputs]
         read                              read                          read only if the bound is too large

All other gradients are read once, in one call after the backward of each microbatch, or when they are moved away
during it. A call for each, while it is in the cache, would take longer: Python itself is not in the cache after a
product. Where the gradients are is kept for the update, which needs it, too.

Where several microbatches add to the gradient of a large linear layer's weight, it is read once, after the last of
them: what is not finite stays so. Which microbatch made it so is seen at its edges. An element of a factor that is not
finite makes a whole row or column of the product not finite, and each of them crosses the first column or row (the
first column need not be read where the layer has a bias, whose gradient is the sum of ``rows``)::

    rows.T          inputs              product
    a b c           g h i               . . ! .     h = inf: its column
    d e f           j k l               ! ! ! !     b = nan: its row
                                        . . ! .

An overflow in the sum of finite products may be missed there, or a change of the weight by a forward of the user's own.
It is found after the last microbatch, and reported with the range of microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from counterpoint.device.accelerator import Accelerator, HostCopy
from counterpoint.fabric.shm.magnitudes import (
    EdgeReader,
    FactorReader,
    MagnitudeReader,
    find_edge_magnitudes,
    find_magnitude,
    find_magnitudes,
    magnitude_tensor,
)
from counterpoint.fabric.shm.tensor_addresses import Addresses, Counts, copy_at, find_objects

GRAD_OF, DTYPE_OF, IS_CPU = attrgetter("grad"), attrgetter("dtype"), attrgetter("is_cpu")

MATRIX_DIMS = 2
"""Number of dims of a weight whose gradient is a matrix product."""

MIN_DEFERRED_BYTES = 1 << 16
"""The size from which reading the edges of a gradient takes less time than reading it whole."""

MAX_PARTS = 4
"""Parts of a group that are kept: most often it is checked whole, without matrices, or without unused parameters."""

ROUNDING_MARGIN = 0.5
"""Bounds up to this share of the largest number of a dtype are valid whatever the order of additions."""


def find_share_factor(dtypes: Iterable[torch.dtype], reduce_dtype: torch.dtype | None) -> float:
    """Return what makes shares of gradients' largest number those of the dtype in which ranks sum gradients.

    Args:
        dtypes: of the gradients.
        reduce_dtype: in which they are summed; None for their own.

    Example:
        >>> find_share_factor([torch.float32], None)
        1.0
        >>> find_share_factor([torch.float32], torch.float16) > 1e34
        True
    """
    if reduce_dtype is None:
        return 1.0
    largest_number = max((torch.finfo(dtype).max for dtype in dtypes if dtype.is_floating_point), default=0.0)
    return max(1.0, largest_number / (ROUNDING_MARGIN * torch.finfo(reduce_dtype).max))


class GradReport(NamedTuple):
    """What is known of the gradients of some microbatches.

    Args:
        micro: the first microbatch with a gradient that is not finite; -1 for none.
        name: the parameter whose gradient it is.
        share: an upper bound of the magnitudes of their sum, as a share of the largest number of the dtype in which
            they are summed.
    """

    micro: int = -1
    name: str = ""
    share: float = 0.0


NO_REPORT = GradReport()


class GradCheck:
    """Finds gradients of a rank that are not finite, with their microbatch and parameter.

    Args:
        is_enabled: whether gradients are read at all.
        accelerator: that the gradients are on; None for the host.
        share_factor: what shares of the largest number are multiplied with where gradients are summed in another dtype,
            by :func:`find_share_factor`.
        products: the parameters whose gradients are products of two matrices.
    """

    def __init__(
        self,
        *,
        is_enabled: bool = False,
        accelerator: Accelerator | None = None,
        share_factor: float = 1.0,
        products: Collection[str] = (),
    ) -> None:
        self.is_enabled = is_enabled
        self.products = products
        self.accelerator = accelerator
        self.share_factor = share_factor
        self.micro: int | None = None  # whose backward runs now
        self._nonfinite: dict[int, str] = {}  # the parameter, by microbatch
        self._shares: dict[int, float] = {}  # by microbatch
        self._on_device: list[DeviceMagnitudes] = []  # which are read at the commit, or later
        self._copy: HostCopy | None = None  # of them
        self._checked: dict[str, tuple[int, int]] = {}  # memory and version of a gradient that was checked
        self._accumulates = False  # whether a later backward adds to the gradients of this one
        self._deferred: dict[str, DeferredCheck] = {}  # by parameter
        self._new_edges: dict[str, Tensor] = {}  # of those that this backward has deferred
        self._readers: dict[str, MagnitudeReader] = {}  # of single gradients, by parameter
        self._factor_readers: dict[torch.dtype, FactorReader] = {}
        self.collected: CollectedGrads | None = None  # by the last check, for the update

    def begin_step(self) -> None:
        """Start a step, in which no gradient has been checked."""
        for found in (self._checked, self._deferred, self._new_edges):
            found.clear()
        self.drop_collected()

    def drop_collected(self) -> None:
        """Let go of the gradients of the last check, which change or are used up."""
        self.collected = None

    def clear(self) -> None:
        """Forget everything."""
        self.micro = self._copy = None
        self.drop_collected()
        for found in (self._nonfinite, self._shares, self._on_device, self._checked, self._deferred, self._new_edges):
            found.clear()

    @contextmanager
    def check_backward(self, micro: int, params: ParamGroup, *, accumulates: bool = False) -> Iterator[None]:
        """Check the gradients that the backward inside computes.

        Args:
            micro: the microbatch.
            params: those that it may give a gradient.
            accumulates: whether a later backward adds to all these gradients before anything else uses them.
        """
        if not self.is_enabled:
            yield
            return
        self.micro, self._accumulates = micro, accumulates
        self.drop_collected()
        try:
            yield
            if accumulates:
                self._check_accumulating(params)
            else:
                self._check_last(params)
        finally:
            self.micro, self._accumulates = None, False

    def check_group(self, group: ParamGroup) -> None:
        """Check the gradients that autograd has put on the parameters of a group."""
        if self.micro is None:
            return
        params = group.params
        left_out = [
            name
            for name, version in self._checked.items()
            if name in params and _version_of(params[name].grad) == version
        ]
        grads = [*map(GRAD_OF, params.values())]
        if left_out or not all(map(is_not, grads, repeat(None))):  # of tables with rows, or not in the forward
            left_out += [name for name, param in params.items() if param.grad is None and name not in left_out]
            group = group.without(tuple(left_out))
            grads = [*map(GRAD_OF, group.params.values())]
        addresses = group.reader.collect(grads) if grads else None
        if addresses is None:
            self.check_params(group.params)
            return
        share = group.reader.read_at(addresses) / group.reader.largest_number
        self._record(self.micro, group.params, share, group.reader.largest)
        self.collected = CollectedGrads(group, group.reader.dtype, grads, addresses, group.reader.counts)

    def check_params(self, params: Mapping[str, nn.Parameter]) -> None:
        """Check the gradients that autograd has put on parameters, except those of :meth:`mark_checked`."""
        if self.micro is None:
            return
        grads = [*map(GRAD_OF, params.values())]
        if self._checked or any(grad is None for grad in grads):
            pairs = [
                (name, grad)
                for name, grad in zip(params, grads, strict=True)
                if grad is not None and not (name in self._checked and self._checked[name] == _version_of(grad))
            ]
            self.check([name for name, _ in pairs], [grad for _, grad in pairs])
        else:
            self.check(params, grads)

    def check(self, names: Collection[str], grads: Sequence[Tensor]) -> None:
        """Check gradients of the microbatch whose backward runs.

        Args:
            names: of their parameters.
            grads: as computed.
        """
        if self.micro is None or not grads:
            return
        dtypes = {*map(DTYPE_OF, grads)}
        if len(dtypes) > 1:
            for dtype in dtypes:
                pairs = [(name, grad) for name, grad in zip(names, grads, strict=True) if grad.dtype == dtype]
                self.check([name for name, _ in pairs], [grad for _, grad in pairs])
            return
        largest_number = torch.finfo(dtypes.pop()).max
        if not all(map(IS_CPU, grads)):  # read at the commit, where the host waits for the device anyway
            magnitudes = torch.stack([magnitude_tensor(grad) for grad in grads]).double()
            self._on_device.append(DeviceMagnitudes(self.micro, list(names), magnitudes, largest_number))
            return
        self._record_magnitudes(self.micro, names, find_magnitudes(grads), largest_number)
        for name in names if self._deferred else ():
            self._deferred.pop(name, None)

    def check_rows(self, name: str, values: Tensor, num_rows: int) -> None:
        """Check the values that are added to rows of a table's gradient, each to any of the rows.

        Args:
            name: of the table.
            values: what is added.
            num_rows: how often one is added.
        """
        if self.micro is None or not values.is_cpu:
            self.check((name,), (values,))
            return
        share = find_magnitude(values) / torch.finfo(values.dtype).max
        if self._record_one(self.micro, name, share):  # all of them may be added to one row, after others
            self._shares[self.micro] += share * num_rows

    def is_bounded(self, rows: Tensor, inputs: Tensor) -> bool:
        """Check the gradient ``rows.T @ inputs`` of a weight by its factors; return whether it need not be read itself.

        Called before the product, which has to read them anyway, if they are smaller than it.

        Args:
            rows: the gradient of the layer's output, ``(batch, outputs)``.
            inputs: the layer's input, ``(batch, inputs)``.
        """
        if self.micro is None or not rows.is_cpu:
            return self.micro is None
        dtype = rows.dtype
        if dtype not in self._factor_readers:
            self._factor_readers[dtype] = FactorReader(dtype)
        share = self._factor_readers[dtype].read_product(rows, inputs) * len(rows) / torch.finfo(dtype).max
        is_finite = share < ROUNDING_MARGIN  # false for nan, too
        if is_finite:
            self._shares[self.micro] = self._shares.get(self.micro, 0.0) + share  # a weight may have several products
        return is_finite

    def check_one(self, name: str, grad: Tensor) -> None:
        """Check the gradient of one parameter, which always has the same shape."""
        if self.micro is None or not grad.is_cpu:
            self.check((name,), (grad,))
            return
        reader = self._readers.get(name)
        if reader is None:
            self._readers[name] = reader = MagnitudeReader([grad])
        self._record_one(self.micro, name, reader.read_one(grad) / torch.finfo(grad.dtype).max)
        self._deferred.pop(name, None)

    def defer(self, name: str, grad: Tensor) -> bool:
        """Let the gradient of a matrix be read after the last microbatch that adds to it; return whether that is later.

        Args:
            name: of the matrix.
            grad: its gradient in this microbatch and those before.
        """
        if not self._accumulates or not is_dense_matrix(grad, MIN_DEFERRED_BYTES):
            return False
        self._add_deferred(name, grad)
        self._new_edges[name] = grad
        return True

    def _add_deferred(self, name: str, grad: Tensor) -> None:
        assert self.micro is not None, "a backward runs"
        deferred = self._deferred.get(name)
        if deferred is None:
            self._deferred[name] = DeferredCheck(grad, self.micro, self.micro)
        else:
            deferred.grad, deferred.last = grad, self.micro

    def check_deferred(self, names: Iterable[str] | None = None) -> None:
        """Read whole the gradients whose check is deferred: of some parameters, or all."""
        for name in [*self._deferred] if names is None else [name for name in names if name in self._deferred]:
            self._check_deferred_one(name)

    def _check_deferred_one(self, name: str) -> None:
        deferred = self._deferred[name]
        share = find_magnitude(deferred.grad) / torch.finfo(deferred.grad.dtype).max
        self._record_one(deferred.last, name, share)
        del self._deferred[name]

    def _check_accumulating(self, group: ParamGroup) -> None:
        """Check the gradients of a group, to which a later backward adds, whole or at their edges."""
        self.check_group(group.without((*group.matrices,)))
        if self._new_edges:
            num_rows = [group.num_edge_rows.get(name, len(grad)) for name, grad in self._new_edges.items()]
            self._record_edges(self._new_edges, find_edge_magnitudes([*self._new_edges.values()], num_rows))
            self._new_edges.clear()
        grads: list[Tensor] = []
        left_out: list[str] = []
        for name, param in group.matrices.items():
            grad = param.grad
            if grad is None or (name in self._checked and self._checked[name] == _version_of(grad)):
                left_out.append(name)
            elif grad.is_sparse or has_hooks(param):  # a hook may change any element
                left_out.append(name)
                self.check((name,), (grad,))
            else:
                self._add_deferred(name, grad)
                grads.append(grad)
        if grads:
            part = group.without((*left_out,))
            self._record_edges(part.matrices, part.edges.read(grads))

    def _record_edges(self, names: Iterable[str], magnitudes: Iterable[float]) -> None:
        assert self.micro is not None, "a backward runs"
        for name, magnitude in zip(names, magnitudes, strict=True):
            if not magnitude < math.inf:  # true for nan, too
                self._nonfinite.setdefault(self.micro, name)

    def _check_last(self, group: ParamGroup) -> None:
        """Check the gradients of a group, to which no later backward adds, whole."""
        ended = [name for name in self._deferred if name in group.params]
        for name in ended:
            if group.params[name].grad is self._deferred[name].grad:
                self._checked.pop(name, None)
            else:  # not on the parameter, and no product of this backward
                self._check_deferred_one(name)
        self.check_group(group)
        for name in ended:
            self._deferred.pop(name, None)

    def mark_checked(self, name: str, grad: Tensor) -> None:
        """Let :meth:`check_params` pass over a parameter's gradient until it changes."""
        if self.micro is not None:
            self._checked[name] = _version_of(grad)

    def _record_one(self, micro: int, name: str, share: float) -> bool:
        """Record the share of one gradient; return whether it is finite."""
        is_finite = share < math.inf  # false for nan, too
        if is_finite:
            self._shares[micro] = max(self._shares.get(micro, 0.0), share)
        else:
            self._record_nonfinite(micro, name)
        return is_finite

    def _record_magnitudes(
        self, micro: int, names: Collection[str], magnitudes: npt.NDArray[np.float64], largest_number: float
    ) -> None:
        self._record(micro, names, float(magnitudes.max()) / largest_number, magnitudes)

    def _record(self, micro: int, names: Collection[str], share: float, magnitudes: npt.NDArray[np.float64]) -> None:
        if share < math.inf:  # false for nan, too
            self._shares[micro] = max(self._shares.get(micro, 0.0), share)
        else:
            first = int(np.flatnonzero(~np.isfinite(magnitudes))[0])
            self._record_nonfinite(micro, list(names)[first])

    def _record_nonfinite(self, micro: int, name: str) -> None:
        """Record a gradient that is not finite; with the microbatches that it sums if it is not seen at its edges."""
        deferred = self._deferred.get(name)
        if deferred is not None and deferred.first != micro:
            (at_edges,) = find_edge_magnitudes([deferred.grad], [len(deferred.grad)])
            if at_edges < math.inf:
                name = f"{name} (summed since microbatch {deferred.first})"
        self._nonfinite.setdefault(micro, name)

    def start_copy_to_host(self) -> HostCopy | None:
        """Start to copy what a report will need from the device; None if there is nothing."""
        if self._on_device:
            assert self.accelerator is not None, "the gradients are on a device"
            self._copy = self.accelerator.start_copy_to_host(torch.cat([one.values for one in self._on_device]))
        return self._copy

    def take_report(self, scope: Collection[int]) -> GradReport:
        """Return what is known of the gradients of some microbatches, and forget it; wait for those on a device."""
        self.check_deferred()
        copy = self._copy if self._copy is not None else self.start_copy_to_host()
        found, self._on_device, self._copy = self._on_device, [], None
        for one, values in _split_by_check(found, copy):
            self._record_magnitudes(one.micro, one.names, values.numpy(), one.largest_number)
        share = sum(self._shares.pop(micro) for micro in sorted(self._shares) if micro in scope) * self.share_factor
        nonfinite = [micro for micro in self._nonfinite if micro in scope]  # the first found is not due to another one
        names = [self._nonfinite.pop(micro) for micro in nonfinite]
        return GradReport(nonfinite[0], names[0], share) if nonfinite else NO_REPORT._replace(share=share)

    def take_device_report(self, accelerator: Accelerator) -> DeviceGradReport:
        """Return what is known of the gradients of this step, all on the device, without waiting; forget it.

        Args:
            accelerator: the device.
        """
        copy = self.start_copy_to_host()
        found, self._on_device, self._copy = self._on_device, [], None
        by_micro: dict[int, list[Tensor]] = {}
        for one in found:
            by_micro.setdefault(one.micro, []).append(one.values.amax() / one.largest_number)
        shares = [
            (micro, torch.stack(by_micro[micro]) if len(by_micro[micro]) > 1 else by_micro[micro][0][None])
            for micro in by_micro  # in the order of their backwards, since gradients of one are added to those before
        ]
        finite = [torch.where(values.isfinite(), values, torch.zeros_like(values)).amax() for _, values in shares]
        total = torch.stack(finite).sum() if finite else torch.zeros((), dtype=torch.float64, device=accelerator.device)

        def read_name(micro: int) -> str:
            """Return the first parameter whose gradient is not finite."""
            for one, values in _split_by_check(found, copy):
                if one.micro == micro and not bool(values.isfinite().all()):
                    return one.names[int(torch.nonzero(~values.isfinite())[0])]
            return ""

        largest = [(micro, values.amax()) for micro, values in shares]
        return DeviceGradReport(largest, total * self.share_factor, read_name)


class ParamGroup:
    """Parameters whose gradients are checked together.

    Args:
        params: by name.
        products: the parameters whose gradients are products of two matrices.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], products: Collection[str] = ()) -> None:
        self.params, self._products = params, products
        self.matrices = {
            name: param
            for name, param in params.items()
            if name in products and is_dense_matrix(param, MIN_DEFERRED_BYTES)
        }
        self.num_edge_rows = {name: find_num_edge_rows(name, params) for name in self.matrices}
        self.reader = MagnitudeReader([*params.values()])
        self._objects = find_objects(params.values())
        self._parts: dict[tuple[str, ...], ParamGroup] = {}  # without some parameters
        self._equal: Mapping[str, nn.Parameter] | None = None  # that was seen to have these parameters

    @cached_property
    def edges(self) -> EdgeReader:
        """Reader of the edges of the matrices' gradients."""
        return EdgeReader([*self.matrices.values()], [*self.num_edge_rows.values()])

    def without(self, names: tuple[str, ...]) -> ParamGroup:
        """Return the group without some parameters, which are the same in most steps and microbatches."""
        if not names:
            return self
        if names not in self._parts:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            self._parts[names] = ParamGroup(
                {name: p for name, p in self.params.items() if name not in names}, self._products
            )
        return self._parts[names]

    def find_weights(self) -> Addresses | None:
        """Return where the parameters are; None if one is not contiguous, or cannot be read by the library."""
        return self.reader.collect([*self.params.values()], self._objects)

    def has_all(self, params: Mapping[str, nn.Parameter]) -> bool:
        """Return whether these parameters, in this order, are those of the group; found out once for a mapping.

        Args:
            params: by name; nobody changes the mapping.
        """
        if self._equal is not params and is_same_sequence(params.values(), self.params.values()):
            self._equal = params
        return self._equal is params


def is_dense_matrix(tensor: Tensor, min_bytes: int) -> bool:
    """Return whether a tensor is a dense matrix on the host with at least so many bytes."""
    is_matrix = tensor.dim() == MATRIX_DIMS and tensor.layout == torch.strided
    return is_matrix and tensor.is_cpu and tensor.nbytes >= min_bytes


def has_hooks(param: nn.Parameter) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # noqa: SLF001 - they have no public name


def find_num_edge_rows(name: str, params: Mapping[str, nn.Parameter]) -> int:
    """Return of how many rows of a weight's gradient the first column is read, besides the first row.

    A row is not finite if an element of the gradient of the layer's output is not. Then the gradient of the bias, which
    is the sum of these, is not finite either, and it is read whole.

    Args:
        name: of the weight.
        params: by name, with its layer's bias if there is one.
    """
    bias = params.get(f"{name.removesuffix('weight')}bias")
    return 1 if bias is not None and bias.requires_grad and bias.shape == params[name].shape[:1] else len(params[name])


def is_same_sequence(first: Collection[object], second: Collection[object]) -> bool:
    """Return whether two collections have the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


@dataclass(slots=True)
class CollectedGrads:
    """Dense contiguous gradients of this step, and where they are.

    Args:
        group: the parameters, each of which has a gradient.
        dtype: of all.
        grads: of each, kept so that their memory is.
        addresses: of each.
        counts: their numbers of elements, as the native library reads them.
        weights: where the parameters are, after :meth:`find_weights`.
    """

    group: ParamGroup
    dtype: torch.dtype
    grads: Sequence[Tensor]
    addresses: Addresses
    counts: Counts
    weights: Addresses | None = None

    def find_weights(self) -> bool:
        """Find out where the parameters are; return whether all are contiguous, as their gradients are."""
        self.weights = self.group.find_weights()
        return self.weights is not None

    def are_of(self, params: Collection[Tensor]) -> bool:
        """Return whether these parameters, in this order, are those with the gradients."""
        return is_same_sequence(params, self.group.params.values())

    def copy_to(self, into: Tensor, starts: Counts) -> None:
        """Copy the gradients into a contiguous tensor of their dtype, each to where it starts there."""
        copy_at(self.addresses, self.counts, starts, into)


@dataclass(slots=True)
class DeferredCheck:
    """A gradient of a matrix that has to be read whole after the last microbatch that adds to it.

    Args:
        grad: the sum over microbatches.
        first: the first microbatch.
        last: the last one until now.
    """

    grad: Tensor
    first: int
    last: int


class DeviceMagnitudes(NamedTuple):
    """Magnitudes of gradients on a device.

    Args:
        micro: the microbatch that the gradients are of.
        names: of their parameters.
        values: of each gradient the largest magnitude, as float64.
        largest_number: of their dtype.
    """

    micro: int
    names: Sequence[str]
    values: Tensor
    largest_number: float


class DeviceGradReport(NamedTuple):
    """What is known on a device of the gradients of some microbatches.

    Args:
        shares: for each microbatch how large its gradients are, as a share of the largest number; inf or nan if one is
            not finite. In the order of their backwards.
        share: the sum of those that are finite.
        read_name: returns the first parameter whose gradient in a microbatch is not finite; waits for the device.
    """

    shares: Sequence[tuple[int, Tensor]]
    share: Tensor
    read_name: Callable[[int], str]


def _split_by_check(
    found: Sequence[DeviceMagnitudes], copy: HostCopy | None
) -> Iterator[tuple[DeviceMagnitudes, Tensor]]:
    """Yield what was checked on a device with its magnitudes in host memory; wait until these have arrived."""
    if copy is not None:
        yield from zip(found, torch.split(copy.wait(), [len(one.values) for one in found]), strict=True)


def _version_of(grad: Tensor | None) -> tuple[int, int]:
    return (0, 0) if grad is None else (grad.data_ptr(), grad._version)  # noqa: SLF001 - there is no other way to see it
