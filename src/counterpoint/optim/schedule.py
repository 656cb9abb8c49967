"""Learning rates for large batches: scaled with the batch, warmed up, and brought down again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from counterpoint.errors import PlanError
from counterpoint.optim.decays import Course, Decay, find, one_cycle
from counterpoint.optim.options import require_at_least, require_counts, require_one_of

Rule: TypeAlias = Literal["linear", "sqrt", "none"]

_POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


def learning_rate_scale(batch_size: int, *, reference_batch_size: int = 256, rule: Rule = "linear") -> float:
    """Return what a learning rate is multiplied with that was found with another batch.

    Args:
        batch_size: samples of one global batch, over all ranks.
        reference_batch_size: the global batch that the learning rate was found with.
        rule: ``linear``, ``sqrt``, or ``none`` for a rate that was found with this batch.

    Raises:
        PlanError: a batch has no sample, or there is no such rule.

    Example:
        >>> learning_rate_scale(8192), learning_rate_scale(1024, rule="sqrt")
        (32.0, 2.0)

    Source:
        Linear: Goyal et al., Accurate, large minibatch SGD: training ImageNet in 1 hour, arXiv:1706.02677, 2017,
        section 2.1. Square root: Krizhevsky, One weird trick for parallelizing convolutional neural networks,
        arXiv:1404.5997, 2014; You et al., ICLR 2020, with LAMB.
    """
    require_one_of("rule", rule, _POWERS)
    require_counts(batch_size=batch_size, reference_batch_size=reference_batch_size)
    return float((batch_size / reference_batch_size) ** _POWERS[rule])


def large_batch_schedule(  # noqa: PLR0913 - one recipe, all by keyword
    optimizer: Optimizer,
    *,
    batch_size: int,
    epochs: int,
    steps_per_epoch: int,
    reference_batch_size: int = 256,
    rule: Rule = "linear",
    warmup_epochs: float = 5.0,
    warmup_from: float | None = None,
    decay: str = "cosine",
    **options: Any,  # noqa: ANN401 - those of the decay, which are checked against it
) -> LRScheduler:
    """Scale an optimizer's learning rates for a batch; return the schedule that warms them up and brings them down.

    The rate of each group rises in a straight line from what it was, a little in every step. All of this goes by the
    global batch; how many ranks share it has no part in it.

    Args:
        optimizer: its learning rates were found with the reference batch.
        batch_size: samples of one global batch, over all ranks.
        epochs: passes over the data in the whole run.
        steps_per_epoch: optimizer steps in one pass; the schedule is stepped after each of them.
        reference_batch_size: the global batch that the learning rates were found with.
        rule: how rates grow with the batch: ``linear``, ``sqrt``, or ``none``.
        warmup_epochs: how long the rise takes; 0 for none.
        warmup_from: what share of the full rate the first step has; by default the rate before it was scaled.
        decay: ``constant``, ``step``, ``multi-step``, ``exponential``, ``polynomial``, ``cosine`` or ``one-cycle``.
        **options: of the decay, under torch's names: ``step_size`` and ``gamma`` of ``step``, ``milestones`` and
            ``gamma`` of ``multi-step``, in epochs from the beginning of the run; ``gamma`` of ``exponential``, per
            epoch; ``power`` of ``polynomial``; ``eta_min`` of ``cosine``; ``final_div_factor`` and ``cycle_momentum``
            of ``one-cycle``.

    Raises:
        PlanError: a number makes no sense, the warm-up is not shorter than the run, there is no such rule, decay or
            option, or the optimizer has a schedule already.

    Example:
        >>> from torch import nn, optim
        >>> optimizer = optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        >>> schedule = large_batch_schedule(
        ...     optimizer, batch_size=1024, epochs=90, steps_per_epoch=1250, decay="multi-step", milestones=(30, 60, 80)
        ... )
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["initial_lr"]
        (0.1, 0.4)

    Source:
        Goyal et al., Accurate, large minibatch SGD: training ImageNet in 1 hour, arXiv:1706.02677, 2017, section 2.2.
    """
    scale = learning_rate_scale(batch_size, reference_batch_size=reference_batch_size, rule=rule)
    require_counts(epochs=epochs, steps_per_epoch=steps_per_epoch)
    warmup_steps = warmup_steps_of(warmup_epochs, epochs, steps_per_epoch)
    first = warmup_share(warmup_from, scale)
    course = Course(warmup_steps, epochs * steps_per_epoch, steps_per_epoch, first)
    make = find(decay, list(options))
    require_unscheduled(optimizer)
    with _scaled(optimizer, scale):
        schedule = _composed(optimizer, course, make, options)
    vars(schedule).update(batch_size=batch_size, steps_per_epoch=steps_per_epoch)  # for whoever steps it, to compare
    return schedule


@contextmanager
def _scaled(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Multiply the learning rates; where what follows fails, they are as before."""
    given = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= scale
    try:
        yield
    except BaseException:
        for group, rate in zip(optimizer.param_groups, given, strict=True):
            group["lr"] = rate
            group.pop("initial_lr", None)
        raise


def _composed(optimizer: Optimizer, course: Course, make: Decay, options: dict[str, Any]) -> LRScheduler:
    """Return warm-up and decay as one schedule; one-cycle has a rise of its own."""
    if make is one_cycle or course.warmup_steps == 0:
        return make(optimizer, course, **options)
    rising = LinearLR(optimizer, start_factor=course.warmup_from, total_iters=course.warmup_steps)
    return SequentialLR(optimizer, [rising, make(optimizer, course, **options)], [course.warmup_steps])


def warmup_steps_of(warmup_epochs: float, epochs: int, steps_per_epoch: int) -> int:
    """Return how many steps a warm-up takes.

    Raises:
        PlanError: it is not shorter than the run.
    """
    require_at_least(0, warmup_epochs=warmup_epochs)
    steps = round(warmup_epochs * steps_per_epoch)
    if steps >= epochs * steps_per_epoch:
        raise PlanError(
            f"a warm-up of {warmup_epochs:g} epochs leaves none of the run's {epochs} for the full learning rate; give "
            "a shorter warmup_epochs, or more epochs"
        )
    return steps


def warmup_share(warmup_from: float | None, scale: float) -> float:
    """Return what share of the full rate the first step has; by default what makes it the rate before it was scaled.

    Raises:
        PlanError: it is none.
    """
    first = min(1.0, 1 / scale) if warmup_from is None else warmup_from
    if not 0 < first <= 1:
        raise PlanError(f"warmup_from={first!r} is no share of the learning rate; give more than 0, 1 at most, or None")
    return first


def require_unscheduled(optimizer: Optimizer) -> None:
    """Check that an optimizer has no schedule, so that its learning rates have not been scaled yet.

    Raises:
        PlanError: it has one.
    """
    rates = [group["initial_lr"] for group in optimizer.param_groups if "initial_lr" in group]
    if rates:
        raise PlanError(
            f"the optimizer has a schedule already, from a learning rate of {rates[0]:g}; a second one would scale the "
            "rate again: make one schedule for an optimizer, and a new optimizer for another batch"
        )
