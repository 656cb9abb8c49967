"""What a trace does not show: backwards that the model's author wrote. They would be lost without a word.

A trace has the operations of a forward, and autograd differentiates these. A hook on a gradient, or the backward of an
``autograd.Function``, is none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from counterpoint.errors import PlanError


class OwnBackwards(TorchFunctionMode):
    """While this is active and is shown what modules take and give, it notes the backwards that are written.

    Args:
        open_calls: the paths of the modules that are running, innermost last.
    """

    def __init__(self, open_calls: Sequence[str]) -> None:
        super().__init__()
        self.open_calls = open_calls
        self.found: list[tuple[str, str]] = []
        self.seen: set[Any] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function, and note a hook on a tensor's gradient."""
        if func is Tensor.register_hook:
            self.note("a hook on a gradient, which its forward registers")
        return func(*args, **(kwargs or {}))

    def look(self, values: object) -> None:
        """Look at what led to values, since the last ones, in the module that is running."""
        queue: list[Any] = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        while queue:
            node = queue.pop()
            if node is None or node in self.seen:
                continue
            self.seen.add(node)
            queue += [before for before, _ in node.next_functions]
            if isinstance(node, BackwardCFunction):
                kind: type = vars(type(node))["_forward_cls"]
                if not kind.__module__.startswith("torch._"):  # those of operations that the trace has as such
                    self.note(f"the autograd.Function {kind.__name__}")

    def note(self, what: str) -> None:
        """Keep what was found, and in which module."""
        self.found.append((self.open_calls[-1] if self.open_calls else "", what))

    def require_none(self, model: nn.Module) -> None:
        """Check that nothing was found.

        Raises:
            PlanError: something was; the first is named.
        """
        if self.found:
            path, what = self.found[0]
            raise _refusal(model, path, what)


def require_no_backward_hooks(model: nn.Module) -> None:
    """Check that no module of a model that is to be traced has hooks on its backward.

    Raises:
        PlanError: one has.
    """
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001 - there is no other way to see them
            raise _refusal(model, path, "a hook on its backward")


def _refusal(model: nn.Module, path: str, what: str) -> PlanError:
    where = f"module '{path}' ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__
    return PlanError(
        f"{where} has {what}, but a model is cut along the operations of its forward, whose own gradients would be "
        "taken instead; write it as an operation (torch.library.custom_op with register_autograd), or with detach(), "
        "make the model an nn.Sequential, whose children are run as they are, or take a strategy that needs no cut "
        "(data, zero of level 1 or 2, server)"
    )
