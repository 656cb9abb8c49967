"""Key random numbers by the module that draws them, so that partitioning does not change a mask.

Before each call of a *seeded module*, ``seed(path)`` is called; whatever is drawn until the next such call is keyed by
that path, and so the same wherever it runs. The second call of one module in one forward has the path ``x#1``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from counterpoint.partitioning.compiled_modules import without_wrapper
from counterpoint.partitioning.partitioned_model import SeedFn

_RNG_MODULES = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.RReLU, nn.RNNBase, nn.MultiheadAttention),
)


def is_plain_sequential(module: nn.Module) -> bool:
    """Tell whether a module only calls its children one after the other."""
    hooks = [*vars(module)["_forward_hooks"].values(), *vars(module)["_forward_pre_hooks"].values()]
    foreign = [hook for hook in hooks if not _is_seed_hook(hook)]
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not foreign


def iter_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every child under every name it has, also the second name of one child."""
    yield from ((name, child) for name, child in vars(module)["_modules"].items() if child is not None)


def sequential_children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module of every child of an outermost ``Sequential`` or ``ModuleList``.

    A plain ``Sequential`` inside such a list counts as part of it.
    """
    is_list = isinstance(module, nn.ModuleList) or is_plain_sequential(module)
    for name, child in iter_children(module):
        child_path = f"{path}.{name}" if path else name
        if is_list and not is_plain_sequential(child):
            yield child_path, child
        else:
            yield from sequential_children(child, child_path)


def seeded_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the first paths of the modules whose calls are seeded: root, list children, modules that draw."""
    list_children = {id(child) for _, child in sequential_children(model)}
    return tuple(
        path
        for path, module in model.named_modules()
        if not path or id(module) in list_children or isinstance(module, _RNG_MODULES)
    )


class CallPaths:
    """Gives each call of a module its own path: ``x``, ``x#1``, ``x#2``, until the next forward begins."""

    def __init__(self) -> None:
        self.num_calls: dict[str, int] = {}

    def next(self, path: str) -> str:
        """Return the path of this call; a call of the root begins a new forward."""
        if not path:
            self.num_calls.clear()
        count = self.num_calls.get(path, 0)
        self.num_calls[path] = count + 1
        return f"{path}#{count}" if count else path


class SeedHooks:
    """Forward pre-hooks that call ``seed(path)`` before each call of a seeded module, until removed.

    Args:
        model: the module whose submodules are seeded.
        seed: the function to call, until :meth:`begin_forward`.
    """

    def __init__(self, model: nn.Module, seed: SeedFn) -> None:
        self.seed = seed
        self.call_paths = CallPaths()
        seeded = set(seeded_modules(model))
        self._hooks = [
            module.register_forward_pre_hook(partial(self._enter, without_wrapper(path)))
            for path, module in model.named_modules()
            if path in seeded
        ]

    def begin_forward(self, seed: SeedFn, num_calls: Mapping[str, int] = MappingProxyType({})) -> None:
        """Call another function from now on; ``num_calls`` are the calls that earlier layers of this forward made."""
        self.seed = seed
        self.call_paths.num_calls = dict(num_calls)

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:  # noqa: ANN401
        self.seed(self.call_paths.next(path))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()


def _is_seed_hook(hook: object) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__func__", None) is vars(SeedHooks)["_enter"]


def copy_without_seed_hooks(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model without the hooks of its partitions, which the copy has no use for."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        hooks = vars(module)["_forward_pre_hooks"]
        for number in [number for number, hook in hooks.items() if _is_seed_hook(hook)]:
            del hooks[number]
    return copied


def no_seed(path: str) -> None:
    """Set no random state: for a forward whose random numbers do not matter."""
    del path
