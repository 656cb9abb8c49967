"""What a batch has for the model and what for the loss, whatever its form: a tuple, a dict, or another nest of tensors.

A tuple ``(inputs..., target)`` calls ``model(inputs...)`` and ``loss(output, target)``. A dict calls
``model(**batch)``, without the keys that forward does not take, and ``loss(output, batch["labels"])``, or
``loss(output, batch)`` if it has no labels. Any other nest, such as a dataclass, calls ``model(batch)`` and
``loss(output, batch)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from counterpoint.errors import DataError
from counterpoint.partitioning.pytree import register_dataclasses
from counterpoint.terminal_text import warn

LABELS = "labels"
"""The key of a dict batch whose value the loss gets, as models of transformers call it."""

SplitFn: TypeAlias = Callable[[Any], tuple[Any, Any]]
"""From a batch of any form to the inputs of the model and what the loss gets."""


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """The keyword arguments of a model's forward.

    Args:
        model: the name of its class.
        accepted: their names; None if it takes any.
        required: those without a default.
    """

    model: str
    accepted: frozenset[str] | None
    required: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ForwardArguments:
        """Return the arguments of a model."""
        params = inspect.signature(model.forward).parameters.values()
        named = [param for param in params if param.kind in {param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY}]
        takes_any = any(param.kind is param.VAR_KEYWORD for param in params)
        return cls(
            type(model).__name__,
            None if takes_any else frozenset(param.name for param in named),
            tuple(param.name for param in named if param.default is param.empty),
        )

    def select(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a batch that forward takes.

        Raises:
            DataError: one without a default is missing.
        """
        missing = [name for name in self.required if name not in batch]
        if missing:
            raise DataError(
                f"a batch has the keys {', '.join(map(str, batch))}, but forward of {self.model} needs "
                f"{', '.join(missing)}; a dict is passed as keyword arguments: name its keys as forward does, or give "
                "a tuple (inputs..., target), in which ((batch,), target) passes the dict itself"
            )
        return batch if self.accepted is None else {key: batch[key] for key in batch if key in self.accepted}


ANY_ARGUMENTS = ForwardArguments("the model", None, ())
"""Of a model that is not known."""


def split_targets(batch: Any, arguments: ForwardArguments) -> tuple[Any, Any]:  # noqa: ANN401 - any nest of tensors
    """Return the inputs of the model and what the loss gets; see the top of this module.

    Args:
        batch: of any form.
        arguments: of the model's forward.

    Raises:
        DataError: it has no target.

    Example:
        >>> arguments = ForwardArguments.of(nn.Linear(2, 1))
        >>> split_targets(("x", "y"), arguments), split_targets({"input": 1, "labels": 2}, arguments)
        (('x', 'y'), ({'input': 1}, 2))
    """
    if isinstance(batch, Mapping):
        values = dict(batch)
        inputs = arguments.select(values)
        unused = [key for key in values if key not in inputs and key != LABELS] if LABELS in values else []
        if unused:
            warn(
                f"forward of {arguments.model} takes no {', '.join(map(str, unused))}, so the batch's values of that "
                "name are used neither by the model nor by the loss; correct the name, or leave the key out of the "
                "batch",
                stacklevel=2,
            )
        return inputs, values.get(LABELS, values)
    if isinstance(batch, tuple | list):
        if len(batch) > 1:
            *leading, target = batch
            return as_inputs(leading[0]) if len(leading) == 1 else tuple(leading), target
    elif type(batch) in SUPPORTED_NODES:
        return batch, batch
    elif is_dataclass(batch):
        register_dataclasses(batch)
        return batch, batch
    raise DataError(
        f"a batch is {describe_form(batch)}, which has no target; a batch is a tuple (inputs..., target), a dict, "
        f"which is passed to the model as keyword arguments, with {LABELS} for the loss, or a dataclass"
    )


def as_inputs(inputs: Any) -> Any:  # noqa: ANN401 - whatever the model takes
    """Return inputs as what is passed to a model: other mappings than dicts, such as a BatchEncoding, as a dict."""
    return dict(inputs) if isinstance(inputs, Mapping) and not isinstance(inputs, dict) else inputs


def describe_form(value: object) -> str:
    """Return what a sample or batch is, in words."""
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} fields"
    return f"a {type(value).__name__}"
