"""The user's torch optimizer, rebuilt by every rank over its own flat parameters.

The user's optimizer is built once on the model's own parameters and never steps: it is the template, whose
``param_groups`` hold the options that a scheduler may change. Ranks update with optimizers from the user's factory, or
of the same class, over their own shards, and copy the template's options before every step. State that the template
has, because it stepped before, has loaded a ``state_dict()`` or was changed, goes to the ranks before the next step,
and that of the ranks comes back when its ``state`` is used or its ``state_dict()`` is called::

    template.state --take_state--> ranks' optimizers --put_state--> template.state
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils.hooks import RemovableHandle

from counterpoint.errors import DataError, PlanError, first_line
from counterpoint.optim.low_bit_adam import Adam8bit, AdamBf16, AdamW8bit, AdamWBf16, BlockwiseAdam
from counterpoint.optim.one_bit_adam import OneBitAdam
from counterpoint.runtime.compiler_import import without_dynamo_import
from counterpoint.runtime.optimizer_state_view import StateOfRanks
from counterpoint.runtime.rebuilt_optimizer import rebuild_optimizer, require_own_step
from counterpoint.runtime.step_effects import StepEffects, find_step_effects
from counterpoint.world.topology import format_count

REQUIRES_GRAD_OF = attrgetter("requires_grad")

PART = "optimizer"
"""The option of a group that has the index of its optimizer, if several were given."""

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
        AdamBf16,
        AdamWBf16,
        OneBitAdam,
    }
)
"""Optimizers whose update is elementwise, so that parameters may be merged into one tensor, or split."""

SKIPPING_OPTIMIZERS: frozenset[type[optim.Optimizer]] = frozenset({optim.SGD, optim.Adam, optim.AdamW})
"""Optimizers whose fused kernels on a device leave weights and state as they are if ``found_inf`` is 1 there."""

SCALAR_STATE_KEYS: frozenset[str] = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries of torch optimizers' state that are one number for a whole tensor of any size."""

NEEDS_CLOSURE = ("closure", "'NoneType' object is not callable")
"""What errors of optimizers say that were stepped without a closure."""


class OptimizerSpec:
    """The user's optimizer as ranks need it: how to build one, the option group of each parameter, and current options.

    Args:
        optimizer: a torch optimizer on the model's parameters, or a factory such as ``partial(AdamW, lr=1e-3)``.
        params: the model's parameters by name.

    Attributes:
        group_index: the index of the option group of each trainable parameter, by name.
        split_size: shards may end within a parameter after multiples of so many elements, if as many are left; None if
            the optimizer needs whole parameters.

    Raises:
        PlanError: it holds tensors that are not parameters of the model, or misses trainable ones, has hooks that run
            before its step, or cannot be rebuilt for the ranks.
    """

    def __init__(self, optimizer: optim.Optimizer | TorchOptimizerFactory, params: Mapping[str, nn.Parameter]) -> None:
        trainable = require_trainable(params)
        self._factory = None if isinstance(optimizer, optim.Optimizer) else optimizer
        self.optimizer = optimizer if isinstance(optimizer, optim.Optimizer) else make_template(optimizer, trainable)
        self.optimizer_class = type(self.optimizer)
        self.user_optimizers = (self.optimizer, *getattr(self.optimizer, "optimizers", ()))  # that it is a chain of
        require_no_closure(self.optimizer_class)
        require_own_step(self.user_optimizers)
        self.require_no_step_hooks()
        self.is_elementwise = self.optimizer_class in ELEMENTWISE_OPTIMIZERS
        self.split_size = find_split_size(self.optimizer)
        self.params = dict(params)
        self.group_index = map_params_to_groups(self.optimizer, params)
        self._group_structure = self._read_group_structure()
        self._updates_apart = False
        self._kernel_options: Mapping[str, bool] = {}  # which ranks use in place of the template's
        self._step_effects: StepEffects | None = None
        self._stepped_options: dict[int, dict[str, Any]] = {}  # of groups, which the ranks' steps have changed
        self._probe()
        self.has_new_state = any(self.optimizer.state.values())  # which the ranks do not have yet
        self._idle_state: dict[str, dict[str, Any]] = {}  # of frozen parameters
        self._export_state: Callable[[], None] | None = None  # of ranks, if there are any
        self._has_hooks = False
        self._step_hooks: list[RemovableHandle] = []  # that refuse steps of the user's, while ranks train
        self._is_for_state_dict = False  # whether the state was loaded for a state_dict()

    @property
    def merges_params(self) -> bool:
        """Whether parameters of a group may be updated as one tensor, with one step count."""
        return self.is_elementwise and not self._updates_apart

    def class_of(self, name: str) -> type[optim.Optimizer]:
        """Return the class of the optimizer that updates a parameter: one of a list, if several were given."""
        group = self.optimizer.param_groups[self.group_index[name]]
        parts = self.user_optimizers[1:]
        return type(parts[group[PART]]) if parts else self.optimizer_class

    def list_own_classes(self) -> list[str]:
        """Return the names of the optimizer classes that are not those of torch."""
        classes = {self.class_of(name) for name in self.group_index}
        return sorted(cls.__name__ for cls in classes if not cls.__module__.startswith("torch.optim."))

    def step_effects(self) -> StepEffects:
        """Return what a step does besides updating each parameter by its own gradient and state."""
        if self._step_effects is None:
            trained = {name: self.params[name] for name in self.group_index if self.params[name].requires_grad}
            is_own = bool(self.list_own_classes())
            self._step_effects = find_step_effects(self.build, trained, self.group_index) if is_own else StepEffects()
        return self._step_effects

    def update_apart(self) -> None:
        """Update each parameter as a tensor of its own from now on, because some may be skipped in a step."""
        self._updates_apart = True

    def use_fused_kernels(self, device: torch.device) -> bool:
        """Let ranks on a device update with torch's fused kernels, which can skip a step there; return whether they do.

        They do not if the user has chosen another implementation, or there is none for the optimizer or the device.
        """
        params = [param for param in self.params.values() if param.requires_grad]
        groups = self.optimizer.param_groups
        can_fuse = (
            self.optimizer_class in SKIPPING_OPTIMIZERS
            and device.type in _get_fused_kernels_supported_devices()
            and all(param.is_floating_point() for param in params)
            and not any(group.get(key) for group in groups for key in ("foreach", "differentiable"))
            and not any(group.get("fused") is False for group in groups)
            and not self._updates_apart
        )
        self._kernel_options = {"fused": True} if can_fuse else {}
        return can_fuse

    @property
    def uses_fused_kernels(self) -> bool:
        """Whether ranks update with torch's fused kernels although the template does not ask for them."""
        return bool(self._kernel_options)

    def _group_lengths(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def _read_group_structure(self) -> tuple[list[int], list[bool]]:
        return self._group_lengths(), [*map(REQUIRES_GRAD_OF, self.params.values())]

    def find_new_groups(self, *, is_same_trainable: bool = False) -> str:
        """Return which parameters were frozen, thawed or added to groups since ranks were built; empty for none.

        Args:
            is_same_trainable: whether it is known that none was frozen or thawed.
        """
        before = self._group_structure
        now = (self._group_lengths(), before[1]) if is_same_trainable else self._read_group_structure()
        if before == now:
            return ""
        flags = zip(self.params, before[1], now[1], strict=True)
        changed = [(name, is_trained) for name, was_trained, is_trained in flags if was_trained is not is_trained]
        if changed:
            (name, is_trained), num_others = changed[0], len(changed) - 1
            more = f" and {num_others} other parameter{'s' if num_others > 1 else ''} were" if num_others else " was"
            return f"{name}{more} {'made trainable' if is_trained else 'frozen'}"
        lengths, old_lengths = now[0], before[0]
        if len(lengths) != len(old_lengths):
            return f"the optimizer has {len(lengths)} groups of parameters instead of {len(old_lengths)}"
        index = next(index for index, pair in enumerate(zip(old_lengths, lengths, strict=True)) if len({*pair}) > 1)
        return f"group {index} of the optimizer has {lengths[index]} parameters instead of {old_lengths[index]}"

    def update_groups(self) -> None:
        """Read again which parameters are trainable, and the groups that they are in.

        Raises:
            PlanError: as in the constructor.
        """
        require_trainable(self.params)
        self.group_index = map_params_to_groups(self.optimizer, self.params)
        self.split_size = find_split_size(self.optimizer)
        self._group_structure = self._read_group_structure()

    def attach_ranks(self, export_state: Callable[[], None]) -> None:
        """Let the template's ``state_dict()`` have the state of ranks, and let them get state that it loads.

        Args:
            export_state: called before the template's state is read; calls :meth:`put_state`, or raises.
        """
        for optimizer in self.user_optimizers if not self._step_hooks else ():
            self._step_hooks.append(optimizer.register_step_pre_hook(RefusedStep()))
        for optimizer in self.user_optimizers if not self._has_hooks else ():
            optimizer.register_state_dict_pre_hook(self._before_state_dict)
            optimizer.register_state_dict_post_hook(self._after_state_dict)
            optimizer.register_load_state_dict_post_hook(self._after_load)
        self._has_hooks = True
        self._export_state = export_state

    def allow_steps(self) -> None:
        """Let the template be stepped again, after training."""
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()

    def detach_ranks(self) -> None:
        """Make the template an ordinary optimizer with its own state again, after the ranks have ended."""
        self._export_state = None
        self._use_state(defaultdict(dict, self._own_state()))
        unlink_parts = getattr(self.optimizer, "unlink_parts", None)  # of several optimizers
        if unlink_parts is not None:
            unlink_parts()

    def _use_state(self, state: defaultdict[Tensor, dict[str, Any]]) -> None:
        for optimizer in self.user_optimizers:
            optimizer.state = state

    def _own_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Return the template's state, empty while ranks have it."""
        state = self.optimizer.state
        return {} if isinstance(state, StateOfRanks) and not state.is_loaded else state

    def _load_state(self) -> None:
        if self._export_state is None:  # it was taken for ranks that are not built yet
            self.put_state({}, is_new=self.has_new_state)
        else:
            self._export_state()

    def is_state_loaded(self) -> bool:
        """Return whether the template has the state that ranks had after the last step, which may have been changed."""
        return isinstance(self.optimizer.state, StateOfRanks) and self.optimizer.state.is_loaded

    def find_changed_state(self, read_ranks: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        """Note whether the template's state was changed since it was read; if it was not, leave it to the ranks.

        Args:
            read_ranks: returns their state by parameter.
        """
        if self.has_new_state or self._export_state is None:
            return
        replaced = [one for one in self.user_optimizers if not isinstance(one.state, StateOfRanks)]
        for optimizer in replaced:
            self._after_load(optimizer)
        if not replaced and self.is_state_loaded():
            expected = {**self._idle_state, **read_ranks()}
            found = {name: self.optimizer.state.get(param, {}) for name, param in self.params.items()}
            self.has_new_state = any(not is_same_state(found[name], expected.get(name, {})) for name in found)
            if not self.has_new_state:
                self._drop_state()

    def _drop_state(self) -> None:
        if isinstance(self.optimizer.state, StateOfRanks):
            self.optimizer.state.drop()

    def _before_state_dict(self, optimizer: optim.Optimizer) -> None:
        if self._export_state is None or self.has_new_state:
            state = optimizer.state
        else:
            self._is_for_state_dict = not self.is_state_loaded()
            if self._is_for_state_dict:
                self._export_state()
            state = self.optimizer.state
        if optimizer is not self.optimizer:
            own = {param for group in optimizer.param_groups for param in group["params"]}
            optimizer.state = defaultdict(dict, {param: value for param, value in state.items() if param in own})

    def _after_state_dict(self, optimizer: optim.Optimizer, _: object) -> None:
        if self._export_state is not None and not self.has_new_state:
            optimizer.state = self.optimizer.state
            if self._is_for_state_dict:
                self._drop_state()

    def _after_load(self, optimizer: optim.Optimizer) -> None:
        if optimizer is not self.optimizer:  # one of several: the others keep their state
            loaded = dict(optimizer.state)
            if self._export_state is not None and not self.has_new_state and not self.is_state_loaded():
                self._export_state()
            own = {param for group in optimizer.param_groups for param in group["params"]}
            for param in own & self.optimizer.state.keys():
                del self.optimizer.state[param]
            self.optimizer.state.update(loaded)
        self.has_new_state = True

    def put_state(self, states: Mapping[str, Mapping[str, Any]], *, is_new: bool = False) -> None:
        """Give the template the state of the ranks' optimizers, by parameter.

        Args:
            states: by parameter.
            is_new: whether ranks that are built next are to get it.
        """
        self.has_new_state = is_new
        states = {**self._idle_state, **states}
        own: dict[Tensor, dict[str, Any]] = {
            param: dict(states[name]) for name, param in self.params.items() if name in states
        }
        state = self.optimizer.state
        state.fill(own) if isinstance(state, StateOfRanks) else state.update(own)

    def take_state(self) -> dict[str, dict[str, Any]]:
        """Take the template's state of trained parameters, which ranks have from now on."""
        state, self.has_new_state = self._own_state(), False
        states = {name: state[param] for name, param in self.params.items() if state.get(param)}
        self._idle_state = {name: state for name, state in states.items() if name not in self.group_index}
        self._use_state(StateOfRanks(self._load_state))
        return {name: state for name, state in states.items() if name in self.group_index}

    def has_mergeable_state(self) -> bool:
        """Return whether the trained parameters of each group have state alike, so that they may be one tensor."""
        numbers: dict[int, set[object]] = {}
        for name, group in self.group_index.items():
            param = self.params[name]
            state = self._own_state().get(param, {})
            scalars = [(key, str(value)) for key, value in state.items() if is_scalar_state(key, value, param)]
            numbers.setdefault(group, set()).add((*sorted(scalars), *sorted(state)))
        return all(len(distinct) == 1 for distinct in numbers.values())

    def require_no_step_hooks(self) -> None:
        """Raise if the optimizer has hooks that run before its step, which would not see the ranks' gradients.

        Raises:
            PlanError: it has one.
        """
        for optimizer in self.user_optimizers:
            hooks = optimizer._optimizer_step_pre_hooks.values()  # noqa: SLF001 - there is no other way to see them
            if all(isinstance(hook, RefusedStep) for hook in hooks):
                continue
            raise PlanError(
                f"{type(optimizer).__name__} has a hook of register_step_pre_hook, but ranks update shards with "
                "optimizers of their own, whose gradients it would not see; remove the hook and change the loss or the "
                "options instead (clip_norm=... clips gradients), or use register_step_post_hook, whose hooks run "
                "after every step"
            )

    def _probe(self) -> None:
        """Raise unless ranks can build their optimizers."""
        if not self.optimizer_class.__module__.startswith("torch.optim"):
            groups = enumerate(self.optimizer.param_groups)
            self.build([(index, nn.Parameter(param.detach())) for index, group in groups for param in group["params"]])

    def list_scalars(self) -> dict[str, object] | None:
        """Return the numbers that the optimizer keeps for a parameter after a step, None if that is not known."""
        if not self.is_elementwise:
            return None
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.zeros(2)
        optimizer = self.build([(0, param)])
        with without_dynamo_import():
            optimizer.step()
        return {key: value for key, value in optimizer.state[param].items() if is_scalar_state(key, value, param)}

    def list_state_dtypes(self, group: int, dtype: torch.dtype, num_dims: int = 1) -> dict[str, torch.dtype]:
        """Return the entries of the optimizer's state that have a number for each element, and their dtypes.

        Args:
            group: index of an option group, by whose options a parameter is updated.
            dtype: of the parameter.
            num_dims: of the parameter, if the optimizer is not elementwise.
        """
        param = nn.Parameter(torch.zeros((2,) * num_dims, dtype=dtype))
        param.grad = torch.zeros_like(param)
        optimizer = self.build([(group, param)])
        with without_dynamo_import():
            optimizer.step()
        state = optimizer.state.get(param, {})
        return {key: value.dtype for key, value in state.items() if not is_scalar_state(key, value, param)}

    def options(self, group: int) -> dict[str, Any]:
        """Return the current options of a group."""
        group_options = self.optimizer.param_groups[group]
        return {key: value for key, value in group_options.items() if key not in {"params", "param_names"}}

    def build(self, targets: Sequence[tuple[int, Tensor]]) -> optim.Optimizer:
        """Return an optimizer like the user's over tensors, each with the index of its option group.

        Raises:
            PlanError: it cannot be built.
        """
        groups: dict[int, list[Tensor]] = {}
        for group, tensor in targets:
            groups.setdefault(group, []).append(tensor)
        param_groups = [{"params": tensors, **self.options(group)} for group, tensors in groups.items()]
        with without_dynamo_import():
            built = self._from_factory(param_groups) or rebuild_optimizer(self.optimizer, param_groups)
        for param_group, group in zip(built.param_groups, groups, strict=True):
            param_group.update(self.options(group), **self._kernel_options)
            param_group["spec_group"] = group
        return built

    def rebind(self, params: Mapping[str, nn.Parameter]) -> OptimizerSpec:
        """Return the same specification with current options, on the parameters of a copy of the model."""
        if self._factory is not None:
            return OptimizerSpec(self._factory, params)
        return OptimizerSpec(self.build([(group, params[name]) for name, group in self.group_index.items()]), params)

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

    def sync_options(self, optimizer: optim.Optimizer, skips: Tensor | None = None) -> None:
        """Copy the template's options, which a scheduler may have changed, into an optimizer made by :meth:`build`.

        Args:
            optimizer: the rank's.
            skips: on a device, 1 if its next step is skipped; None if the host knows that it is not.
        """
        # torch's fused SGD needs the momentum of all parameters or of none; those of the first steps may have some
        options = {} if skips is None and isinstance(optimizer, optim.SGD) else self._kernel_options
        for param_group in optimizer.param_groups:
            param_group.update(self.options(param_group["spec_group"]), **options)
        optimizer.found_inf = skips  # type: ignore[attr-defined]  # which torch's fused kernels read

    def note_step(self, optimizer: optim.Optimizer) -> None:
        """Note the options that a step of a rank's optimizer has changed, as of one that counts steps in its groups."""
        names = () if self._step_effects is None else self._step_effects.options
        if names:
            for group in optimizer.param_groups:
                self._stepped_options[group["spec_group"]] = {name: group[name] for name in names if name in group}

    def after_step(self, is_applied: Callable[[], bool] = lambda: True) -> None:
        """Mark the template as stepped, for schedulers that warn otherwise, and run its hooks unless it was skipped.

        Args:
            is_applied: returns whether the step was not skipped, which on a device waits for it; called for hooks only.
        """
        for group, options in self._stepped_options.items():
            self.optimizer.param_groups[group].update(options)
        self._stepped_options.clear()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - what torch's wrapper sets
        hooks = [
            (optimizer, hook)
            for optimizer in self.user_optimizers
            for hook in optimizer._optimizer_step_post_hooks.values()  # noqa: SLF001 - as above
        ]
        for optimizer, hook in hooks if hooks and is_applied() else ():
            hook(optimizer, (optimizer,), {})


def is_scalar_state(key: str, value: object, target: Tensor) -> bool:
    """Return whether an entry of an optimizer's state is one number for all elements, as its step count is."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and (key in SCALAR_STATE_KEYS or target.numel() > 1))


class RefusedStep:
    """A hook that refuses a step of the user's optimizer while ranks train with optimizers of their own."""

    def __call__(self, optimizer: optim.Optimizer, *_: object) -> None:
        """Raise.

        Raises:
            DataError: always.
        """
        raise DataError(
            f"{type(optimizer).__name__}.step() was called between two steps, but a call of step(inputs, targets) runs "
            "forward, backward and the update, so the same gradients would be applied twice, or to weights that the "
            "ranks do not see; remove optimizer.step() from the loop, or call close() before a loop without ranks"
        )


def step_without_closure(optimizer: optim.Optimizer) -> None:
    """Take a step of an optimizer.

    Raises:
        PlanError: it failed because it has no closure.
    """
    try:
        optimizer.step()
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        if not any(text in str(error) for text in NEEDS_CLOSURE):
            raise
        reason = first_line(error)
        raise closure_error(type(optimizer), f"without a closure failed ({reason})") from error


def require_no_closure(optimizer_class: type[optim.Optimizer]) -> None:
    """Raise unless an optimizer steps with gradients only.

    Raises:
        PlanError: its step has no default for a closure.
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise closure_error(optimizer_class, "needs a closure that computes the loss again")


def closure_error(optimizer_class: type[optim.Optimizer], reason: str) -> PlanError:
    """Return the error for an optimizer that evaluates the loss again within a step, as LBFGS does."""
    return PlanError(
        f"{optimizer_class.__name__}.step {reason}, but ranks take one step with the gradients of one forward and "
        "backward; take an optimizer that steps with gradients alone (AdamW, SGD)"
    )


def find_split_size(optimizer: optim.Optimizer) -> int | None:
    """Return after multiples of how many elements a parameter may be split for its update; None if it may not.

    Example:
        >>> weight = nn.Parameter(torch.zeros(100, 100))
        >>> [find_split_size(kind([weight], lr=0.1)) for kind in (optim.SGD, AdamW8bit, optim.Adafactor)]
        [1, 4096, None]
    """
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return 1
    if isinstance(optimizer, BlockwiseAdam) and type(optimizer) in {Adam8bit, AdamW8bit}:
        return optimizer.split_size
    return None


def is_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether the state of a parameter has the same entries with the same values.

    Example:
        >>> is_same_state({"step": 1, "buffer": torch.ones(2)}, {"step": 1, "buffer": torch.zeros(2)})
        False
    """
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key])
        if isinstance(value, Tensor) and isinstance(other[key], Tensor)
        else type(value) is type(other[key]) and bool(value == other[key])
        for key, value in one.items()
    )


def require_trainable(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the trainable ones among a model's parameters.

    Raises:
        PlanError: there are none.
    """
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    if not trainable:
        raise PlanError(
            f"the model has {len(params)} parameters, none of them trainable, so there is nothing to train; "
            "pass a model with parameters that require a gradient"
        )
    return trainable


def map_params_to_groups(optimizer: optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the index of the option group of each trainable parameter; frozen ones may be in a group, too.

    Raises:
        PlanError: the optimizer holds other tensors, holds a parameter twice, or lacks a trainable one.
    """
    names = {id(param): name for name, param in params.items()}
    groups: dict[str, int] = {}
    foreign: list[Tensor] = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                foreign.append(param)
            elif name in groups:
                raise PlanError(
                    f"the optimizer holds {name} twice, so that torch would update it twice in a step; give it each "
                    "parameter once"
                )
            else:
                groups[name] = index
    missing = [name for name, param in params.items() if param.requires_grad and name not in groups]
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
            "requires_grad_(False); give several optimizers as a list, or, if they train parts of a model in turns, "
            "call parallelize(...) for each part"
        )
    return {name: index for name, index in groups.items() if params[name].requires_grad}


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


def squared_norm(grads: Iterable[Tensor]) -> float:
    """Return the sum of squares over all gradients, accumulated in float64."""
    total, device_norms = 0.0, []
    for norm in map(_norm, grads):
        if norm.device.type == "cpu":
            total += float(norm) ** 2
        else:
            device_norms.append(norm.double())
    if device_norms:  # read together: every read waits for the device
        total += sum(norm**2 for norm in torch.stack(device_norms).tolist())
    return total


def squared_norm_tensor(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over gradients on a device as a scalar of float64 there, without waiting."""
    norms = [_norm(grad).double() for grad in grads]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _norm(grad: Tensor) -> Tensor:
    dense = grad.coalesce().values() if grad.is_sparse else grad.detach()
    is_narrow = not dense.is_complex() and dense.dtype != torch.float64
    norm: Tensor = torch.linalg.vector_norm(dense, dtype=torch.float32 if is_narrow else None)
    return norm


def scale_grad(grad: Tensor, scale: Tensor | float) -> None:
    """Multiply a gradient with a number, which is rounded to float32 at least, as numbers of the host are."""
    if isinstance(scale, Tensor) and grad.dtype in {torch.float16, torch.bfloat16}:
        values = grad._values() if grad.is_sparse else grad  # noqa: SLF001 - uncoalesced ones have no public name
        values.copy_(values.float().mul_(scale))
    else:
        grad.mul_(scale)


def clip_by_value(grad: Tensor, bound: float) -> None:
    """Clamp every element of a gradient to ``[-bound, bound]``; repeated rows of a sparse gradient are summed first."""
    if grad.is_sparse:
        summed = grad.coalesce()
        summed.values().clamp_(-bound, bound)
        grad.copy_(summed)
    else:
        grad.clamp_(-bound, bound)
