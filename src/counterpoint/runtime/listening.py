"""Hooks on gradients of parameters that are there during one backward of each step, put on and taken off at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

Hook: TypeAlias = Callable[[Tensor], None]


class _Ear(NamedTuple):
    hooks: MutableMapping[int, Hook]  # all of the parameter's, as torch calls them
    number: int  # that torch has given to this one
    hook: Hook


class Listening:
    """What hears of every gradient that is put on some parameters, while it listens.

    Registering a hook and removing it takes longer than many a gradient of few numbers: this does so once, and then
    writes the hook to and from its place among the parameter's others.

    Args:
        params: they keep no hook while nothing listens.
        hooks: one for each.

    Example:
        >>> import torch
        >>> param, heard = nn.Parameter(torch.ones(2)), []
        >>> listening = Listening([param], [lambda param: heard.append(param.grad.tolist())])
        >>> with listening.during():
        ...     param.sum().backward()
        >>> param.sum().backward()
        >>> heard
        [[1.0, 1.0]]
    """

    def __init__(self, params: Sequence[nn.Parameter], hooks: Sequence[Hook]) -> None:
        self._ears = [_registered(param, hook) for param, hook in zip(params, hooks, strict=True)]
        self._be_deaf()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Listen inside."""
        for ear in self._ears:
            ear.hooks[ear.number] = ear.hook
        try:
            yield
        finally:
            self._be_deaf()

    def _be_deaf(self) -> None:
        for ear in self._ears:
            ear.hooks.pop(ear.number, None)


def _registered(param: Any, hook: Hook) -> _Ear:  # noqa: ANN401 - torch's stubs leave out these members
    handle = param.register_post_accumulate_grad_hook(hook)
    return _Ear(param._post_accumulate_grad_hooks, handle.id, hook)  # noqa: SLF001 - it has no public name
