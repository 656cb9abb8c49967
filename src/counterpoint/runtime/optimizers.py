"""The user's torch optimizer, made again over the arenas.

The optimizer the user wrote is built once on the model's own parameters; it is the *face*: its groups hold the
options and a scheduler may change them. The ranks update with optimizers of the same class over their own parts
of the arenas and read the face's options before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.errors import PlanError

Factory: TypeAlias = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adadelta,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.ASGD,
        optim.Rprop,
    }
)
"""Optimizers that treat every number apart, so that many parameters may be one tensor, and one cut in two."""


class Face:
    """The user's optimizer as the ranks see it: a class, groups of parameter names, and their options.

    Args:
        optimizer: a torch optimizer on the model's parameters, or a factory such as ``partial(AdamW, lr=1e-3)``.
        params: the model's parameters by name.

    Raises:
        PlanError: it holds tensors that are no parameters of the model, or misses trainable ones.
    """

    def __init__(self, optimizer: optim.Optimizer | Factory, params: Mapping[str, nn.Parameter]) -> None:
        trainable = {name: param for name, param in params.items() if param.requires_grad}
        if not trainable:
            raise PlanError(
                f"the model has {len(params)} parameters, none of them trainable, so there is nothing to train; "
                "pass a model with parameters that require a gradient"
            )
        made = optimizer if isinstance(optimizer, optim.Optimizer) else optimizer(list(trainable.values()))
        self.optimizer = made
        self.kind = type(made)
        self.is_elementwise = self.kind in ELEMENTWISE
        self.group_of = self._groups(trainable)

    def _groups(self, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
        names = {id(param): name for name, param in params.items()}
        groups: dict[str, int] = {}
        foreign = 0
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                if id(param) in names:
                    groups[names[id(param)]] = index
                else:
                    foreign += 1
        if foreign:
            raise PlanError(
                f"the optimizer holds {foreign} tensors that are not trainable parameters of the model, so these would "
                "never be trained; build it from this model's parameters(), or pass a factory such as "
                "partial(AdamW, lr=1e-3)"
            )
        missing = [name for name in params if name not in groups]
        if missing:
            raise PlanError(
                f"the optimizer does not hold {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}; "
                "give it all trainable parameters, or freeze these with requires_grad_(False)"
            )
        return groups

    def options(self, group: int) -> dict[str, Any]:
        """Return the options of a group as they stand now."""
        return {key: value for key, value in self.optimizer.param_groups[group].items() if key != "params"}

    def build(self, parts: Sequence[tuple[int, Tensor]]) -> optim.Optimizer:
        """Return an optimizer of the same class over tensors, each with the group whose options it takes."""
        groups: dict[int, list[Tensor]] = {}
        for group, tensor in parts:
            groups.setdefault(group, []).append(tensor)
        known = signature(self.kind).parameters
        defaults = {key: value for key, value in self.optimizer.defaults.items() if key in known}
        listed = [{"params": tensors, **self.options(group)} for group, tensors in groups.items()]
        made = self.kind(listed, **defaults)
        for inner, group in zip(made.param_groups, groups, strict=True):
            inner["face_group"] = group
        return made

    def refresh(self, made: optim.Optimizer) -> None:
        """Copy the face's options, which a scheduler may have changed, into an optimizer made by :meth:`build`."""
        for inner in made.param_groups:
            inner.update(self.options(inner["face_group"]))

    def stepped(self) -> None:
        """Tell a scheduler on the face that the optimizer has stepped."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - what torch's wrapper sets


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Return the sum of squares over all gradients, added up in float64."""
    total = 0.0
    for gradient in gradients:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
        norm = torch.linalg.vector_norm(dense, dtype=None if dense.dtype == torch.float64 else torch.float32)
        total += float(norm) ** 2
    return total
