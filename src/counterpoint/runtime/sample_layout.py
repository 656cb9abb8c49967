"""Where the samples of a batch are: along dim 0 of its tensors, along another dim, in a list, or nowhere.

What lies along dim 0 stays as it is. Other parts of a batch are marked before it is cut into microbatches::

    (x, state, adjacency)   batch_dims={"state": 1}, shared=("adjacency",)
    (x, SamplePart(state, 1), SamplePart(adjacency, None))        marked
    (x[2:4], state[:, 2:4], adjacency)                            a microbatch

A list of texts that is as long as the batch has one for each sample, as torch's ``default_collate`` makes it. A list of
other values of that length, such as numbers, may also be for all samples, so that it is an error to cut it.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.data.batch_form import ForwardArguments, split_targets
from counterpoint.errors import DataError, PlanError
from counterpoint.partitioning.pytree import has_plain_entries

TARGETS = "targets"
"""The name of the targets as a whole."""


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A part of a batch whose samples do not lie along dim 0 of tensors.

    Args:
        value: a nest of tensors, or a list.
        dim: along which the samples lie; ``list`` for a list with an entry for each of them, ``unknown`` for a list
            that may have one, or may belong to all samples; None if the value does.
        name: of the part of the batch, for errors.
    """

    value: Any
    dim: int | Literal["list", "unknown"] | None
    name: str = ""

    def lengths(self) -> set[int]:
        """Return the numbers of samples, one if the part is right."""
        if self.dim is None:
            return set()
        if isinstance(self.dim, str):
            return {len(self.value)}
        leaves = tree_leaves(self.value, is_leaf=is_plain_list)
        lengths = {leaf.shape[self.dim] for leaf in leaves if isinstance(leaf, Tensor)}
        return lengths or {len(leaf) for leaf in leaves if is_plain_list(leaf)}

    def slice(self, start: int, stop: int) -> Any:  # noqa: ANN401 - any nest of tensors
        """Return samples ``start`` to ``stop``; what belongs to all samples as it is.

        Raises:
            DataError: these are not all samples, and what belongs to them is unknown.
        """
        if self.dim is None or (self.dim == "unknown" and (start, stop) == (0, len(self.value))):
            return self.value
        if self.dim == "unknown":
            raise DataError(
                f"{self.name} has the list {reprlib.repr(self.value)} in a batch of {len(self.value)} samples, so it "
                "may have an entry for each sample, or belong to all of them, but the batch is divided; make a tensor "
                f"of numbers that belong to samples, or say which it is: batch_dims={{{self.name!r}: 0}} if it has an "
                f"entry for each sample, shared=({self.name!r},) if it belongs to all"
            )
        if self.dim == "list":
            return self.value[start:stop]
        dim = self.dim
        return self._map(lambda leaf: leaf.narrow(dim, start, stop - start), lambda values: values[start:stop])

    def take(self, indices: Sequence[int]) -> SamplePart:
        """Return the part with other samples; what belongs to all samples as it is."""
        if self.dim is None:
            return self
        if isinstance(self.dim, str):
            whole = self.slice(0, len(self.value))
            return SamplePart(type(whole)(whole[index] for index in indices), self.dim, self.name)
        dim = self.dim
        value = self._map(
            lambda leaf: leaf.index_select(dim, torch.tensor(indices, device=leaf.device)),
            lambda values: type(values)(values[index] for index in indices),
        )
        return SamplePart(value, self.dim, self.name)

    def _map(self, of_tensor: Callable[[Tensor], Tensor], of_list: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - as above
        """Return the value with other tensors, and other lists without tensors that have an entry for each sample."""
        lengths = self.lengths()

        def convert(leaf: Any) -> Any:  # noqa: ANN401 - as above
            if isinstance(leaf, Tensor):
                return of_tensor(leaf)
            return of_list(leaf) if is_plain_list(leaf) and {len(leaf)} == lengths else leaf

        return tree_map(convert, self.value, is_leaf=is_plain_list)


class SampleLayout:
    """What the options say about the parts of a batch, by the names of the forward's arguments.

    Args:
        model: names positional inputs.
        batch_dims: the dim of the samples, by name; 0 for other names.
        shared: the names of what belongs to all samples.
    """

    def __init__(self, model: nn.Module, batch_dims: Mapping[str, int], shared: Sequence[str]) -> None:
        self.dims: dict[str, int | None] = {**batch_dims, **dict.fromkeys(shared)}
        self.arguments = ForwardArguments.of(model)
        try:
            self.forward_names = list(inspect.signature(model.forward).parameters)
        except ValueError:  # a compiled script has no signature
            self.forward_names = []
        self.seen: dict[tuple[str, int], set[bool]] = {}  # of lists of texts, whether they were as long as the batch

    def split(self, batch: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
        """Return the inputs of the model and what the loss gets, marked."""
        return self.mark(*split_targets(batch, self.arguments))

    def mark(self, inputs: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
        """Return inputs and targets with the parts marked whose samples do not lie along dim 0.

        Raises:
            PlanError: an option names what the batch does not have.
            DataError: a tensor has no such dim, or a list can be read in two ways.
        """
        if type(inputs) is Tensor and type(targets) is Tensor and not self.dims:  # the common case, and fast
            return inputs, targets
        if self.dims:
            inputs, targets = self._mark_named(inputs, targets)
        return self._mark_plain_lists(*mark_lists(inputs, targets))

    def _mark_named(self, inputs: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
        known: list[str] = []

        def mark(name: str, value: Any) -> Any:  # noqa: ANN401 - any nest
            known.append(name)
            if name not in self.dims:
                return value
            dim = self.dims[name]
            for leaf in tree_leaves(value):
                if dim is not None and isinstance(leaf, Tensor) and not 0 <= dim < leaf.dim():
                    raise DataError(
                        f"batch_dims says that the samples of {name} lie along dim {dim}, but it has the shape "
                        f"{tuple(leaf.shape)}; dims are counted from 0: name one that it has"
                    )
            return SamplePart(value, dim, name)

        inputs, targets = self._map_parts(mark, inputs, targets)
        unknown = sorted(self.dims.keys() - set(known))
        if unknown:
            raise PlanError(
                f"batch_dims and shared name {', '.join(unknown)}, but the parts of the batch are "
                f"{', '.join(known)}; name arguments of forward, keys of a dict of targets, or {TARGETS!r}"
            )
        return inputs, targets

    def _mark_plain_lists(self, inputs: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
        """Mark the lists without tensors that are as long as the batch, unless an option says what they are."""
        parts: list[Any] = []
        self._map_parts(lambda _, value: parts.append(value), inputs, targets)
        lists = [leaf for part in parts for leaf in tree_leaves(part, is_leaf=is_plain_list) if is_plain_list(leaf)]
        if not lists:
            return inputs, targets
        lengths = {length for leaf in tree_leaves((inputs, targets)) for length in _lengths(leaf) if length is not None}
        lengths = lengths or {len(values) for values in lists if _is_text(values)}
        if len(lengths) != 1 or lengths <= {0, 1}:  # the samples are counted, and one is never divided
            return inputs, targets
        num_samples = lengths.pop()
        return self._map_parts(partial(self._mark_plain_list, num_samples=num_samples), inputs, targets)

    def _mark_plain_list(self, name: str, value: Any, num_samples: int) -> Any:  # noqa: ANN401 - any nest
        num_lists = 0

        def mark(values: Any) -> Any:  # noqa: ANN401 - as above
            nonlocal num_lists
            if not is_plain_list(values) or all(leaf is None for leaf in tree_leaves(values)):
                return values
            is_text, has_lists = _is_text(values), any(map(is_plain_list, values))
            if len(values) != num_samples and has_lists:
                return type(values)(mark_all(entry) for entry in values)
            kinds = self.seen.setdefault((name, num_lists), set()) if is_text else set()
            num_lists += 1
            if is_text:
                kinds.add(len(values) == num_samples)
            if len(values) != num_samples:
                return SamplePart(values, "list", name) if len(kinds) > 1 else values  # which has no sample's length
            may_be_nested = has_lists and all(is_plain_list(entry) and len(entry) == num_samples for entry in values)
            return SamplePart(values, "list" if is_text and not may_be_nested and len(kinds) == 1 else "unknown", name)

        def mark_all(values: Any) -> Any:  # noqa: ANN401 - as above
            return tree_map(mark, values, is_leaf=is_plain_list)

        return mark_all(value)

    def _map_parts(self, mark: Callable[[str, Any], Any], inputs: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
        """Return what a function of name and value makes of the parts of a batch that options can name."""
        if isinstance(inputs, Mapping):
            inputs = {name: mark(name, value) for name, value in inputs.items()}
        elif type(inputs) is tuple:
            names = [*self.forward_names, *(str(index) for index in range(len(self.forward_names), len(inputs)))]
            inputs = tuple(mark(name, value) for name, value in zip(names, inputs, strict=False))
        else:
            inputs = mark(next(iter(self.forward_names), "0"), inputs)
        if isinstance(targets, Mapping) and TARGETS not in self.dims:
            targets = {name: mark(name, value) for name, value in targets.items()}
        else:
            targets = mark(TARGETS, targets)
        return inputs, targets


def mark_lists(inputs: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401 - of any form
    """Return inputs and targets with the lists marked that have an entry for each sample.

    A list of tensors is either that, as of images of any sizes, or has several tensors with the samples along dim 0.

    Raises:
        DataError: it could be both.

    Example:
        >>> import torch
        >>> inputs, targets = mark_lists([torch.ones(3, 4), torch.ones(3, 2)], torch.ones(2))
        >>> inputs.slice(0, 1)[0].shape, targets.shape
        (torch.Size([3, 4]), torch.Size([2]))
    """
    lists = [*find_tensor_lists(inputs), *find_tensor_lists(targets)]
    if not lists:
        return inputs, targets
    in_lists = {id(leaf) for values in lists for leaf in tree_leaves(values)}
    others = {
        length for leaf in tree_leaves((inputs, targets)) if id(leaf) not in in_lists for length in _lengths(leaf)
    }
    list_lengths = {len(values) for values in lists}
    along_dim_0 = {length for values in lists for leaf in tree_leaves(values) for length in _length(leaf)}
    may_be_lists = len(list_lengths | others) == 1
    may_be_tensors = len(along_dim_0 | others) == 1 and None not in along_dim_0
    if may_be_lists and may_be_tensors and list_lengths != {1}:
        raise DataError(
            f"the batch has a list of {list_lengths.pop()} entries whose tensors have {along_dim_0.pop()} entries "
            "along dim 0, so it may have a tensor for each sample, or several tensors with all samples; give a tuple "
            "for several tensors, or stack the samples in one tensor"
        )
    if not may_be_lists or may_be_tensors:
        return inputs, targets
    return _mark_each_list(inputs), _mark_each_list(targets)


def first_length(values: Any) -> int:  # noqa: ANN401 - any nest
    """Return the number of samples of the first part of a batch that has some; 1 if none has."""
    for leaf in tree_leaves(values):
        lengths = leaf.lengths() if isinstance(leaf, SamplePart) else {size for size in _length(leaf) if size}
        if lengths:
            return max(lengths)
    return 1


def is_plain_list(values: object) -> bool:
    """Tell whether a value is a list or a tuple with entries, but without tensors, and not marked inside."""
    return has_plain_entries(values) and not any(isinstance(leaf, SamplePart) for leaf in tree_leaves(values))


def _is_text(values: Any) -> bool:  # noqa: ANN401 - a list
    """Tell whether a list has texts alone, and lists of them."""
    return all(isinstance(leaf, str | bytes) for leaf in tree_leaves(values))


def find_tensor_lists(values: Any) -> Iterator[list[Any]]:  # noqa: ANN401 - any nest
    """Yield the outermost lists with tensors in every entry."""
    if type(values) is list:
        if values and all(any(isinstance(leaf, Tensor) for leaf in tree_leaves(entry)) for entry in values):
            yield values
    elif isinstance(values, Mapping | tuple):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from find_tensor_lists(value)


def _mark_each_list(values: Any) -> Any:  # noqa: ANN401 - any nest
    if any(found is values for found in find_tensor_lists(values)):
        return SamplePart(values, "list")
    if isinstance(values, Mapping):
        return {key: _mark_each_list(value) for key, value in values.items()}
    if isinstance(values, tuple):
        parts = [_mark_each_list(value) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else tuple(parts)
    return values


def _lengths(leaf: object) -> set[int] | set[int | None]:
    """Return the numbers of samples that a leaf of a batch may have."""
    return leaf.lengths() if isinstance(leaf, SamplePart) else _length(leaf)


def _length(leaf: object) -> set[int | None]:
    """Return the length of a tensor along dim 0, None if it has no dims; nothing for another value."""
    if not isinstance(leaf, Tensor):
        return set()
    return {leaf.size(0) if leaf.dim() else None}
