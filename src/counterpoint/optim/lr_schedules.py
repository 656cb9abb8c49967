r"""Learning-rate schedules for large batches: scaled with the batch size, warmed up, and decayed.

The decays are torch's schedulers with their options in epochs; the schedule is stepped after every optimizer step::

    lr * scale |          ________
               |        /         \___  decay
               |  warm-up              \____
    lr         |____/
               +----+---------------------------> step
                 warmup_epochs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from counterpoint.errors import PlanError
from counterpoint.optim.validation import require_at_least, require_counts, require_one_of

DecayFn: TypeAlias = Callable[..., LRScheduler]


@dataclass(frozen=True, slots=True)
class ScheduleSpan:
    """The warm-up and the length of a run.

    Args:
        warmup_steps: number of steps before the full learning rate.
        num_steps: total number of steps, including the warm-up.
        steps_per_epoch: number of optimizer steps of one pass over the data.
        warmup_from: fraction of the full rate in the first step.
    """

    warmup_steps: int
    num_steps: int
    steps_per_epoch: int
    warmup_from: float

    @property
    def decay_steps(self) -> int:
        """Number of steps after the warm-up."""
        return self.num_steps - self.warmup_steps

    def steps_after_warmup(self, epochs: Sequence[float]) -> list[int]:
        """Convert epochs of the run to steps after the warm-up.

        Raises:
            PlanError: one is during the warm-up or after the end.
        """
        steps = [round(epoch * self.steps_per_epoch) for epoch in epochs]
        for epoch, step in zip(epochs, steps, strict=True):
            if not self.warmup_steps < step < self.num_steps:
                raise PlanError(
                    f"the learning rate decays at epoch {epoch:g}, but the warm-up ends with epoch "
                    f"{self.warmup_steps / self.steps_per_epoch:g}, and the run with epoch "
                    f"{self.num_steps / self.steps_per_epoch:g}; give epochs between these two"
                )
        return [step - self.warmup_steps for step in steps]


def constant(optimizer: Optimizer, _span: ScheduleSpan) -> LRScheduler:
    """Keep the full rate."""
    return lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)


def step(optimizer: Optimizer, span: ScheduleSpan, *, step_size: float = 30, gamma: float = 0.1) -> LRScheduler:
    """Multiply by ``gamma`` every ``step_size`` epochs, counted from the beginning of the run."""
    require_at_least(1 / span.steps_per_epoch, step_size=step_size)
    num_decays = -(-span.num_steps // round(step_size * span.steps_per_epoch)) - 1
    return multi_step(optimizer, span, milestones=[step_size * (index + 1) for index in range(num_decays)], gamma=gamma)


def multi_step(
    optimizer: Optimizer, span: ScheduleSpan, *, milestones: Sequence[float] = (30, 60, 80), gamma: float = 0.1
) -> LRScheduler:
    """Multiply by ``gamma`` at given epochs of the run; by default those of Goyal et al. for 90 epochs."""
    require_at_least(0, gamma=gamma)
    return lr_scheduler.MultiStepLR(optimizer, span.steps_after_warmup(milestones), gamma)


def exponential(optimizer: Optimizer, span: ScheduleSpan, *, gamma: float = 0.94) -> LRScheduler:
    """Multiply by ``gamma`` per epoch, in equal factors per step."""
    require_at_least(0, gamma=gamma)
    return lr_scheduler.ExponentialLR(optimizer, gamma ** (1 / span.steps_per_epoch))


def polynomial(optimizer: Optimizer, span: ScheduleSpan, *, power: float = 2.0) -> LRScheduler:
    """Decay to 0 as ``(1 - fraction of the steps) ** power``; the papers use 2 with LARS, 1 with LAMB."""
    require_at_least(0, power=power)
    return lr_scheduler.PolynomialLR(optimizer, span.decay_steps, power)


def cosine(optimizer: Optimizer, span: ScheduleSpan, *, eta_min: float = 0.0) -> LRScheduler:
    """Decay along half a cosine to ``eta_min``, a learning rate for all groups."""
    require_at_least(0, eta_min=eta_min)
    return lr_scheduler.CosineAnnealingLR(optimizer, span.decay_steps, eta_min)


def one_cycle(
    optimizer: Optimizer, span: ScheduleSpan, *, final_div_factor: float = 1e4, cycle_momentum: bool = False
) -> LRScheduler:
    """Rise during the warm-up and decay afterwards, both along half a cosine, to a fraction of the first rate.

    Raises:
        PlanError: there is no warm-up, or it begins with the full rate.
    """
    require_at_least(1, final_div_factor=final_div_factor)
    if not span.warmup_steps or span.warmup_from >= 1:
        raise PlanError(
            f"one-cycle needs a warm-up, but has {span.warmup_steps} steps from {span.warmup_from:g} of the full "
            "learning "
            "rate; give warmup_epochs above 0 and warmup_from below 1, or decay='cosine'"
        )
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=span.num_steps,
        pct_start=(span.warmup_steps + 1) / span.num_steps,
        cycle_momentum=cycle_momentum,
        div_factor=1 / span.warmup_from,
        final_div_factor=final_div_factor,
    )


DECAYS: dict[str, DecayFn] = {
    "constant": constant,
    "step": step,
    "multi-step": multi_step,
    "exponential": exponential,
    "polynomial": polynomial,
    "cosine": cosine,
    "one-cycle": one_cycle,
}


def find_decay(name: str, options: Sequence[str]) -> DecayFn:
    """Return the decay of that name, and check its options.

    Raises:
        PlanError: there is none, or it has no such option.
    """
    require_one_of("decay", name, DECAYS)
    known = list(signature(DECAYS[name]).parameters)[2:]
    for option in options:
        if option not in known:
            remedy = f"its options are {', '.join(known)}" if known else "it has none"
            raise PlanError(f"the decay {name!r} has no option {option!r}; {remedy}")
    return DECAYS[name]


ScalingRule: TypeAlias = Literal["linear", "sqrt", "none"]

_POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


def learning_rate_scale(batch_size: int, *, reference_batch_size: int = 256, rule: ScalingRule = "linear") -> float:
    """Return the factor for a learning rate that was tuned with another batch size.

    Args:
        batch_size: number of samples of a global batch, over all ranks.
        reference_batch_size: global batch size with which the learning rate was tuned.
        rule: ``linear``, ``sqrt``, or ``none`` for a rate that was tuned with this batch size.

    Raises:
        PlanError: a batch size is not positive, or there is no such rule.

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


def large_batch_schedule(  # noqa: PLR0913 - options of one schedule
    optimizer: Optimizer,
    *,
    batch_size: int,
    epochs: int,
    steps_per_epoch: int,
    reference_batch_size: int = 256,
    rule: ScalingRule = "linear",
    warmup_epochs: float = 5.0,
    warmup_from: float | None = None,
    decay: str = "cosine",
    **options: Any,  # noqa: ANN401 - options of the decay
) -> LRScheduler:
    """Scale an optimizer's learning rates for a batch size; return the schedule of their warm-up and decay.

    In the warm-up each group's rate increases linearly in every step. The number of ranks has no influence.

    Args:
        optimizer: its learning rates were tuned with the reference batch size.
        batch_size: number of samples of a global batch, over all ranks.
        epochs: number of passes over the data in the whole run.
        steps_per_epoch: number of optimizer steps in one pass; the schedule is stepped after each of them.
        reference_batch_size: global batch size with which the learning rates were tuned.
        rule: scaling of rates with the batch size: ``linear``, ``sqrt``, or ``none``.
        warmup_epochs: length of the warm-up; 0 for none.
        warmup_from: fraction of the full rate in the first step; by default the unscaled rate.
        decay: ``constant``, ``step``, ``multi-step``, ``exponential``, ``polynomial``, ``cosine`` or ``one-cycle``.
        **options: of the decay, under torch's names: ``step_size`` and ``gamma`` of ``step``, ``milestones`` and
            ``gamma`` of ``multi-step``, in epochs from the beginning of the run; ``gamma`` of ``exponential``, per
            epoch; ``power`` of ``polynomial``; ``eta_min`` of ``cosine``; ``final_div_factor`` and ``cycle_momentum``
            of ``one-cycle``.

    Raises:
        PlanError: an argument is out of range or unknown, or the optimizer has a schedule already.

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
    warmup_steps = count_warmup_steps(warmup_epochs, epochs, steps_per_epoch)
    first = initial_lr_fraction(warmup_from, scale)
    span = ScheduleSpan(warmup_steps, epochs * steps_per_epoch, steps_per_epoch, first)
    make = find_decay(decay, list(options))
    require_no_scheduler(optimizer)
    with _scale_learning_rates(optimizer, scale):
        schedule = _build_schedule(optimizer, span, make, options)
    vars(schedule).update(
        batch_size=batch_size, steps_per_epoch=steps_per_epoch
    )  # a trainer compares them with its own
    return schedule


@contextmanager
def _scale_learning_rates(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Multiply the learning rates; restore them if an exception is raised inside."""
    unscaled = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= scale
    try:
        yield
    except BaseException:
        for group, rate in zip(optimizer.param_groups, unscaled, strict=True):
            group["lr"] = rate
            group.pop("initial_lr", None)
        raise


def _build_schedule(optimizer: Optimizer, span: ScheduleSpan, make: DecayFn, options: dict[str, Any]) -> LRScheduler:
    """Return warm-up and decay as one schedule; one-cycle includes a warm-up."""
    if make is one_cycle or span.warmup_steps == 0:
        return make(optimizer, span, **options)
    warmup = LinearLR(optimizer, start_factor=span.warmup_from, total_iters=span.warmup_steps)
    return SequentialLR(optimizer, [warmup, make(optimizer, span, **options)], [span.warmup_steps])


def count_warmup_steps(warmup_epochs: float, epochs: int, steps_per_epoch: int) -> int:
    """Return the number of steps of a warm-up.

    Raises:
        PlanError: it is not shorter than the run.
    """
    require_at_least(0, warmup_epochs=warmup_epochs)
    steps = round(warmup_epochs * steps_per_epoch)
    if steps >= epochs * steps_per_epoch:
        raise PlanError(
            f"a warm-up of {warmup_epochs:g} epochs is not shorter than the run's {epochs}; give "
            "a shorter warmup_epochs, or more epochs"
        )
    return steps


def initial_lr_fraction(warmup_from: float | None, scale: float) -> float:
    """Return the fraction of the full rate in the first step, by default that of the unscaled rate.

    Raises:
        PlanError: it is not a fraction.
    """
    first = min(1.0, 1 / scale) if warmup_from is None else warmup_from
    if not 0 < first <= 1:
        raise PlanError(
            f"warmup_from={first!r} is not a fraction of the learning rate; give more than 0 and at most 1, or None"
        )
    return first


def require_no_scheduler(optimizer: Optimizer) -> None:
    """Check that an optimizer has no schedule, so that its learning rates are not scaled twice.

    Raises:
        PlanError: it has one.
    """
    rates = [group["initial_lr"] for group in optimizer.param_groups if "initial_lr" in group]
    if rates:
        raise PlanError(
            f"the optimizer has a schedule already, from a learning rate of {rates[0]:g}, and a second one would scale "
            "the rate again; create one schedule per optimizer, and a new optimizer for another batch size"
        )
