"""Find where a model draws random numbers, and which dim of each draw is the samples'.

The model is run on two samples, and on these two twice. A draw's dim that doubles is its batch dim. Where that has
several entries for each sample, as in ``x.view(batch * seq, -1)``, the values that the draw is for show whether those
of a sample are adjacent. Draws that are not found here, or are in no known order, cannot be keyed by sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, KeptValues, num_samples, preserve_state, split_call_args
from counterpoint.partitioning.fx_ops import call_draws
from counterpoint.partitioning.own_generators import OwnGenerator, find_generators, read_states
from counterpoint.partitioning.seed_hooks import SeedHooks
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, InterceptFunctions, TorchFunction
from counterpoint.runtime.rng.random_functions import random_functions
from counterpoint.terminal_text import warn


class DrawSite(NamedTuple):
    """One draw of a forward: the path of the module call, and the number of the draw in this call, from 0."""

    path: str
    number: int


@dataclass(frozen=True, slots=True)
class DrawSites:
    """What is known of a model's draws.

    Args:
        batch_dims: of each draw that can be keyed by sample, its batch dim; None if it is one for the whole batch.
        unkeyed: of other draws, what draws, by path of the module call.
    """

    batch_dims: Mapping[DrawSite, int | None] = field(default_factory=dict)
    unkeyed: Mapping[str, str] = field(default_factory=dict)


class RecordedDraw(NamedTuple):
    """A draw's shape, and the tensor that it is for, if there is one."""

    shape: tuple[int, ...]
    like: Tensor | None


@dataclass(slots=True)
class DrawRecorder:
    """A source of constant numbers that records the draws of one forward, so that its values are those of its inputs.

    Args:
        draws: in order.
        unkeyed: what else has drawn, by path.
        path: of the latest module call.
        generators: of the model's own.
        state: of the random generators of Python and numpy, and of its own.
    """

    draws: dict[DrawSite, RecordedDraw] = field(default_factory=dict)
    unkeyed: dict[str, str] = field(default_factory=dict)
    path: str = ""
    number: int = 0
    generators: Sequence[OwnGenerator] = ()
    state: object = None

    def __post_init__(self) -> None:
        self.state = self._read_state()

    def __call__(self, path: str) -> None:
        """Begin the call of a module."""
        self.check_other_generators()
        self.path, self.number = path, 0

    def check_other_generators(self) -> None:
        """Record whether a generator of Python or numpy was used since the last call."""
        state = self._read_state()
        if state != self.state:
            self.unkeyed.setdefault(self.path, "a generator of Python or numpy")
        self.state = state

    def _read_state(self) -> object:
        return other_rng_state(), read_states(self.generators)

    def select(self, shape: Sequence[int], p: float, value: float, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ones."""
        del p, value
        self._record(shape, like)
        return torch.ones(tuple(shape), dtype=dtype, device=like.device)

    def words(
        self, shape: Sequence[int], device: torch.device, like: Tensor | None = None, *, per_entry: int = 0
    ) -> Tensor:
        """Return the middle of the range."""
        self._record(shape, like)
        return torch.full((*shape, *filter(None, [per_entry])), 1 << 31, dtype=torch.int64, device=device)

    def _record(self, shape: Sequence[int], like: Tensor | None) -> None:
        self.draws[DrawSite(self.path, self.number)] = RecordedDraw(tuple(shape), like)
        self.number += 1


class UnkeyedDrawDetector(TorchDispatchMode):
    """Records operators that draw from torch's generators, in spite of a recorder."""

    def __init__(self, recorder: DrawRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import its compiler to disable it here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operator."""
        if call_draws(func, args, kwargs or {}):
            self.recorder.unkeyed.setdefault(self.recorder.path, f"torch's {func.overloadpacket.__name__}")
        return func(*args, **(kwargs or {}))


def find_draw_sites(model: nn.Module, inputs: Inputs) -> DrawSites:
    """Return where a model draws in training; nothing is known of one that does not run on other numbers of samples.

    Args:
        model: its state is preserved.
        inputs: of a call, with one sample or more.
    """
    count = min(num_samples(inputs), 2)
    try:
        once, twice = (_record_draws(model, _repeat_samples(inputs, count, times)) for times in (1, 2))
    except Exception as error:  # noqa: BLE001 - training raises it again, with its location, if it is one there
        return DrawSites(unkeyed={"": f"a forward that does not run on {count} or {2 * count} samples ({error})"})
    found: dict[DrawSite, int | None] = {}
    unkeyed = dict(once.unkeyed)
    for site, draw in twice.draws.items():
        try:
            found[site] = find_batch_dim(once.draws[site], draw, count)
        except LookupError:
            unkeyed.setdefault(site.path, f"a draw of the shape {draw.shape} for {2 * count} samples")
    return DrawSites(found, unkeyed)


def _record_draws(model: nn.Module, inputs: Inputs) -> DrawRecorder:
    args, kwargs = split_call_args(inputs)
    kept_values = KeptValues(model)
    with preserve_rng(), preserve_state(model), torch.enable_grad():  # for a forward that differentiates
        recorder = DrawRecorder(generators=find_generators(model))
        hooks = SeedHooks(model, recorder)
        try:
            with UnkeyedDrawDetector(recorder), InterceptFunctions(random_functions(recorder)):
                model(*args, **kwargs)
        finally:
            hooks.remove()
            kept_values.find()
            kept_values.restore()
        recorder.check_other_generators()
    return recorder


def record_loss_draws(
    compute: Callable[[Mapping[TorchFunction, FunctionReplacement]], object], generators: Sequence[OwnGenerator]
) -> DrawRecorder:
    """Return what a loss draws.

    Args:
        compute: calls it with the functions that replace torch's.
        generators: of its own.
    """
    recorder = DrawRecorder(generators=generators)
    with UnkeyedDrawDetector(recorder):
        compute(random_functions(recorder))
    recorder.check_other_generators()
    return recorder


def _repeat_samples(inputs: Inputs, count: int, times: int) -> Inputs:
    """Return copies of the first samples, several times after each other."""
    total = num_samples(inputs)

    def repeat(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.cat([leaf[:count]] * times) if leaf.dim() and len(leaf) == total else leaf.clone()

    return tree_map(repeat, inputs)


def find_batch_dim(once: RecordedDraw, twice: RecordedDraw, count: int) -> int | None:
    """Return the batch dim of a draw; None if the draw does not depend on the number of samples.

    Args:
        once: for ``count`` samples.
        twice: for the same samples, and again the same.
        count: how many.

    Raises:
        LookupError: it is unknown.

    Example:
        >>> find_batch_dim(RecordedDraw((5, 2, 7), None), RecordedDraw((5, 4, 7), None), 2)
        1
    """
    if len(once.shape) != len(twice.shape):
        raise LookupError
    changed = [dim for dim, (old, new) in enumerate(zip(once.shape, twice.shape, strict=True)) if old != new]
    if not changed:
        return None
    dim = changed[0]
    if len(changed) > 1 or twice.shape[dim] != 2 * once.shape[dim] or once.shape[dim] % count:
        raise LookupError
    if once.shape[dim] != count and not _is_sample_major(once, twice, dim):
        raise LookupError
    return dim


def loss_batch_dim(shape: Sequence[int], num_samples: int) -> int | None:
    """Return the batch dim of a draw of a loss: 0, or None if it seems to be one for the whole batch.

    Example:
        >>> loss_batch_dim((4, 3), 4), loss_batch_dim((), 4), loss_batch_dim((3,), 4)
        (0, None, None)
    """
    return 0 if shape and shape[0] == num_samples else None


def may_have_samples(shape: Sequence[int], num_samples: int) -> bool:
    """Return whether a draw may have samples along a dim, several entries for each.

    Example:
        >>> may_have_samples((8,), 4), may_have_samples((3,), 4)
        (True, False)
    """
    return any(not size % num_samples for size in shape)


def find_unknown_draw(
    draws: Sequence[RecordedDraw], num_samples: int, others: Sequence[RecordedDraw] | None, num_others: int
) -> RecordedDraw | None:
    """Return the first draw of a loss whose batch dim may be another one than :func:`loss_batch_dim` says.

    Args:
        draws: of the loss of some samples.
        num_samples: how many.
        others: of the loss of another number of samples; None if it cannot be computed.
        num_others: how many.
    """
    for index, draw in enumerate(draws):
        is_by_sample = loss_batch_dim(draw.shape, num_samples) == 0
        if others is None:
            is_known = is_by_sample or not may_have_samples(draw.shape, num_samples)
        else:
            expected = (num_others, *draw.shape[1:]) if is_by_sample else draw.shape
            is_known = len(others) == len(draws) and others[index].shape == expected
        if not is_known:
            return draw
    return None


def _is_sample_major(once: RecordedDraw, twice: RecordedDraw, dim: int) -> bool:
    """Tell whether the entries of a sample are adjacent, so that those of the repeated samples repeat the first."""
    if once.like is None or twice.like is None:
        return False
    single, double = once.like.detach().movedim(dim, 0), twice.like.detach().movedim(dim, 0)
    half = len(single)
    return all(torch.allclose(single, part, rtol=1e-3, atol=1e-6) for part in (double[:half], double[half:]))


def other_rng_state() -> object:
    """Return the state of the random generators of Python and numpy."""
    state = mtrand.get_bit_generator().state["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


def warn_unkeyed(model: nn.Module, sites: DrawSites, plan: str, num_microbatches: int) -> None:
    """Warn of each module whose random numbers are not those of another plan."""
    for call, what in sites.unkeyed.items():
        warn(describe_unkeyed(model, call, what, plan, num_microbatches), stacklevel=2)


def describe_unkeyed(model: nn.Module, call: str, what: str, plan: str, num_microbatches: int) -> str:
    """Return the warning for one module call."""
    return (
        f"the random numbers of {describe_call(model, call)} come from {what}, which are not keyed by sample, so "
        f"{plan} with {num_microbatches} microbatches draws others than a single process does; {KEYED_DRAWS}"
    )


def require_keyed(model: nn.Module, sites: DrawSites, compilation: str) -> None:
    """Check that all random numbers of a model are keyed by sample, as those in graphs are.

    Raises:
        PlanError: some are not.
    """
    for call, what in sites.unkeyed.items():
        raise PlanError(
            f"the random numbers of {describe_call(model, call)} come from {what}, which are not keyed by sample, as "
            f"those in graphs of compile={compilation} have to be; {KEYED_DRAWS}, or drop compile="
        )


def describe_call(model: nn.Module, call: str) -> str:
    """Return the module of a call for a message."""
    path = call.partition("#")[0]
    return f"module '{path}' ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__


KEYED_DRAWS = (
    "draw with torch.rand, randn, bernoulli or F.dropout and without a generator of your own, one entry for each "
    "sample along one dim, the entries of a sample next to each other"
)
"""The remedy for draws that are not keyed by sample."""
