"""``DistributedOptimizer``: an optimizer of torch whose gradients are those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import Among
from counterpoint.compat.horovod.compression import Compression, Compressor
from counterpoint.compat.horovod.errors import CallOrderError
from counterpoint.compat.horovod.gradients import Gradients, Named, Settings
from counterpoint.compat.horovod.rank_sets import RankSet, global_process_set, member_of
from counterpoint.compat.horovod.reductions import Op, Reduce
from counterpoint.compat.horovod.waiting import finish_list
from counterpoint.compat.horovod.world import the_world
from counterpoint.errors import PlanError

O = TypeVar("O", bound=Optimizer)  # noqa: E741 - an optimizer

Closure = Callable[[], Any]


class OfAllRanks:
    """What ``DistributedOptimizer`` adds to the class of an optimizer: gradients are reduced before a step."""

    _gradients: Gradients | None
    _is_synchronized: bool
    _synchronizes: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """A step has so many backward passes from now on."""
        self.backward_passes_per_step = passes
        if self._gradients is not None:
            self._gradients.expect(passes)

    def load_state_dict(self, state_dict: Any) -> None:  # noqa: ANN401 - torch's own
        """The optimizer is as it was saved, before a step."""
        if self._gradients is not None:
            self._gradients.forget()
        self._is_synchronized, self._synchronizes = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Every parameter's gradient is that of all members; ``step`` need not do it again.

        Raises:
            HorovodInternalError: another rank has other parameters, is gone or late.
        """
        if self._gradients is not None:
            self._gradients.require_all(param for group in self.param_groups for param in group["params"])
            self._gradients.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` takes the gradients as they are: they have been synchronized, and perhaps clipped since then."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - what the closure returns
        """The parameters have been updated with the gradients of all members.

        Args:
            closure: computes the loss and its gradients; they are synchronized each time it is called.
        """
        if closure is not None:
            return super().step(self._synchronizing(closure))  # type: ignore[misc]
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients a second time; put the step "
                    "into `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step()  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        """The gradients are gone, or zeros.

        Raises:
            CallOrderError: a backward pass has fed them, and they may be on their way to the other ranks.
        """
        if self._gradients is not None and self._gradients.is_fed:
            raise CallOrderError(
                "zero_grad() was called after backward() and before step() or synchronize(); the gradients are on "
                "their way to the other ranks: call it before backward(), or after step()"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _synchronizing(self, closure: Closure) -> Closure:
        def loss_of_all() -> Any:  # noqa: ANN401 - what the closure returns
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._is_synchronized = False
            return loss

        return loss_of_all


class DeltasOfAllRanks:
    """What ``DistributedOptimizer(op=Adasum)`` adds: each rank steps alone, and the steps are combined by Adasum."""

    _named: Named
    _compression: type[Compressor]
    _process_set: RankSet
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """A step has so many backward passes from now on."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing is done: what is combined are the steps, not the gradients."""
        return

    def skip_synchronize(self) -> None:
        """Refuse.

        Raises:
            CallOrderError: always.
        """
        raise CallOrderError(
            "skip_synchronize() with op=Adasum: each rank's step is combined after it was taken, so no gradients are "
            "synchronized that could be skipped; use op=Average to clip gradients of all ranks"
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - what the closure returns
        """The parameters have moved by the Adasum of all members' steps."""
        params = [param for _, param in self._named if param.requires_grad]
        before = [param.detach().clone() for param in params]
        loss = super().step(closure)  # type: ignore[misc]
        pairs = [self._compression.compress(param - start) for param, start in zip(params, before, strict=True)]
        among = Among("steps of the optimizer", member_of(self._process_set))
        deltas = [delta for delta, _ in pairs]
        handle = collectives.all_reduce(the_world(), deltas, among, Reduce(Op.ADASUM))
        for param, start, delta, (_, ctx) in zip(params, before, finish_list(handle), pairs, strict=True):
            param.copy_(start + self._compression.decompress(delta, ctx))
        return loss


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: O,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: RankSet = global_process_set,
) -> O:
    """Return an optimizer of the same class, with the same parameters, options and state, that all ranks step together.

    Args:
        optimizer: any of torch's; use what is returned instead of it.
        named_parameters: ``model.named_parameters()``, for errors and the timeline.
        compression: what is done to gradients on the wire.
        backward_passes_per_step: gradients are accumulated over so many passes before they are reduced.
        op: Average or Sum of gradients, or Adasum of the ranks' steps.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added up, and by what is
            left of the number of ranks afterwards.
        num_groups: Horovod's older name for ``groups``.
        groups: into how many groups the parameters are split, or the groups themselves; each is reduced as one. Left
            out, as many gradients as fit into HOROVOD_FUSION_THRESHOLD are.
        sparse_as_dense: sparse gradients travel with their zeros, and are sparse again afterwards.
        process_set: who takes part; on the other ranks the optimizer steps alone.

    Raises:
        PlanError: the parameters or options contradict each other; it says which.

    Cost:
        bytes on the wire per rank and step: those of a ring all-reduce of the compressed gradients. Gradients are
        copied once, into memory that the ranks of a host share.
    """
    named = _named(optimizer, named_parameters)
    _check(op, gradient_predivide_factor, backward_passes_per_step)
    is_adasum = op == Op.ADASUM and the_world().fabric.num_ranks > 1
    face = DeltasOfAllRanks if is_adasum else OfAllRanks
    kind = type(type(optimizer).__name__, (face, type(optimizer)), {})
    new: Any = object.__new__(kind)
    state = dict(optimizer.__dict__)
    state.pop("step", None)  # a scheduler's wrapper of the step of the old one
    new.__dict__.update(state)
    new.backward_passes_per_step = backward_passes_per_step
    if is_adasum:
        new._named, new._compression, new._process_set = named, compression, process_set  # noqa: SLF001
        return cast("O", new)
    new._is_synchronized, new._synchronizes, new._gradients = False, True, None  # noqa: SLF001
    if process_set.included() and the_world().fabric.num_ranks > 1:
        reduce = Reduce(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
        grouped = _groups(groups if groups is not None else num_groups or None, named)
        new._gradients = Gradients(named, Settings(compression, reduce, process_set, grouped, sparse_as_dense))  # noqa: SLF001
        new._gradients.expect(backward_passes_per_step)  # noqa: SLF001
    return cast("O", new)


def _check(op: Op, predivide_factor: float, passes: int) -> None:
    if op not in {Op.AVERAGE, Op.SUM, Op.ADASUM}:
        raise PlanError(
            f"DistributedOptimizer with op={op!r}: gradients are averaged or added; give Average, Sum, Adasum"
        )
    if predivide_factor != 1.0 and op != Op.AVERAGE:
        raise PlanError(
            f"gradient_predivide_factor={predivide_factor} with op={Op(op).name}: it splits the division of a mean; "
            "leave it out, or use op=Average"
        )
    if not predivide_factor > 0:
        raise PlanError(f"gradient_predivide_factor={predivide_factor} divides gradients; give a number above 0")
    if passes <= 0:
        raise PlanError(f"backward_passes_per_step={passes} leaves nothing to step with; give a number from 1")


def _named(optimizer: Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> Named:
    """Return every parameter of the optimizer once, with its name.

    Raises:
        PlanError: names or parameters are missing or there twice.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if given is None:
        return [(f"parameter {number}", param) for number, param in enumerate(params)]
    named: list[Any] = list(given)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise PlanError(
            "named_parameters holds something that is no pair of name and parameter; give model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanError(f"named_parameters has {', '.join(twice)} more than once; every name must be given once")
    of = {id(param): name for name, param in named}
    unnamed = [number for number, param in enumerate(params) if id(param) not in of]
    if unnamed:
        raise PlanError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's {len(params)} parameters, the first with "
            f"shape {tuple(params[unnamed[0]].shape)}; name all of them, or leave named_parameters out"
        )
    return [(of[id(param)], cast("nn.Parameter", param)) for param in params]


def _groups(groups: int | Sequence[Sequence[Tensor]] | None, named: Named) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups as numbers of the parameters that are trained.

    Raises:
        PlanError: there is no such number of groups, or a parameter is in two.
    """
    if groups is None:
        return None
    trained = [param for _, param in named if param.requires_grad]
    if isinstance(groups, int):
        if groups <= 0:
            raise PlanError(f"groups={groups}; give a number of groups from 1, or lists of parameters")
        edges = [len(trained) * at // groups for at in range(groups + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))
    numbers = {id(param): number for number, param in enumerate(trained)}
    found = [tuple(numbers[id(param)] for param in group if id(param) in numbers) for group in groups]
    flat = [number for group in found for number in group]
    if len(set(flat)) != len(flat):
        raise PlanError("groups has a parameter in two groups; a gradient is reduced once: give each parameter once")
    return tuple(found)
