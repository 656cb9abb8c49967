"""Weights of several versions, each in memory of its own, for streams whose microbatches meet older ones.

What autograd keeps of a forward is the memory of the weights that were used. So a version is never written to while a
microbatch is under way that has met it: before an update the newest weights are copied to the memory of the version
that nobody will read any more, and the update is made there. Forwards get the parameters of their version as tensors
of their own; their gradients are those of the one parameter that the optimizer knows. Buffers have no versions.
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
    """One version's memory.

    Args:
        flats: of every arena.
        loose: of every parameter outside of arenas.
        leaves: what forwards are called with, by name: views of these, and parameters that are not trained.
    """

    flat_weights: tuple[Tensor, ...]
    unflattened: tuple[Tensor, ...]
    leaves: Mapping[str, Tensor]


class WeightVersions:
    """The versions of one rank's weights.

    Args:
        params: the rank's parameters by name; they are always views of the newest version.
        arenas: where some of them live.
        count: how many versions there are.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], flat_params: Sequence[FlatParams], count: int) -> None:
        housed = {name for arena in flat_params for name in arena.params}
        self.params = params
        self.flat_params = tuple(flat_params)
        self.unflattened = {name: param for name, param in params.items() if param.requires_grad and name not in housed}
        self.versions = [self._allocate_version(is_first=at == 0) for at in range(count)]
        self.history = deque([0] * count, maxlen=count)  # which edition each version is in, the newest last

    def _allocate_version(self, *, is_first: bool) -> WeightVersion:
        """Return memory for one version; autograd counts changes of its tensors apart from those of parameters."""
        flats = [arena.weights.data for arena in self.flat_params]
        loose = {name: param.data for name, param in self.unflattened.items()}
        if not is_first:
            flats = [torch.empty_like(flat) for flat in flats]
            loose = {name: torch.empty_like(tensor) for name, tensor in loose.items()}
        leaves: dict[str, Tensor] = dict(self.params)
        leaves.update({name: tensor.data.requires_grad_() for name, tensor in loose.items()})
        for arena, flat in zip(self.flat_params, flats, strict=True):
            for slot in arena.layout.slots:
                leaves[slot.name] = flat[slot.start : slot.stop].view(slot.shape).data.requires_grad_()
        return WeightVersion(tuple(flats), tuple(loose.values()), leaves)

    def read(self, version: int) -> Mapping[str, Tensor]:
        """Return the parameters by name as they stood so many updates ago."""
        return self.versions[self.history[version - 1]].leaves

    def fold_grads(self, version: int) -> None:
        """Add the gradients on the parameters of a version to those of the rank's parameters."""
        leaves = self.read(version)
        for name, leaf in leaves.items():
            param, fresh = self.params[name], leaf.grad
            if fresh is None or leaf is param:
                continue
            leaf.grad = None
            param.grad = fresh if param.grad is None else param.grad.add_(fresh)

    def reset(self) -> None:
        """All versions are as the newest, and no gradient is on any of them."""
        self.history.extend([self.history[-1]] * len(self.history))
        for edition in self.versions:
            for leaf in edition.leaves.values():
                leaf.grad = None

    def advance(self, *, is_new: bool) -> None:
        """The newest version becomes the one before; a new one has the same values, and is the parameters' memory.

        Args:
            is_new: whether the weights will change; else the newest version stands for the next one, too.
        """
        now = self.history[-1]
        if not is_new:
            self.history.append(now)
            return
        kept = set(list(self.history)[1:])
        free = next(at for at in range(len(self.versions)) if at not in kept)
        before, after = self.versions[now], self.versions[free]
        for old, new in zip(
            before.flat_weights + before.unflattened, after.flat_weights + after.unflattened, strict=True
        ):
            new.copy_(old)
        for arena, flat in zip(self.flat_params, after.flat_weights, strict=True):
            arena.rebind_views(flat)
        for param, tensor in zip(self.unflattened.values(), after.unflattened, strict=True):
            param.data = tensor
        self.history.append(free)
