"""How a run trains, apart from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.runtime.rank_builder import BatchNormRule
from counterpoint.runtime.step_commit import StepGuard
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Settings that every strategy obeys alike.

    Args:
        seed: of sample order and of everything that is drawn.
        clip_norm: global norm to which gradients are scaled down; None for no clipping.
        clip_by: whose norm that is: the whole ``model``'s, or each ``stage``'s own, which is what the stages of a
            pipeline without a flush can know.
        clip_value: size to which every number of a gradient is brought down, after ``clip_norm``; None for no clipping.
        watch: ``loss`` checks the losses of a step, ``gradients`` every gradient as well.
        nonfinite: ``error`` ends the run at a loss or gradient that is not finite, ``skip`` leaves the step out.
        unused: what a trainable parameter without a gradient means: ``error``, or ``zero`` for a gradient of zeros.
        dims: names of the (out, in) dims of linear layers by pattern of module path, for tensor(...).
        deadline_s: the longest that any rank waits for another.
        one_copy: whether replicas of one host have one copy of weights and optimizer state, where they can.
        init: what other first weights than rank 0's on a rank mean: ``rank0`` gives all ranks rank 0's and says so,
            ``same`` is an error.
        batch_norm: what modules of batch norm do with several microbatches or replicas. ``deferred``: each microbatch
            is normalized by its own statistics, and running statistics change once per batch, by those of the whole
            batch; ``microbatch``: they change after every microbatch, and replicas have their mean; ``sync``: as
            ``deferred``, but microbatches that replicas run side by side are normalized together; ``error``: what is
            not normalized by the whole batch is refused. By default ``deferred``, with a notice where a replica has
            several microbatches.
        mixing: what it means that a model's output for a sample depends on other samples of its microbatch, under a
            pipeline: ``error``, or ``accept`` for microbatches that are each a batch of their own.
        timing: how long the pieces of the model take, by which pipelines are cut and ``auto`` chooses; the same on all
            ranks. Without it, counted operations say so.
        keep_freed: whether memory that a step frees stays with the process for the next one; glibc only.
        measure: under ``auto``, how many of the plans that are predicted to be fastest are measured for some steps
            before the first one, beside data parallelism; the one that measures best is taken. They train copies of the
            model, on the first batch, and leave nothing behind. 0 measures none.
        cluster: where ``auto`` predicts that plans run, itself or the path of its file; None for a core of a laptop for
            each rank.
    """

    seed: int = 0
    clip_norm: float | None = None
    clip_by: Literal["model", "stage"] = "model"
    clip_value: float | None = None
    check_finite: Literal["loss", "gradients"] = "loss"
    nonfinite: Literal["error", "skip"] = "error"
    unused_parameters: Literal["error", "zero"] = "error"
    dims: Mapping[str, tuple[str, str]] | None = None
    timeout_s: float = 60.0
    share_params_on_host: bool = True
    init_sync: Literal["broadcast", "verify"] = "broadcast"
    cross_sample: Literal["error", "accept"] = "error"
    retain_freed_memory: bool = True
    batch_norm: BatchNormRule | None = None
    num_measured_plans: int = 0
    cluster: Cluster | None = None
    profile: ModelProfile | None = None

    def __post_init__(self) -> None:
        self._require_types()
        for name in ("clip_norm", "clip_value", "timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool | str) or not isinstance(value, float | int | None):
                raise PlanError(f"{name}={value!r} is a {type(value).__name__}; give a positive number")
        require_profile(self.profile)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise PlanError(f"clip_norm={self.clip_norm} would leave no gradient; give a positive norm, or None")
        if self.clip_value is not None and not self.clip_value > 0:
            raise PlanError(f"clip_value={self.clip_value} would leave no gradient; give a positive number, or None")
        if not self.timeout_s > 0:
            raise PlanError(f"timeout_s={self.timeout_s} leaves no time to wait; give a positive number of seconds")
        for name, allowed in (
            ("clip_by", ("model", "stage")),
            ("check_finite", ("loss", "gradients")),
            ("nonfinite", ("error", "skip")),
            ("unused_parameters", ("error", "zero")),
            ("init_sync", ("broadcast", "verify")),
            ("batch_norm", (None, *get_args(BatchNormRule))),
            ("cross_sample", ("error", "accept")),
        ):
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name}={getattr(self, name)!r} is not one of {', '.join(filter(None, allowed))}")

    def _require_types(self) -> None:
        for name, kind in (
            ("share_params_on_host", bool),
            ("retain_freed_memory", bool),
            ("seed", int),
            ("num_measured_plans", int),
        ):
            found = getattr(self, name)
            if type(found) is not kind:
                wanted = "True or False" if kind is bool else "a whole number"
                raise PlanError(f"{name}={found!r} is a {type(found).__name__}; give {wanted}")
        if self.num_measured_plans < 0:
            raise PlanError(
                f"measure={self.num_measured_plans} is no number of plans; give how many to measure, or 0 for none"
            )


def require_profile(profile: object) -> None:
    """Check that what is given as a timing is one.

    Raises:
        PlanError: it is something else.
    """
    if profile is not None and not isinstance(profile, ModelProfile):
        raise PlanError(
            f"timing={profile!r} is a {type(profile).__name__}; give what counterpoint.profile(...) returns"
        )


def build_step_guard(options: TrainingOptions) -> StepGuard:
    """Return what these options have checked and done before every update."""
    return StepGuard(options.clip_norm, options.check_finite, options.nonfinite, options.clip_value)
