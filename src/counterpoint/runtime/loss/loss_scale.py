"""Loss scaling: backward starts from the loss times S, so that small gradients do not underflow in fp16.

Order of operations in a step, with a global norm and a clip value ("Mixed Precision Training", Micikevicius et al.,
2018, section 3.2, and torch's ``GradScaler.unscale_`` before ``clip_grad_norm_``)::

    loss * S -> backward -> sum over microbatches and ranks -> finite? -> norm / S -> gradients / S, by norm, by value
             -> update

Losses, norms, and gradients after a step are the unscaled ones. With a power of two as S, and without overflow and
underflow, every bit is that of a step without scaling. Gradients are compressed unscaled, and so are the residuals of
error feedback. Gradients that are not finite skip the step on all ranks that decide together: nothing changes but S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from counterpoint.errors import PlanError

MAX_SCALE, MIN_SCALE = 2.0**127, 2.0**-126
"""The largest and the smallest power of two that float32 holds with all of its bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite, and shrinks when they are not.

    With the defaults it is that of ``torch.amp.GradScaler``, step for step; with ``hysteresis=2`` that of DeepSpeed's
    ``DynamicLossScaler``.

    Args:
        init_scale: of the first step.
        growth_factor: what the scale is multiplied with after ``growth_interval`` steps in a row with finite gradients.
        backoff_factor: what the scale is multiplied with after a step whose gradients are not finite.
        growth_interval: steps, see above.
        hysteresis: steps with gradients that are not finite after which the scale shrinks; those before are skipped
            without a change of the scale. They are counted from the last growth of the scale.
        consecutive_hysteresis: whether they are counted from the last step with finite gradients instead.
        min_scale: the scale does not become smaller. Gradients that are not finite at this scale are an error, or skip
            the step, as ``nonfinite`` says.

    Raises:
        PlanError: a number is out of its range.

    Example:
        >>> DynamicLossScale(init_scale=1024.0, growth_interval=100).init_scale
        1024.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("init_scale", "min_scale", "growth_factor", "backoff_factor"):
            require_positive(name, getattr(self, name))
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name}={value!r} is not a number of steps; give a whole number from 1 on")
        if type(self.consecutive_hysteresis) is not bool:
            raise PlanError(f"consecutive_hysteresis={self.consecutive_hysteresis!r} is not True or False")
        if self.growth_factor < 1:
            raise PlanError(f"growth_factor={self.growth_factor} would let the scale shrink; give 2.0, or 1.0 for none")
        if self.backoff_factor >= 1:
            raise PlanError(
                f"backoff_factor={self.backoff_factor} would not let the scale shrink, so that all later steps would "
                "be skipped; give 0.5"
            )
        if self.min_scale > self.init_scale:
            raise PlanError(f"min_scale={self.min_scale} is more than init_scale={self.init_scale}; give less")

    def __str__(self) -> str:
        return "dynamic" if self == DynamicLossScale() else repr(self)


LossScale = float | Literal["dynamic"] | DynamicLossScale
"""What users give: a number for a static scale, ``"dynamic"``, or its parameters."""


def require_positive(name: str, value: object) -> None:
    """Check a factor.

    Raises:
        PlanError: it is not a positive, finite number.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not MIN_SCALE <= value <= MAX_SCALE:  # type: ignore[operator]  # a number
        raise PlanError(
            f"{name}={value!r} is not a positive number that float32 can hold in full precision (2^-126 to 2^127); "
            "give a power of two, as 65536"
        )


def parse_loss_scale(value: object) -> float | DynamicLossScale | None:
    """Return a loss scale, from what the user gave; None without scaling.

    Raises:
        PlanError: it is something else.
    """
    if value is None or isinstance(value, DynamicLossScale):
        return value
    if value == "dynamic":
        return DynamicLossScale()
    if isinstance(value, str):
        raise PlanError(f"loss_scale={value!r} is unknown; give a number, or 'dynamic'")
    if type(value).__name__ == "GradScaler":
        raise PlanError(
            "loss_scale is a GradScaler, which scales in calls of backward and of the optimizer that belong to the "
            "step here; give 'dynamic', which has its rule and its numbers, or cp.DynamicLossScale(init_scale=...)"
        )
    require_positive("loss_scale", value)
    return float(value)  # type: ignore[arg-type]  # a number


@dataclass(slots=True)
class LossScaler:
    """The loss scale of a rank, from step to step; equal on ranks that decide together.

    Args:
        config: a static scale, the rule of a dynamic one, or None for no scaling.
        scale: S in this step.
        num_good_steps: steps in a row with finite gradients, since the last change of the scale.
        hysteresis: steps with gradients that are not finite after which the scale shrinks, from now on.
    """

    config: float | DynamicLossScale | None = None
    scale: float = 1.0
    num_good_steps: int = 0
    hysteresis: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.config, DynamicLossScale):
            self.scale, self.hysteresis = self.config.init_scale, self.config.hysteresis
        elif self.config is not None:
            self.scale = self.config

    @property
    def may_shrink(self) -> bool:
        """Whether a smaller scale may let the next step succeed."""
        return isinstance(self.config, DynamicLossScale) and self.scale > self.config.min_scale

    def update(self, *, is_finite: bool) -> None:
        """Take the outcome of a step into account.

        Args:
            is_finite: whether its gradients were.
        """
        rule = self.config
        if not isinstance(rule, DynamicLossScale):
            return
        if not is_finite:
            self.num_good_steps = 0
            if self.hysteresis > 1:
                self.hysteresis -= 1
            else:
                self.scale = max(self.scale * rule.backoff_factor, rule.min_scale)
            return
        self.num_good_steps += 1
        if rule.consecutive_hysteresis:
            self.hysteresis = rule.hysteresis
        if self.num_good_steps >= rule.growth_interval:  # more if a checkpoint was saved with a longer interval
            self.num_good_steps, self.hysteresis = 0, rule.hysteresis
            if self.scale * rule.growth_factor <= MAX_SCALE:
                self.scale *= rule.growth_factor

    def state(self) -> tuple[float, int, int]:
        """Return what a checkpoint keeps, and :meth:`restore` takes: scale, good steps, hysteresis."""
        return self.scale, self.num_good_steps, self.hysteresis

    def restore(self, state: tuple[float, int, int]) -> None:
        """Continue a dynamic scale from a state; a static one stays as it was given."""
        if isinstance(self.config, DynamicLossScale):
            scale, self.num_good_steps, hysteresis = state
            self.scale = max(scale, self.config.min_scale)
            self.hysteresis = min(hysteresis, self.config.hysteresis)

    @property
    def inverse(self) -> float:
        """1 / S."""
        return 1.0 / self.scale
