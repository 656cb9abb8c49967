"""Tensors of a model that are not parameters, and which tensors share memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.partitioning.dry_run import MODULE_ATTRIBUTES
from counterpoint.partitioning.stores import memory_extent, share_elements


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers and the other tensors in attributes of modules, with a name.

    All tensors of a list or a dict have the name of the attribute.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # which has no attributes in Python
            continue
        plain = {key: value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES}
        for key, value in {**plain, **module._buffers}.items():  # noqa: SLF001 - one that shares a name is another's
            for leaf in tree_leaves(value) if isinstance(value, list | tuple | dict | Tensor) else ():
                if isinstance(leaf, Tensor):
                    yield f"{path}.{key}".lstrip("."), leaf


def find_shared_memory(
    named: Iterable[tuple[str, Tensor, bool]],
) -> Iterator[tuple[tuple[str, bool], tuple[str, bool]]]:
    """Yield the names, with their marks, of each two tensors that have an element of memory in common.

    Args:
        named: tensors with a name and a mark; those without memory are left out.
    """
    extents = sorted(
        (
            (*memory_extent(tensor), name, is_marked, tensor)
            for name, tensor, is_marked in named
            if tensor.numel() and tensor.layout == torch.strided and not tensor.is_meta
        ),
        key=lambda extent: extent[:4],
    )
    for index, (_, stop, name, is_marked, tensor) in enumerate(extents):
        for start, _, other, is_other_marked, other_tensor in extents[index + 1 :]:
            if start >= stop:
                break
            if share_elements(tensor, other_tensor):
                yield (name, is_marked), (other, is_other_marked)
