"""Calls of torch's optimizers that do not load torch's compiler.

Some methods of optimizers are marked as none of the compiler's business. Their wrappers look that up in the compiler,
and so the first optimizer of a process loads all of it: two seconds, and 70 MB in every rank. Where nobody has loaded
it, nobody compiles anything, and the methods can be called as they are.

The user's torch optimizer, made again over the arenas.

The optimizer the user wrote is built once on the model's own parameters; it is the *face*: its groups hold the
options and a scheduler may change them. The ranks update with optimizers from the user's factory, or of the same
class, over their own parts of the arenas and read the face's options before every step.
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
"""Where a wrapper keeps what it has found: what it calls in the method's place."""


@contextmanager
def without_dynamo_import() -> Iterator[None]:
    """Inside, optimizers can be made without loading the compiler; afterwards torch is as it was."""
    methods = [getattr(getattr(optim.Optimizer, name), "__wrapped__", None) for name in OPTIMIZER_METHODS]
    fresh = (
        []
        if DYNAMO in sys.modules
        else [one for one in methods if one is not None and not hasattr(one, DISABLE_CACHE_ATTRIBUTE)]
    )
    for method in fresh:
        setattr(method, DISABLE_CACHE_ATTRIBUTE, method)
    try:
        yield
    finally:
        for method in fresh:
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
"""Optimizers that treat every number apart, so that many parameters may be one tensor, and one cut in two."""


def require_no_closure(optimizer_class: type[optim.Optimizer]) -> None:
    """Check that an optimizer steps with gradients alone.

    Raises:
        PlanError: it computes the loss again and again within a step, as LBFGS does.
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{optimizer_class.__name__}.step needs a closure that computes the loss again, but ranks take one step with the "
            "gradients of one forward and backward; take an optimizer that steps with gradients alone (AdamW, SGD)"
        )


class OptimizerSpec:
    """The user's optimizer as the ranks see it: how one is made, groups of parameter names, and their options.

    Args:
        optimizer: a torch optimizer on the model's parameters, or a factory such as ``partial(AdamW, lr=1e-3)``.
        params: the model's parameters by name.

    Raises:
        PlanError: it holds tensors that are no parameters of the model, or misses trainable ones, has state already,
            or cannot be made again for the ranks.
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
        """Check that the ranks' optimizers can be made, and that the face has no state that these would not have."""
        state = [entry for entry in self.optimizer.state.values() if entry]
        if not state and self.optimizer_class.__module__.startswith("torch.optim"):
            return
        own = enumerate(self.optimizer.param_groups)
        made = self._make_like(
            [(index, nn.Parameter(param.detach())) for index, group in own for param in group["params"]]
        )
        if state and not states_equal(state, list(made.state.values())):
            raise PlanError(
                f"the optimizer has state for {len(state)} parameters already, as {self.optimizer_class.__name__} has after a "
                "step or load_state_dict, but the ranks' optimizers begin without; pass one that has not stepped, or a "
                "factory such as partial(AdamW, lr=1e-3), and go on with training from a checkpoint: "
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
        listed = f"{', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}"
        if foreign:
            lacks = f"; it lacks {listed}, so it was built for another model, or before this one was changed"
            raise PlanError(
                f"the optimizer holds {format_count(len(foreign), 'tensor')} that the model does not train, the first of "
                f"the shape {tuple(foreign[0].shape)}{lacks if missing else ''}: what it updates would not be the "
                "model; build it from this model's parameters() once the model is complete, or pass a factory such as "
                "partial(AdamW, lr=1e-3)"
            )
        if missing:
            raise PlanError(
                f"the optimizer does not hold {listed}; give it all trainable parameters, or freeze these with "
                "requires_grad_(False)"
            )
        return groups

    def options(self, group: int) -> dict[str, Any]:
        """Return the options of a group as they stand now."""
        found = self.optimizer.param_groups[group]
        return {key: value for key, value in found.items() if key not in {"params", "param_names"}}

    def build(self, targets: Sequence[tuple[int, Tensor]]) -> optim.Optimizer:
        """Return an optimizer like the user's over tensors, each with the group whose options it takes.

        Raises:
            PlanError: it cannot be made, or the user's has got state in the meantime.
        """
        state, length = self._known_state
        if self.optimizer.state is not state or len(state) != length:
            self._probe()
        return self._make_like(targets)

    def rebind(self, params: Mapping[str, nn.Parameter]) -> OptimizerSpec:
        """Return a face like this one on the parameters of a copy of the model, with the options as they stand now."""
        if self._factory is not None:
            return OptimizerSpec(self._factory, params)
        return OptimizerSpec(
            self._make_like([(group, params[name]) for name, group in self.group_index.items()]), params
        )

    def _make_like(self, targets: Sequence[tuple[int, Tensor]]) -> optim.Optimizer:
        groups: dict[int, list[Tensor]] = {}
        for group, tensor in targets:
            groups.setdefault(group, []).append(tensor)
        listed = [{"params": tensors, **self.options(group)} for group, tensors in groups.items()]
        with without_dynamo_import():
            made = self._from_factory(listed) or self._from_class(listed)
        for inner, group in zip(made.param_groups, groups, strict=True):
            inner.update(self.options(group))
            inner["spec_group"] = group
        return made

    def _from_factory(self, listed: list[dict[str, Any]]) -> optim.Optimizer | None:
        """Return what the user's factory makes of the groups; None where it makes other groups, or fails on them."""
        factory: Any = self._factory
        if factory is None:
            return None
        wanted = [list(map(id, group["params"])) for group in listed]
        with temporarily_trainable(tensor for group in listed for tensor in group["params"]):
            try:
                made = factory(listed[0]["params"] if len(self.optimizer.param_groups) == 1 else listed)
            except Exception:  # noqa: BLE001 - it may look at names and shapes, which parts of arenas do not have
                return None
        if (
            type(made) is not self.optimizer_class
            or [list(map(id, group["params"])) for group in made.param_groups] != wanted
        ):
            return None
        return made

    def _from_class(self, listed: list[dict[str, Any]]) -> optim.Optimizer:
        """Return a new optimizer of the face's class, made with the arguments that the face shows it was made with."""
        name, shown = self.optimizer_class.__name__, {**vars(self.optimizer), **self.optimizer.defaults}
        arguments = argument_names(self.optimizer_class, self.optimizer.defaults)
        hidden = [argument for argument in arguments if argument not in shown]
        remedy = f"pass a factory that takes any tensors or groups of them, such as partial({name}, lr=1e-3)"
        if hidden:
            raise PlanError(
                f"{name} keeps its {', '.join(hidden)} neither in its defaults nor as an attribute of that name, so it "
                f"cannot be made again, as every rank makes its own; {remedy}"
            )
        try:
            made = self.optimizer_class(listed, **{argument: shown[argument] for argument in arguments})
        except (TypeError, ValueError) as error:
            raise PlanError(f"{name} cannot be made again, as every rank makes its own: {error}; {remedy}") from error
        for key, value in vars(self.optimizer).items():
            if isinstance(value, int | float | str) and not key.startswith("_") and vars(made).get(key) != value:
                raise PlanError(
                    f"{name} has {key}={value!r}, but one made again, as every rank makes its own, has "
                    f"{vars(made).get(key)!r}; {remedy}"
                )
        return made

    def sync_options(self, made: optim.Optimizer) -> None:
        """Copy the face's options, which a scheduler may have changed, into an optimizer made by :meth:`build`."""
        for inner in made.param_groups:
            inner.update(self.options(inner["spec_group"]))

    def after_step(self) -> None:
        """Tell a scheduler on the face that the optimizer has stepped."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - what torch's wrapper sets


def make_template(factory: object, params: Mapping[str, nn.Parameter]) -> optim.Optimizer:
    """Return the optimizer that a factory makes of the model's parameters.

    Raises:
        PlanError: it is no factory, or makes something else.
    """
    with without_dynamo_import():
        made = factory(list(params.values())) if callable(factory) else factory
    if not isinstance(made, optim.Optimizer):
        found = f"makes a {type(made).__name__}" if callable(factory) else f"is {factory!r}"
        raise PlanError(
            f"the optimizer {found}; give a torch optimizer on the model's parameters, or a factory of one such as "
            "partial(torch.optim.AdamW, lr=1e-3)"
        )
    return made


def argument_names(optimizer_class: type[optim.Optimizer], defaults: Iterable[str]) -> list[str]:
    """Return the names of what an optimizer is made with beside its parameters, through ``**kwargs`` to its bases."""
    names: dict[str, None] = {}
    for base in optimizer_class.__mro__:
        if base is optim.Optimizer:
            names |= dict.fromkeys(defaults)
            break
        if "__init__" not in vars(base):
            continue
        given = list(signature(base.__init__).parameters.values())[2:]  # type: ignore[misc]
        names |= {one.name: None for one in given if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}}
        if not any(one.kind is one.VAR_KEYWORD for one in given):
            break
    return list(names)


@contextmanager
def temporarily_trainable(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Have tensors require gradients inside, because factories look for that, and be as they were afterwards."""
    changed = [tensor for tensor in tensors if not tensor.requires_grad]
    for tensor in changed:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in changed:
            tensor.requires_grad_(False)


def states_equal(first: Any, second: Any) -> bool:  # noqa: ANN401 - whatever an optimizer keeps
    """Tell whether two nests of values are equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(states_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(states_equal, first, second))
    return type(first) is type(second) and bool(first == second)


def warn_state_lives_in_ranks(optimizer: optim.Optimizer) -> None:
    """Warn whoever asks the face for its state after steps: the ranks' optimizers have it."""
    if getattr(optimizer, "_opt_called", False) and not optimizer.state:
        warnings.warn(
            "state_dict() has the optimizer's options but not its state, which the ranks have in parts; save a "
            "checkpoint with Trainer.save(FOLDER) or fit(..., save_to=FOLDER), which any plan can go on from",
            stacklevel=3,
        )


def squared_norm(grads: Iterable[Tensor]) -> float:
    """Return the sum of squares over all gradients, added up in float64."""
    total = 0.0
    for gradient in grads:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
        norm = torch.linalg.vector_norm(dense, dtype=None if dense.dtype == torch.float64 else torch.float32)
        total += float(norm) ** 2
    return total


def clip_by_value(grad: Tensor, bound: float) -> None:
    """Bring every number of a gradient, the sum where rows of a table occur several times, to at most this size."""
    if grad.is_sparse:
        summed = grad.coalesce()
        summed.values().clamp_(-bound, bound)
        grad.copy_(summed)
    else:
        grad.clamp_(-bound, bound)
