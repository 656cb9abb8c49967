"""Several versions of the weights, each in memory of its own, for pipelines whose microbatches use older weights.

Autograd saves the weights' memory, not a copy, in a forward. So a version must not be written to while a microbatch
that used it is in flight. Before an update, the newest weights are copied to the memory of the version that no
microbatch will read any more, and the update is made there::

    history   [oldest ... newest]          advance:  copy newest -> oldest's memory, which becomes the newest
    memory       1     2     0

Forwards get the parameters of their version as separate leaf tensors; gradients on these are added to the one parameter
that the optimizer knows. Buffers have no versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterpoint.runtime.params.flat_params import FlatParams


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Memory of one version.

    Args:
        flat_weights: one buffer for each flat parameter object.
        unflattened: one tensor for every trainable parameter outside of these.
        leaves: what forwards are called with, by name: views of both, and frozen parameters.
    """

    flat_weights: tuple[Tensor, ...]
    unflattened: tuple[Tensor, ...]
    leaves: Mapping[str, Tensor]


class WeightVersions:
    """All versions of one rank's weights.

    Args:
        params: the rank's parameters by name; always views of the newest version.
        flat_params: where some of them are stored.
        count: number of versions.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], flat_params: Sequence[FlatParams], count: int) -> None:
        flattened = {name for storage in flat_params for name in storage.params}
        self.params = params
        self.flat_params = tuple(flat_params)
        self.unflattened = {
            name: param for name, param in params.items() if param.requires_grad and name not in flattened
        }
        self.versions = [self._allocate_version(is_first=index == 0) for index in range(count)]
        self.history = deque([0] * count, maxlen=count)  # index in ``versions`` of each version, the newest last

    def _allocate_version(self, *, is_first: bool) -> WeightVersion:
        """Return memory for one version, as tensors whose in-place changes autograd counts separately."""
        flat_weights = [storage.weights.data for storage in self.flat_params]
        unflattened = {name: param.data for name, param in self.unflattened.items()}
        if not is_first:
            flat_weights = [torch.empty_like(flat) for flat in flat_weights]
            unflattened = {name: torch.empty_like(tensor) for name, tensor in unflattened.items()}
        leaves: dict[str, Tensor] = dict(self.params)
        leaves.update({name: tensor.data.requires_grad_() for name, tensor in unflattened.items()})
        for storage, flat in zip(self.flat_params, flat_weights, strict=True):
            for slot in storage.layout.slots:
                leaves[slot.name] = flat[slot.start : slot.stop].view(slot.shape).data.requires_grad_()
        return WeightVersion(tuple(flat_weights), tuple(unflattened.values()), leaves)

    def read(self, version: int) -> Mapping[str, Tensor]:
        """Return the parameters by name as they were ``-version`` updates ago."""
        return self.versions[self.history[version - 1]].leaves

    def fold_grads(self, version: int) -> None:
        """Add the gradients on the leaves of a version to those of the rank's parameters."""
        leaves = self.read(version)
        for name, leaf in leaves.items():
            param, grad = self.params[name], leaf.grad
            if grad is None or leaf is param:
                continue
            leaf.grad = None
            param.grad = grad if param.grad is None else param.grad.add_(grad)

    def reset(self) -> None:
        """Make all versions equal to the newest, and drop their gradients."""
        self.history.extend([self.history[-1]] * len(self.history))
        for version in self.versions:
            for leaf in version.leaves.values():
                leaf.grad = None

    def advance(self, *, is_new: bool) -> None:
        """Begin a new newest version with the values of the current one; the parameters become views of it.

        Args:
            is_new: whether the weights will change; if not, the current version counts as the next one, too.
        """
        newest = self.history[-1]
        if not is_new:
            self.history.append(newest)
            return
        in_use = set(list(self.history)[1:])
        free = next(index for index in range(len(self.versions)) if index not in in_use)
        before, after = self.versions[newest], self.versions[free]
        for old, new in zip(
            before.flat_weights + before.unflattened, after.flat_weights + after.unflattened, strict=True
        ):
            new.copy_(old)
        for storage, flat in zip(self.flat_params, after.flat_weights, strict=True):
            storage.rebind_views(flat)
        for param, tensor in zip(self.unflattened.values(), after.unflattened, strict=True):
            param.data = tensor
        self.history.append(free)
