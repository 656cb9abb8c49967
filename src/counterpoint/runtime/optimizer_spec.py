"""The user's torch optimizer, rebuilt by every rank over its own flat parameters.

The user's optimizer is built once on the model's own parameters and never steps: it is the template, whose
``param_groups`` hold the options that a scheduler may change. Ranks update with optimizers from the user's factory, or
of the same class, over their own shards, and copy the template's options before every step.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.errors import PlanError
from counterpoint.world.topology import format_count

DYNAMO = "torch._dynamo"
OPTIMIZER_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
DISABLE_CACHE_ATTRIBUTE = "__dynamo_disable"
"""Attribute in which a wrapper caches the function that it calls instead of the method."""


@contextmanager
def without_dynamo_import() -> Iterator[None]:
    """Allow optimizers to be built inside without importing ``torch._dynamo``; restore torch afterwards.

    Some methods of ``torch.optim.Optimizer`` are wrapped to be ignored by the compiler. The wrapper imports the
    compiler on
    its first call: two seconds, and 70 MB in every rank. As long as nothing else has imported it, nothing is compiled,
    and
    the methods can be called unwrapped.
    """
    methods = [getattr(getattr(optim.Optimizer, name), "__wrapped__", None) for name in OPTIMIZER_METHODS]
    unwrapped = (
        []
        if DYNAMO in sys.modules
        else [method for method in methods if method is not None and not hasattr(method, DISABLE_CACHE_ATTRIBUTE)]
    )
    for method in unwrapped:
        setattr(method, DISABLE_CACHE_ATTRIBUTE, method)
    try:
        yield
    finally:
        for method in unwrapped:
            delattr(method, DISABLE_CACHE_ATTRIBUTE)


TorchOptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

ELEMENTWISE_OPTIMIZERS: frozenset[type[optim.Optimizer]] = frozenset(
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
"""Optimizers whose update is elementwise, so that parameters may be merged into one tensor, or split."""


def require_no_closure(optimizer_class: type[optim.Optimizer]) -> None:
    """Raise unless an optimizer steps with gradients only.

    Raises:
        PlanError: it evaluates the loss again within a step, as LBFGS does.
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{optimizer_class.__name__}.step needs a closure that computes the loss again, but ranks take one step "
            "with the gradients of one forward and backward; take an optimizer that steps with gradients alone (AdamW, "
            "SGD)"
        )


class OptimizerSpec:
    """The user's optimizer as ranks need it: how to build one, the option group of each parameter, and current options.

    Args:
        optimizer: a torch optimizer on the model's parameters, or a factory such as ``partial(AdamW, lr=1e-3)``.
        params: the model's parameters by name.

    Raises:
        PlanError: it holds tensors that are not parameters of the model, or misses trainable ones, already has state,
            or cannot be rebuilt for the ranks.
    """

    def __init__(self, optimizer: optim.Optimizer | TorchOptimizerFactory, params: Mapping[str, nn.Parameter]) -> None:
        trainable = {name: param for name, param in params.items() if param.requires_grad}
        if not trainable:
            raise PlanError(
                f"the model has {len(params)} parameters, none of them trainable, so there is nothing to train; "
                "pass a model with parameters that require a gradient"
            )
        self._factory = None if isinstance(optimizer, optim.Optimizer) else optimizer
        self.optimizer = optimizer if isinstance(optimizer, optim.Optimizer) else make_template(optimizer, trainable)
        self.optimizer_class = type(self.optimizer)
        require_no_closure(self.optimizer_class)
        self.is_elementwise = self.optimizer_class in ELEMENTWISE_OPTIMIZERS
        self.group_index = self._map_params_to_groups(trainable)
        self._known_state = self.optimizer.state, len(self.optimizer.state)
        self._probe()
        self.optimizer.register_state_dict_pre_hook(warn_state_lives_in_ranks)

    def _probe(self) -> None:
        """Raise unless ranks can build their optimizers, and the template has no state that these would lack."""
        state = [entry for entry in self.optimizer.state.values() if entry]
        if not state and self.optimizer_class.__module__.startswith("torch.optim"):
            return
        groups = enumerate(self.optimizer.param_groups)
        built = self._make_like(
            [(index, nn.Parameter(param.detach())) for index, group in groups for param in group["params"]]
        )
        if state and not states_equal(state, list(built.state.values())):
            raise PlanError(
                f"the optimizer already has state for {len(state)} parameters, as {self.optimizer_class.__name__} has "
                "after a step or load_state_dict, but the ranks' optimizers start without state; pass one that has not "
                "stepped, or a factory such as partial(AdamW, lr=1e-3), and resume training from a checkpoint: "
                "Trainer.fit(..., resume=FOLDER)"
            )

    def _map_params_to_groups(self, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
        names = {id(param): name for name, param in params.items()}
        groups: dict[str, int] = {}
        foreign: list[Tensor] = []
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                if id(param) in names:
                    groups[names[id(param)]] = index
                else:
                    foreign.append(param)
        missing = [name for name in params if name not in groups]
        missing_text = f"{', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}"
        if foreign:
            lacks = f"; it lacks {missing_text}, so it was built for another model, or before this one was changed"
            raise PlanError(
                f"the optimizer holds {format_count(len(foreign), 'tensor')} that the model does not train, the first "
                f"of the shape {tuple(foreign[0].shape)}{lacks if missing else ''}: it would not update the model; "
                "build it from this model's parameters() once the model is complete, pass a factory such as "
                "partial(AdamW, lr=1e-3), or, for parameters of the loss, give the loss as an nn.Module that has them"
            )
        if missing:
            raise PlanError(
                f"the optimizer does not hold {missing_text}; give it all trainable parameters, or freeze these with "
                "requires_grad_(False)"
            )
        return groups

    def options(self, group: int) -> dict[str, Any]:
        """Return the current options of a group."""
        group_options = self.optimizer.param_groups[group]
        return {key: value for key, value in group_options.items() if key not in {"params", "param_names"}}

    def build(self, targets: Sequence[tuple[int, Tensor]]) -> optim.Optimizer:
        """Return an optimizer like the user's over tensors, each with the index of its option group.

        Raises:
            PlanError: it cannot be built, or the template has got state in the meantime.
        """
        state, length = self._known_state
        if self.optimizer.state is not state or len(state) != length:
            self._probe()
        return self._make_like(targets)

    def rebind(self, params: Mapping[str, nn.Parameter]) -> OptimizerSpec:
        """Return the same specification with current options, on the parameters of a copy of the model."""
        if self._factory is not None:
            return OptimizerSpec(self._factory, params)
        return OptimizerSpec(
            self._make_like([(group, params[name]) for name, group in self.group_index.items()]), params
        )

    def _make_like(self, targets: Sequence[tuple[int, Tensor]]) -> optim.Optimizer:
        groups: dict[int, list[Tensor]] = {}
        for group, tensor in targets:
            groups.setdefault(group, []).append(tensor)
        param_groups = [{"params": tensors, **self.options(group)} for group, tensors in groups.items()]
        with without_dynamo_import():
            built = self._from_factory(param_groups) or self._from_class(param_groups)
        for param_group, group in zip(built.param_groups, groups, strict=True):
            param_group.update(self.options(group))
            param_group["spec_group"] = group
        return built

    def _from_factory(self, param_groups: list[dict[str, Any]]) -> optim.Optimizer | None:
        """Return what the user's factory builds of the groups; None if it makes other groups, or fails on them."""
        factory: Any = self._factory
        if factory is None:
            return None
        expected_ids = [list(map(id, group["params"])) for group in param_groups]
        with temporarily_trainable(tensor for group in param_groups for tensor in group["params"]):
            try:
                built = factory(param_groups[0]["params"] if len(self.optimizer.param_groups) == 1 else param_groups)
            except Exception:  # noqa: BLE001 - it may depend on names and shapes, which flat shards lack
                return None
        if (
            type(built) is not self.optimizer_class
            or [list(map(id, group["params"])) for group in built.param_groups] != expected_ids
        ):
            return None
        return built

    def _from_class(self, param_groups: list[dict[str, Any]]) -> optim.Optimizer:
        """Return a new optimizer of the template's class, with constructor arguments read from the template."""
        name, known = self.optimizer_class.__name__, {**vars(self.optimizer), **self.optimizer.defaults}
        arguments = argument_names(self.optimizer_class, self.optimizer.defaults)
        hidden = [argument for argument in arguments if argument not in known]
        remedy = f"pass a factory that takes any tensors or groups of them, such as partial({name}, lr=1e-3)"
        if hidden:
            raise PlanError(
                f"{name} keeps its {', '.join(hidden)} neither in its defaults nor as an attribute of that name, so it "
                f"cannot be rebuilt, but every rank builds its own; {remedy}"
            )
        try:
            built = self.optimizer_class(param_groups, **{argument: known[argument] for argument in arguments})
        except (TypeError, ValueError) as error:
            raise PlanError(f"{name} cannot be rebuilt, but every rank builds its own: {error}; {remedy}") from error
        for key, value in vars(self.optimizer).items():
            if isinstance(value, int | float | str) and not key.startswith("_") and vars(built).get(key) != value:
                raise PlanError(
                    f"{name} has {key}={value!r}, but one rebuilt for a rank has {vars(built).get(key)!r}; {remedy}"
                )
        return built

    def sync_options(self, optimizer: optim.Optimizer) -> None:
        """Copy the template's options, which a scheduler may have changed, into an optimizer made by :meth:`build`."""
        for param_group in optimizer.param_groups:
            param_group.update(self.options(param_group["spec_group"]))

    def after_step(self) -> None:
        """Mark the template as stepped, for schedulers that warn otherwise."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - what torch's wrapper sets


def make_template(factory: object, params: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    """Return the optimizer that a factory builds on the model's parameters.

    Raises:
        PlanError: it is not a factory, or returns something else.
    """
    with without_dynamo_import():
        built = factory(list(params.values())) if callable(factory) else factory
    if not isinstance(built, optim.Optimizer):
        actual = f"factory returned a {type(built).__name__}" if callable(factory) else f"argument is {factory!r}"
        raise PlanError(
            f"the optimizer {actual}; pass a torch optimizer on the model's parameters, or a factory such as "
            "partial(torch.optim.AdamW, lr=1e-3)"
        )
    return built


def argument_names(optimizer_class: type[optim.Optimizer], defaults: Iterable[str]) -> list[str]:
    """Return an optimizer's constructor arguments after its parameters, following ``**kwargs`` into base classes."""
    names: dict[str, None] = {}
    for base in optimizer_class.__mro__:
        if base is optim.Optimizer:
            names |= dict.fromkeys(defaults)
            break
        if "__init__" not in vars(base):
            continue
        parameters = list(signature(base.__init__).parameters.values())[2:]  # type: ignore[misc]
        names |= {
            parameter.name: None
            for parameter in parameters
            if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        }
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(names)


@contextmanager
def temporarily_trainable(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Set ``requires_grad`` on tensors inside, because factories may select by it, and restore it afterwards."""
    changed = [tensor for tensor in tensors if not tensor.requires_grad]
    for tensor in changed:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in changed:
            tensor.requires_grad_(False)


def states_equal(first: Any, second: Any) -> bool:  # noqa: ANN401 - whatever an optimizer keeps
    """Return whether two nested values are equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(states_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(states_equal, first, second))
    return type(first) is type(second) and bool(first == second)


def warn_state_lives_in_ranks(optimizer: optim.Optimizer) -> None:
    """Warn a caller of the template's ``state_dict()`` after steps: only the ranks' optimizers have state."""
    if getattr(optimizer, "_opt_called", False) and not optimizer.state:
        warnings.warn(
            "state_dict() has the optimizer's options but not its state, which is sharded over the ranks; save a "
            "checkpoint with Trainer.save(FOLDER) or fit(..., checkpoint_dir=FOLDER), which any plan can resume",
            stacklevel=3,
        )


def squared_norm(grads: Iterable[Tensor]) -> float:
    """Return the sum of squares over all gradients, accumulated in float64."""
    total, device_norms = 0.0, []
    for grad in grads:
        dense = grad.coalesce().values() if grad.is_sparse else grad.detach()
        is_narrow = not dense.is_complex() and dense.dtype != torch.float64
        norm = torch.linalg.vector_norm(dense, dtype=torch.float32 if is_narrow else None)
        if norm.device.type == "cpu":
            total += float(norm) ** 2
        else:
            device_norms.append(norm.double())
    if device_norms:  # read together: every read waits for the device
        total += sum(norm**2 for norm in torch.stack(device_norms).tolist())
    return total


def clip_by_value(grad: Tensor, bound: float) -> None:
    """Clamp every element of a gradient to ``[-bound, bound]``; repeated rows of a sparse gradient are summed first."""
    if grad.is_sparse:
        summed = grad.coalesce()
        summed.values().clamp_(-bound, bound)
        grad.copy_(summed)
    else:
        grad.clamp_(-bound, bound)
