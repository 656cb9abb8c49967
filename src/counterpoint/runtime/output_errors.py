"""Run a model to compare its outputs, and tell differences of outputs from rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.partitioning.dry_run import Inputs, ModuleAttributes, replace_tensors, split_call_args


def run_model(model: nn.Module, inputs: Inputs) -> Sequence[Any]:
    """Return the output tensors of the model, whose plain attributes are then as before."""
    args, kwargs = split_call_args(inputs)
    attributes = ModuleAttributes(model)
    try:
        return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
    finally:
        attributes.restore()


def find_rounding(model: nn.Module) -> float:
    """Return the largest relative difference of outputs that is rounding in the narrowest dtype of the parameters.

    Example:
        >>> [f"{find_rounding(nn.Linear(2, 2, dtype=dtype)):.0e}" for dtype in (torch.float64, torch.float32)]
        ['1e-14', '8e-06']
    """
    eps = max((torch.finfo(param.dtype).eps for param in model.parameters() if param.is_floating_point()), default=0.0)
    return min(64 * eps, math.sqrt(eps))


def largest_error(
    outputs: Sequence[Tensor], parts: Sequence[Tensor], rows: range, batch_size: int, rounding: float
) -> float:
    """Return the largest difference between some rows of outputs and those of these samples alone.

    Args:
        outputs: of a batch.
        parts: of some of its samples alone.
        rows: these samples.
        batch_size: samples of the batch.
        rounding: the largest difference that is rounding inside of the model.
    """
    return max(
        (
            _relative_error(output.detach(), part.detach(), rows, rounding)
            for output, part in _pair_rows(outputs, parts, rows, batch_size)
        ),
        default=0.0,
    )


def row_errors(
    outputs: Sequence[Tensor], parts: Sequence[Tensor], rows: range, batch_size: int, rounding: float
) -> Tensor:
    """Return what :func:`largest_error` does, for each row: ``(len(rows),)``."""
    errors = torch.zeros(len(rows), dtype=torch.float64)
    for output, part in _pair_rows(outputs, parts, rows, batch_size):
        if part.numel():
            largest = float(output.detach().abs().max()) or 1.0
            found = (output.detach()[rows.start : rows.stop] - part.detach()).abs().reshape(len(rows), -1).amax(1)
            found = found.double().cpu() / largest
            is_rounding = ~(found > max(torch.finfo(output.dtype).eps ** 0.5, rounding))
            errors = torch.maximum(errors, found.masked_fill(is_rounding, 0.0))
    return errors


def _pair_rows(
    outputs: Sequence[Tensor], parts: Sequence[Tensor], rows: range, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs that have a row for each sample, each with those of some of the samples."""
    for output, part in zip(outputs, parts, strict=False):
        has_rows = output.shape[:1] == (batch_size,) and part.shape == (len(rows), *output.shape[1:])
        if output.is_floating_point() and has_rows:
            yield output, part


def _relative_error(output: Tensor, part: Tensor, rows: range, rounding: float) -> float:
    """Return the difference of these rows, relative to the largest value; 0 if it is rounding."""
    if not part.numel():
        return 0.0
    largest = float(output.abs().max())
    error = float((output[rows.start : rows.stop] - part).abs().max()) / (largest or 1.0)
    return error if error > max(torch.finfo(output.dtype).eps ** 0.5, rounding) else 0.0


def is_from_rounding(
    model: nn.Module,
    inputs: Inputs,
    outputs: Sequence[Tensor],
    others: Sequence[Tensor],
    rows: range,
    batch_size: int,
) -> bool:
    """Tell whether rounding explains that outputs of samples are others in another batch.

    A sum over features may round otherwise where a batch has another size. If two scores are nearly equal, the largest
    of them may then be the other one (a router of experts, ``argmax``), and the output another one altogether. So
    each sample that differs runs alone, and again with values that are rounded otherwise: if its output changes as much
    by that alone, the difference says nothing about other samples.

    Args:
        model: in the mode in which it was run.
        inputs: some samples.
        outputs: those of the model for them.
        others: those of the model for another batch that has these samples.
        rows: where they are in it.
        batch_size: its number of samples.

    Returns:
        False for a model with weights of 16 bits, in which a unit in the last place is not a small change, and where
        many samples differ.
    """
    rounding = find_rounding(model)
    errors = row_errors(others, outputs, rows, batch_size, rounding).tolist()
    differing = [index for index, error in enumerate(errors) if error]
    if not has_fine_rounding(model) or len(differing) > MAX_TIES:
        return False
    with suppress(Exception):  # it need not take one sample
        return all(_has_near_tie(model, _take_sample(inputs, index, len(rows)), errors[index]) for index in differing)
    return False


MAX_TIES = 16
"""Samples with a near tie that are looked at."""


def _take_sample(inputs: Inputs, index: int, batch_size: int) -> Inputs:
    """Return one of the samples."""

    def take(leaf: Any) -> Any:  # noqa: ANN401 - of any type
        has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch_size
        return leaf[index : index + 1].clone() if has_samples else leaf

    return tree_map(take, inputs)


def _has_near_tie(model: nn.Module, sample: Inputs, error: float) -> bool:
    """Tell whether the output of a sample alone changes half as much as an error if values are rounded otherwise."""
    rounding, expected = find_rounding(model), run_model(model, sample)
    for weights, rounded in rounded_otherwise(model, sample):
        with replace_tensors(model, weights):
            changed = run_model(model, rounded)
        if largest_error(changed, expected, range(1), 1, rounding) >= error / 2:
            return True
    return False


def has_fine_rounding(model: nn.Module) -> bool:
    """Return whether no parameter has a dtype of 16 bits or less."""
    return all(torch.finfo(param.dtype).bits > 16 for param in model.parameters() if param.is_floating_point())


def rounded_otherwise(
    model: nn.Module, inputs: Inputs, others: Mapping[int, Tensor] = MappingProxyType({})
) -> Iterator[tuple[dict[int, Tensor], Inputs]]:
    """Yield weights, by ``id`` of the parameter, and inputs that differ from the given ones by units in the last place.

    Args:
        model: that has the weights.
        inputs: any nest of samples and other values.
        others: weights in the place of the model's, by ``id`` of the parameter.
    """
    generator = torch.Generator().manual_seed(0)

    def round_otherwise(values: Any, units: int) -> Any:  # noqa: ANN401 - of any type
        """Return another value for each one of a floating-point tensor, up to so many units larger or smaller."""
        if not (isinstance(values, Tensor) and values.is_floating_point() and values.layout is torch.strided):
            return values
        eps = torch.finfo(values.dtype).eps
        signs = torch.randint(-1, 2, values.shape, generator=generator, dtype=torch.int8).to(values.device)
        return (values.detach() * (1 + signs.double() * min(units * eps, math.sqrt(eps) / 4))).to(values.dtype)

    for units in ROUNDED_UNITS:
        for _ in range(DRAWS_PER_UNIT):
            weights = {id(param): round_otherwise(others.get(id(param), param), units) for param in model.parameters()}
            yield weights, tree_map(lambda leaf, units=units: round_otherwise(leaf, units), inputs)


ROUNDED_UNITS = (1, 4, 16, 64)
"""Units in the last place, relative to each value, by which it is changed: up to the rounding of a sum in a layer."""
DRAWS_PER_UNIT = 4
"""How often: a near tie is turned by about every second change."""
