"""Several optimizers that update one model together: Muon for its matrices and AdamW for the rest, for instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim

from counterpoint.errors import PlanError
from counterpoint.runtime.optimizer_spec import PART
from counterpoint.runtime.rebuilt_optimizer import rebuild_optimizer


class ChainedOptimizer(optim.Optimizer):
    """Steps with one optimizer after the other; groups and state are shared with them.

    Args:
        params: option groups, each with the index of its optimizer.
        optimizers: whose groups these are, or which are rebuilt, with the same arguments, for these groups.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> muon, adamw = optim.Muon([layer.weight], lr=0.02), optim.AdamW([layer.bias])
        >>> [group["lr"] for group in chain_optimizers([muon, adamw]).param_groups]
        [0.02, 0.001]
    """

    def __init__(self, params: list[dict[str, Any]], optimizers: Sequence[optim.Optimizer]) -> None:
        super().__init__(params, {})
        self.optimizers = tuple(optimizers)
        self.parts = [
            part
            for index, template in enumerate(optimizers)
            if (part := like_optimizer(template, self._groups_of(index))) is not None
        ]
        for part in self.parts:
            self.state.update(part.state)
        self._link_parts()

    def unlink_parts(self) -> None:
        """Give each part the state of its own parameters, so that it may be used alone."""
        for part in self.parts:
            own = {param for group in part.param_groups for param in group["params"]}
            part.state = defaultdict(dict, {param: state for param, state in self.state.items() if param in own})

    def _groups_of(self, index: int) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[PART] == index]

    def _link_parts(self) -> None:
        """Let all parts have the groups and the state of this optimizer."""
        for part in self.parts:
            part.param_groups = self._groups_of(part.param_groups[0][PART])
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = defaultdict(dict, self.state)
        self._link_parts()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure would be evaluated several times
        """Step with every part."""
        for part in self.parts:
            part.step()

    @property
    def _opt_called(self) -> bool:
        """Whether there was a step: what schedulers of torch ask."""
        return any(getattr(part, "_opt_called", False) for part in self.parts)

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        for part in self.parts:
            part._opt_called = value  # type: ignore[attr-defined]  # noqa: SLF001 - of torch's wrapper


def like_optimizer(template: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer | None:
    """Return an optimizer like another one for other groups, itself if they are its own, and None without groups."""
    if not groups:
        return None
    if all(group is own for group, own in zip(groups, template.param_groups, strict=False)):
        return template
    return rebuild_optimizer(template, groups)


def chain_optimizers(given: Sequence[object]) -> ChainedOptimizer:
    """Return optimizers as one; their groups get an option with their index.

    Raises:
        PlanError: there is none, one is not an optimizer, or two hold the same parameter.
    """
    optimizers = [one for one in given if isinstance(one, optim.Optimizer)]
    wrong = [type(one).__name__ for one in given if not isinstance(one, optim.Optimizer)]
    if wrong or not optimizers:
        raise PlanError(
            f"optimizer= is a list with {wrong[0] if wrong else 'nothing'} in it; give torch optimizers, each on a "
            "part of the model's parameters: optimizer=[Muon(matrices), AdamW(others)]"
        )
    owners: dict[Tensor, str] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            group[PART] = index
            for param in group["params"]:
                if param in owners:
                    raise PlanError(
                        f"{owners[param]} and {type(optimizer).__name__} of optimizer=[...] both hold a parameter of "
                        f"the shape {tuple(param.shape)}, which both would update in a step; give each parameter to "
                        "one of them, or call parallelize once for each optimizer to let them take turns"
                    )
                owners[param] = type(optimizer).__name__
    return ChainedOptimizer([group for optimizer in optimizers for group in optimizer.param_groups], optimizers)
