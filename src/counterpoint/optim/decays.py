"""How a learning rate falls after its warm-up: torch's schedulers, told in epochs and stepped after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TypeAlias

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from counterpoint.errors import PlanError
from counterpoint.optim.options import require_at_least, require_one_of

Decay: TypeAlias = Callable[..., LRScheduler]


@dataclass(frozen=True, slots=True)
class Course:
    """When a run warms up and ends.

    Args:
        warmup_steps: steps before the learning rate is full.
        num_steps: all steps, those of the warm-up included.
        steps_per_epoch: optimizer steps of one pass over the data.
        warmup_from: what share of the full rate the first step has.
    """

    warmup_steps: int
    num_steps: int
    steps_per_epoch: int
    warmup_from: float

    @property
    def decay_steps(self) -> int:
        """Steps after the warm-up."""
        return self.num_steps - self.warmup_steps

    def after_warmup(self, epochs: Sequence[float]) -> list[int]:
        """Return epochs of the run as steps after the warm-up.

        Raises:
            PlanError: one is in the warm-up or after the end, so that the rate would not be what was asked for.
        """
        steps = [round(epoch * self.steps_per_epoch) for epoch in epochs]
        for epoch, at in zip(epochs, steps, strict=True):
            if not self.warmup_steps < at < self.num_steps:
                raise PlanError(
                    f"the learning rate is to fall at epoch {epoch:g}, but it is full only from epoch "
                    f"{self.warmup_steps / self.steps_per_epoch:g} on, and the run ends with epoch "
                    f"{self.num_steps / self.steps_per_epoch:g}; give epochs between these two"
                )
        return [step - self.warmup_steps for step in steps]


def constant(optimizer: Optimizer, _course: Course) -> LRScheduler:
    """Stay at the full rate."""
    return lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)


def step(optimizer: Optimizer, course: Course, *, step_size: float = 30, gamma: float = 0.1) -> LRScheduler:
    """Multiply by ``gamma`` every ``step_size`` epochs from the beginning of the run on."""
    require_at_least(1 / course.steps_per_epoch, step_size=step_size)
    num_falls = -(-course.num_steps // round(step_size * course.steps_per_epoch)) - 1
    return multi_step(optimizer, course, milestones=[step_size * (fall + 1) for fall in range(num_falls)], gamma=gamma)


def multi_step(
    optimizer: Optimizer, course: Course, *, milestones: Sequence[float] = (30, 60, 80), gamma: float = 0.1
) -> LRScheduler:
    """Multiply by ``gamma`` at some epochs of the run; by default those of Goyal et al. for 90 epochs."""
    require_at_least(0, gamma=gamma)
    return lr_scheduler.MultiStepLR(optimizer, course.after_warmup(milestones), gamma)


def exponential(optimizer: Optimizer, course: Course, *, gamma: float = 0.94) -> LRScheduler:
    """Multiply by ``gamma`` in each epoch, a little in every step."""
    require_at_least(0, gamma=gamma)
    return lr_scheduler.ExponentialLR(optimizer, gamma ** (1 / course.steps_per_epoch))


def polynomial(optimizer: Optimizer, course: Course, *, power: float = 2.0) -> LRScheduler:
    """Fall to 0 as ``(1 - share of the steps) ** power``: 2 in the experiments with LARS, 1 in those with LAMB."""
    require_at_least(0, power=power)
    return lr_scheduler.PolynomialLR(optimizer, course.decay_steps, power)


def cosine(optimizer: Optimizer, course: Course, *, eta_min: float = 0.0) -> LRScheduler:
    """Fall along half a cosine to ``eta_min``, a learning rate and the same for all groups."""
    require_at_least(0, eta_min=eta_min)
    return lr_scheduler.CosineAnnealingLR(optimizer, course.decay_steps, eta_min)


def one_cycle(
    optimizer: Optimizer, course: Course, *, final_div_factor: float = 1e4, cycle_momentum: bool = False
) -> LRScheduler:
    """Rise during the warm-up and fall afterwards, both along half a cosine, to a part of the first rate.

    Raises:
        PlanError: there is no warm-up, or nothing to rise to.
    """
    require_at_least(1, final_div_factor=final_div_factor)
    if not course.warmup_steps or course.warmup_from >= 1:
        raise PlanError(
            f"one-cycle rises for {course.warmup_steps} steps, from {course.warmup_from:g} of the full learning rate, "
            "which is no cycle; give warmup_epochs above 0 and warmup_from below 1, or decay='cosine'"
        )
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=course.num_steps,
        pct_start=(course.warmup_steps + 1) / course.num_steps,
        cycle_momentum=cycle_momentum,
        div_factor=1 / course.warmup_from,
        final_div_factor=final_div_factor,
    )


DECAYS: dict[str, Decay] = {
    "constant": constant,
    "step": step,
    "multi-step": multi_step,
    "exponential": exponential,
    "polynomial": polynomial,
    "cosine": cosine,
    "one-cycle": one_cycle,
}


def find(name: str, options: Sequence[str]) -> Decay:
    """Return the decay of that name, which takes these options.

    Raises:
        PlanError: there is none, or it does not take one of them.
    """
    require_one_of("decay", name, DECAYS)
    taken = list(signature(DECAYS[name]).parameters)[2:]
    for option in options:
        if option not in taken:
            says = f"its options are {', '.join(taken)}" if taken else "it has none"
            raise PlanError(f"the decay {name!r} has no option {option!r}; {says}")
    return DECAYS[name]
