"""Compare plans on a user's own model: train a few steps in a plain PyTorch loop and under each plan.

All ranks are in this process. Each run begins with the same weights and takes the same batches, with the optimizer's
options of each step, so that whatever differs afterwards comes from the plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.device.select import accelerator_for, model_device
from counterpoint.errors import CounterpointError, DataError, PlanError, first_line
from counterpoint.fabric.local import LocalWorld
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.optim.validation import checked_call
from counterpoint.partitioning.dry_run import split_call_args, training_mode
from counterpoint.partitioning.module_casts import autocast_dtype, cast_modules
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.program.instruction import Collective, Push, Send
from counterpoint.runtime.full_state import gather_optimizer_state
from counterpoint.runtime.loss.loss_reduction import LossFunction, compute_plain_loss
from counterpoint.runtime.microbatches import SlicedBatch, autocast_as
from counterpoint.runtime.optimizer_spec import clip_by_value, squared_norm
from counterpoint.runtime.rng.draw_sites import DrawSites, describe_unkeyed
from counterpoint.runtime.sample_layout import SampleLayout
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.training.batches.global_batch import count_samples
from counterpoint.training.model_checks.float32_replacement import ReplaceFloat32
from counterpoint.training.model_checks.module_snapshot import convert_floats
from counterpoint.training.model_checks.validation import OptimizerArgument, require_loss_function, wrap_optimizer
from counterpoint.training.options import TrainingOptions
from counterpoint.training.parallelize import TrainStep
from counterpoint.training.plan_resolution import RequestedPlan, StrategyArgument, make_auto_strategy, parse_options
from counterpoint.training.ranks.local_ranks import LocalRanks
from counterpoint.training.recording import RecordedRun, RecordedStep, record_step, snapshot_of

DEFAULT_STRATEGIES = ("solo", "data(2)", "zero3(2)", "pipeline(2)", "pipeline(2) * data(2)", "tensor(2)")
"""What is compared if no strategies are given; those that the model cannot use are listed as refused."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Relative differences that rounding explains; :data:`NARROW_TOLERANCE` in other dtypes."""

NARROW_TOLERANCE = 0.05
"""Relative difference that rounding explains where a model computes in fp16 or bf16."""

KINDS = ("losses", "weights", "buffers", "optimizer")
"""What is compared."""


@dataclass(frozen=True, slots=True)
class TrainedState:
    """What training gives.

    Args:
        losses: of every step.
        weights: by parameter.
        buffers: by name.
        optimizer: its state, as ``exp_avg of layer.weight``.
    """

    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        """Return the values of one of the ``KINDS`` by name."""
        if kind == "losses":
            return {
                f"step {number}": torch.tensor(loss, dtype=torch.float64) for number, loss in enumerate(self.losses)
            }
        return {"weights": self.weights, "buffers": self.buffers, "optimizer": self.optimizer}[kind]

    def without(self, noise: Mapping[str, Tensor]) -> TrainedState:
        """Return the same without some elements of parameters and of their optimizer state.

        Running means, which such parameters change, are left out if there are any.

        Args:
            noise: by parameter, which elements.
        """
        weights = {name: drop_elements(weight, noise.get(name)) for name, weight in self.weights.items()}
        optimizer = {
            name: drop_elements(value, noise.get(name.partition(" of ")[2])) for name, value in self.optimizer.items()
        }
        is_whole = any(bool(mask.all()) for mask in noise.values())
        buffers = {name: buffer for name, buffer in self.buffers.items() if not (is_whole and "running_mean" in name)}
        return replace(self, weights=weights, buffers=buffers, optimizer=optimizer)


def drop_elements(value: Tensor, dropped: Tensor | None) -> Tensor:
    """Return a value without some of its elements, if it has as many as the mask of these."""
    return value if dropped is None or value.shape != dropped.shape else value[~dropped]


@dataclass(frozen=True, slots=True)
class PlanRun:
    """Training under a plan.

    Args:
        state: what it gave.
        compiled: the plan and its program.
        uses_rng: whether the model draws random numbers.
        unkeyed_draws: what draws numbers that are not keyed by sample, by path of the module call.
    """

    state: TrainedState
    compiled: CompiledPlan
    uses_rng: bool
    unkeyed_draws: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference among values of one kind.

    Args:
        value: ``|actual - expected| / |expected|`` in the Euclidean norm; infinite if one is missing or not finite.
        name: where it is.
    """

    value: float
    name: str


@dataclass(frozen=True, slots=True)
class PlanParity:
    """The comparison of one plan with the reference.

    Args:
        strategy: as it was given.
        num_ranks: that it needs; 0 if it was refused.
        num_microbatches: of the global batch; 0 if it was refused.
        differences: by kind, those that the model has any values of.
        causes: in words, what differs.
        refusal: why the plan cannot train this model; empty if it can.
    """

    strategy: str
    num_ranks: int = 0
    num_microbatches: int = 0
    differences: Mapping[str, Difference] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return max((difference.value for difference in self.differences.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Comparisons of plans on one model; as text, a table and the causes of differences.

    Args:
        model: its class.
        num_steps: that were trained.
        batch_size: samples of the first global batch.
        dtype: of the weights.
        tolerance: the largest relative difference that counts as equal.
        reference: what the plans are compared with.
        plans: one comparison for each.
        not_compared: the parameters whose gradient, or a part of it, is zero but for rounding.
        precision: that the reference computes in; None for the dtypes of the model.
    """

    model: str
    num_steps: int
    batch_size: int
    dtype: torch.dtype
    tolerance: float
    reference: str
    plans: tuple[PlanParity, ...]
    not_compared: tuple[str, ...] = ()
    precision: Precision | None = None

    @property
    def compared(self) -> tuple[PlanParity, ...]:
        """The plans that were not refused."""
        return tuple(plan for plan in self.plans if not plan.refusal)

    def is_equal(self, plan: PlanParity) -> bool:
        """Tell whether a plan trains the same within the tolerance."""
        return not plan.refusal and plan.worst <= self.tolerance

    @property
    def all_equal(self) -> bool:
        """Whether all plans that can train this model train the same, and there is one."""
        return bool(self.compared) and all(map(self.is_equal, self.compared))

    def __str__(self) -> str:
        """Return the table, the causes of differences, and why plans were refused."""
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        computed = "" if self.precision is None else f", computed in {self.precision}"
        lines = [
            f"{self.model}, {steps} of {self.batch_size} samples in {dtype_text(self.dtype)}{computed}",
            f"largest relative differences from {self.reference}; equal means at most {self.tolerance:.0e}",
            "",
            *align_columns([("plan", "ranks", "microbatches", *KINDS, "result"), *map(self.table_row, self.compared)]),
            "",
        ]
        plans_by_cause: dict[str, list[str]] = {}
        for plan in self.compared:
            for cause in plan.causes:
                plans_by_cause.setdefault(cause, []).append(plan.strategy)
        lines += [f"{', '.join(plans)}: {cause}" for cause, plans in plans_by_cause.items()]
        if self.not_compared:
            names = list_names(self.not_compared)
            lines.append(f"not compared: elements of {names} whose gradient is zero but for rounding")
        lines += [f"{plan.strategy} cannot train this model: {plan.refusal}" for plan in self.plans if plan.refusal]
        num_equal = sum(map(self.is_equal, self.compared))
        return "\n".join([*lines, f"{num_equal} of {len(self.compared)} plans train as {self.reference} does"])

    def table_row(self, plan: PlanParity) -> tuple[str, ...]:
        """Return the row of a plan."""
        found = [plan.differences.get(kind) for kind in KINDS]
        cells = ("-" if difference is None else f"{difference.value:.1e}" for difference in found)
        largest = max(filter(None, found), key=lambda difference: difference.value)
        result = "equal" if self.is_equal(plan) else f"differs, most in {largest.name}"
        return (plan.strategy, str(plan.num_ranks), str(plan.num_microbatches), *cells, result)


def dtype_text(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines with aligned columns, the first and the last column on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells, last in rows:
        middle = (cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True))
        yield "  ".join([first.ljust(widths[0]), *middle, last])


@checked_call
def parity(
    model: nn.Module,
    optimizer: OptimizerArgument,
    loss: LossFunction,
    batches: Iterable[tuple[Any, Any]],
    *,
    strategies: Sequence[StrategyArgument] = DEFAULT_STRATEGIES,
    dtype: torch.dtype | None = None,
    **options: Any,  # noqa: ANN401 - checked by Options
) -> ParityReport:
    """Train a model in a plain PyTorch loop and under each strategy, and return the largest differences.

    All ranks are in this process. The model is the same afterwards as before.

    Args:
        model: any module.
        optimizer: a torch optimizer on its parameters, a list of optimizers, or a factory.
        loss: from the model's output and the targets to the loss.
        batches: inputs and targets of each step; some steps are enough.
        strategies: what is compared; by default one rank, data parallelism, ZeRO, pipelines and tensor parallelism.
        dtype: to train in; ``torch.float64`` tells rounding from other differences. By default the model's own.
        **options: fields of :class:`counterpoint.training.options.TrainingOptions`.

    Raises:
        PlanError: there is no batch, or a strategy or an option does not exist.

    Example:
        >>> import torch, counterpoint as cp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        >>> batches = [(torch.ones(4, 2).double(), torch.zeros(4, 1).double())]
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> report = cp.parity(model, sgd, torch.nn.functional.mse_loss, batches, strategies=["data(2)", "pipeline(2)"])
        >>> report.all_equal
        True
    """
    optimizer_spec = wrap_optimizer(optimizer, model, loss)
    require_loss_function(loss)
    training_options = parse_options(options, parity)
    layout = SampleLayout(model, training_options.batch_dims or {}, training_options.shared)
    marked = [layout.mark(*batch) for batch in batches]
    steps = [record_step(SlicedBatch(batch, ((0, count_samples(*batch)),)), optimizer_spec) for batch in marked]
    if not steps:
        raise PlanError("there are no batches to train on; give some, [(inputs, targets), ...]")
    run = RecordedRun(
        model,
        loss,
        optimizer_spec,
        training_options,
        RequestedPlan(strategies[0] if strategies else "solo"),
        snapshot_of(model, loss),
        tuple(steps),
    )
    return compare_plans(run, [RequestedPlan(strategy) for strategy in strategies], dtype=dtype)


def compare_plans(
    run: RecordedRun, requested_plans: Sequence[RequestedPlan], *, dtype: torch.dtype | None = None, num_ranks: int = 2
) -> ParityReport:
    """Return the comparison of plans on a recorded run.

    The reference is a plain PyTorch loop, with the casts of the run's precision if it has one. It is one rank under the
    plan ``solo`` of a model that draws random numbers, which a plain loop draws otherwise, and of one that computes in
    fp16, whose loss a plain loop does not scale.

    Args:
        run: what is trained; its model is the same afterwards as before.
        requested_plans: the plans.
        dtype: to train in; by default the model's own.
        num_ranks: of plans whose text has no number of ranks.
    """
    run = replace(run, options=replace(run.options, retain_freed_memory=False, num_measured_plans=0))
    accelerator = accelerator_for(model_device(run.model))
    precision = parse_precision(run.options.precision)
    is_fp16 = precision is not None and precision.uses_fp16
    with accelerator.preserve_rng(), default_dtype(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own run warns
        try:
            alone, (plain, noise) = train_with_plan(run, RequestedPlan("solo"), dtype, 1), train_plainly(run, dtype)
            reference = (alone.state if alone.uses_rng or is_fp16 else plain).without(noise)
            not_compared = tuple(name for name, mask in noise.items() if float(mask.double().mean()) > MIN_LISTED)
            dtypes = {weight.dtype for weight in reference.weights.values() if weight.is_floating_point()}
            tolerance = max(map(rounding_tolerance, dtypes))
            if is_narrow(precision):
                tolerance = NARROW_TOLERANCE
            plans = tuple(
                compare_plan(run, requested, Expectation(reference, noise, tolerance), dtype, num_ranks)
                for requested in requested_plans
            )
        finally:
            run.snapshot.restore()
    name = "one rank" if alone.uses_rng or is_fp16 else "a plain PyTorch loop"
    lowest = max(dtypes, key=rounding_tolerance)
    return ParityReport(
        type(run.model).__name__,
        len(run.steps),
        run.first_step.num_samples,
        lowest,
        tolerance,
        name,
        plans,
        not_compared,
        precision,
    )


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding in a dtype explains."""
    return TOLERANCES.get(dtype, NARROW_TOLERANCE)


def is_narrow(precision: Precision | None) -> bool:
    """Return whether a model computes, or ranks sum gradients, in fewer bits than float32."""
    return precision is not None and (precision.compute != "fp32" or precision.casts_grads)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Let models create tensors of this dtype inside, also where they ask for float32; None for those of the user."""
    if dtype is None:
        yield
        return
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with ReplaceFloat32(dtype):
            yield
    finally:
        torch.set_default_dtype(previous)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What plans are compared with.

    Args:
        state: of the reference, without noise.
        noise: by parameter, the elements that are not compared.
        tolerance: the largest difference that counts as equal.
    """

    state: TrainedState
    noise: Mapping[str, Tensor]
    tolerance: float


def compare_plan(
    run: RecordedRun, requested: RequestedPlan, expected: Expectation, dtype: torch.dtype | None, num_ranks: int
) -> PlanParity:
    """Return the comparison of one plan."""
    name = describe_strategy(requested.strategy)
    try:
        trained = train_with_plan(run, requested, dtype, num_ranks)
    except CounterpointError as error:
        return PlanParity(name, refusal=f"{type(error).__name__}: {first_line(error)}")
    state = trained.state.without(expected.noise)
    differences = {
        kind: difference
        for kind in KINDS
        if (difference := find_difference(kind, state.tensors(kind), expected.state.tensors(kind))) is not None
    }
    plan = trained.compiled.plan
    compared = PlanParity(name, plan.num_ranks, plan.global_num_microbatches, differences)
    if compared.worst <= expected.tolerance:
        return compared
    return replace(compared, causes=tuple(find_causes(run, trained, compared, expected.tolerance)))


def describe_strategy(strategy: StrategyArgument) -> str:
    """Return a strategy as text."""
    return " * ".join(map(str, strategy)) if isinstance(strategy, tuple | list) else str(strategy)


def train_with_plan(run: RecordedRun, requested: RequestedPlan, dtype: torch.dtype | None, num_ranks: int) -> PlanRun:
    """Train all steps of a run under a plan, on ranks of this process."""
    run.snapshot.restore(dtype)
    plan = requested.resolve(num_ranks)
    world = LocalWorld(plan.num_ranks, run.options.timeout_s)
    optimizer_spec = run.optimizer_spec.rebind(dict(run.trained.named_parameters()))
    ranks = LocalRanks(world, plan, run.model, run.loss, optimizer_spec, run.options)
    auto_strategy = make_auto_strategy(requested, plan, run.options)
    losses = []
    with TrainStep(
        ranks, has_fixed_microbatches=requested.has_explicit_microbatches, auto_strategy=auto_strategy
    ) as step:
        for recorded in run.steps:
            use_group_options(step.optimizer, recorded)
            inputs, targets = convert_batch(recorded, dtype)
            with autocast_as(recorded.autocasts if dtype is None else None):
                losses.append(step(inputs, targets))
        if ranks.in_flight.lookahead:  # whose first calls return no loss
            losses = [loss for loss in losses if not math.isnan(loss)] + step.flush()
        step.export_weights()
        assert ranks.compiled is not None, "it has trained"
        assert ranks.run_spec is not None, "it has trained"
        sites = ranks.run_spec.draw_sites or DrawSites()
        state = TrainedState(tuple(losses), *copy_values(run.trained), read_optimizer_state(ranks))
        return PlanRun(state, ranks.compiled, ranks.uses_rng, sites.unkeyed)


def train_plainly(run: RecordedRun, dtype: torch.dtype | None) -> tuple[TrainedState, dict[str, Tensor]]:
    """Train all steps of a run in a plain PyTorch loop: forward, backward, clip, step, in the precision of the run.

    Returns:
        What it gave, and by parameter the elements whose gradients are zero but for rounding.
    """
    run.snapshot.restore(dtype)
    params = dict(run.trained.named_parameters())
    optimizer = run.optimizer_spec.rebind(params).optimizer
    losses, grad_peaks = [], {name: torch.zeros_like(param) for name, param in params.items()}
    precision = parse_precision(run.options.precision)
    with training_mode(run.model, training=True), cast_modules(run.model, precision):
        for recorded in run.steps:
            use_group_options(optimizer, recorded)
            inputs, targets = convert_batch(recorded, dtype)
            args, kwargs = split_call_args(as_call_args(inputs))
            optimizer.zero_grad()
            with autocast_as(recorded.autocasts if dtype is None else None), plan_autocast(run.model, precision):
                loss = compute_plain_loss(run.loss(run.model(*args, **kwargs), targets))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            for name, param in params.items():
                if param.grad is not None:
                    grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                    grad_peaks[name] = torch.maximum(grad_peaks[name], grad.abs())
            if prepare_grads([param for param in params.values() if param.requires_grad], run.options, losses[-1]):
                optimizer.step()
    state = {
        f"{key} of {name}": torch.as_tensor(value)
        for name, param in params.items()
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor | int | float)
    }
    optimizer_state = {name: value.clone() for name, value in state.items()}
    noise = find_noise(grad_peaks, is_narrow=is_narrow(precision))
    return TrainedState(tuple(losses), *copy_values(run.trained), optimizer_state), noise


@contextmanager
def plan_autocast(model: nn.Module, precision: Precision | None) -> Iterator[None]:
    """Enter the autocast of a precision, if it has one."""
    dtype = autocast_dtype(precision)
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast(model_device(model).type, dtype))
        yield


def find_noise(grad_peaks: Mapping[str, Tensor], *, is_narrow: bool = False) -> dict[str, Tensor]:
    """Return which elements of parameters have a gradient of zero but for rounding.

    That of a bias before a batch norm, for instance, or of keys before a softmax: it differs between any two orders of
    summation, and optimizers that divide by the size of the gradient (Adam) make visible differences of it.

    Args:
        grad_peaks: by parameter, the largest magnitude of each element's gradient in any step.
        is_narrow: whether the model computes in fewer bits than its parameters have.
    """
    sizes = {name: root_mean_square([peaks]) for name, peaks in grad_peaks.items()}
    largest, noise = max(sizes.values(), default=0.0), {}
    for name, peaks in grad_peaks.items():
        rounding = NARROW_TOLERANCE if is_narrow else ROUNDING_NOISE * torch.finfo(peaks.dtype).eps
        if 0 < sizes[name] < rounding * largest:  # all of it, also elements that happened to be exactly 0
            mask = torch.ones_like(peaks, dtype=torch.bool)
        else:
            mask = (peaks > 0) & (peaks < rounding * sizes[name])
        if bool(mask.any()):
            noise[name] = mask
    return noise


ROUNDING_NOISE = 1000.0
"""A gradient is zero but for rounding below so many roundings of the others of its tensor, or of the largest tensor."""

MIN_LISTED = 0.1
"""Parameters are listed as not compared if more than this fraction of their elements is not."""


def prepare_grads(params: Sequence[nn.Parameter], options: TrainingOptions, loss: float) -> bool:
    """Clip gradients as the options ask; return whether the step is taken.

    Raises:
        DataError: the loss is not finite, and such steps are not to be skipped.
    """
    if options.unused_parameters == "zero":
        for param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    grads = [param.grad for param in params if param.grad is not None]
    norm = math.sqrt(squared_norm(grads))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        if options.nonfinite == "skip":
            return False
        raise DataError(
            f"in a plain PyTorch loop the loss is {loss} and the gradient norm {norm}; lower the learning rate"
        )
    for grad in grads:
        if options.clip_norm is not None:
            grad.mul_(min(1.0, options.clip_norm / (norm + 1e-6)))
        if options.clip_value is not None:
            clip_by_value(grad, options.clip_value)
    return True


def use_group_options(optimizer: optim.Optimizer, recorded: RecordedStep) -> None:
    """Set the options that the optimizer's groups had in a recorded step."""
    for group, options in zip(optimizer.param_groups, recorded.group_options, strict=True):
        group.update(options)


def convert_batch(recorded: RecordedStep, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return inputs and targets with floating-point tensors of a dtype."""

    def convert(value: Any) -> Any:  # noqa: ANN401 - whatever a batch holds
        return convert_floats(value, dtype) if isinstance(value, Tensor) else value

    return tree_map(convert, recorded.inputs), tree_map(convert, recorded.targets)


def copy_values(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of a model's parameters and buffers."""
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return params, {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def read_optimizer_state(ranks: LocalRanks) -> dict[str, Tensor]:
    """Return the optimizers' state of ranks that are all in this process, in full, as ``exp_avg of layer.weight``."""
    states = gather_optimizer_state(ranks.shard_map(), ranks.ranks.values(), None)
    return {
        f"{key} of {name}": torch.as_tensor(value)
        for name, state in states.items()
        for key, value in state.items()
        if value is not None
    }


def find_difference(kind: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Difference | None:
    """Return the largest difference among values of a kind by name; None if there are none."""
    by_group: dict[str, list[str]] = {}
    for name in dict.fromkeys([*expected, *actual]):
        by_group.setdefault(comparable_group(kind, name), []).append(name)
    found = []
    for names in by_group.values():
        if not (expected.keys() >= set(names) and actual.keys() >= set(names)):
            found.append(
                Difference(math.inf, next(name for name in names if name not in actual or name not in expected))
            )
            continue
        floor = NEGLIGIBLE * root_mean_square([expected[name] for name in names])
        found += [Difference(relative_difference(actual[name], expected[name], floor=floor), name) for name in names]
    return max(found, key=lambda difference: difference.value, default=None)


NEGLIGIBLE = 0.01
"""Values so much smaller than others of their group are compared relative to this fraction of these."""


def comparable_group(kind: str, name: str) -> str:
    """Return what values have in common whose sizes are comparable: the same entry of a state, the same buffer."""
    match kind:
        case "optimizer":
            return name.partition(" of ")[0]
        case "buffers":
            return name.rpartition(".")[2]
        case _:
            return kind


def root_mean_square(values: Sequence[Tensor]) -> float:
    """Return the root mean square over all elements."""
    num_elements = sum(value.numel() for value in values)
    return math.sqrt(
        sum(float(torch.linalg.vector_norm(value.double())) ** 2 for value in values) / max(num_elements, 1)
    )


def relative_difference(actual: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return ``|actual - expected| / |expected|`` in the Euclidean norm; infinite if it is not a number.

    Args:
        actual: what was computed.
        expected: what it should be.
        floor: the smallest root mean square that the difference is divided by.
    """
    if actual.shape != expected.shape:
        return math.inf
    norm = max(float(torch.linalg.vector_norm(expected.double())), floor * math.sqrt(expected.numel()))
    difference = float(torch.linalg.vector_norm(actual.double() - expected.double())) / (norm or 1.0)
    return math.inf if math.isnan(difference) else difference


def find_causes(run: RecordedRun, trained: PlanRun, compared: PlanParity, tolerance: float) -> list[str]:
    """Return what explains a difference, in words."""
    known = list(find_known_causes(run, trained, compared.num_microbatches))
    if known:
        return known
    dtype = next(iter(trained.state.weights.values())).dtype
    if dtype != torch.float64 and compared.worst < ROUNDING_FACTOR * tolerance:
        return [
            f"it may be rounding in {dtype_text(dtype)}: sums are in another order, and optimizers that divide by the "
            "size of the gradient (Adam) enlarge the difference; compare in float64 (--float64, dtype=torch.float64)"
        ]
    return [
        "no plan, module or option explains it; the model or the loss may depend on which samples are in a microbatch, "
        "on how often they are called, or on values that another rank has"
    ]


ROUNDING_FACTOR = 1000.0
"""A difference up to so many tolerances may be rounding that the optimizer has enlarged."""


def find_known_causes(run: RecordedRun, trained: PlanRun, num_microbatches: int) -> Iterator[str]:
    """Yield the causes that the plan, the model's modules or the options have."""
    compiled, modules = trained.compiled, dict(run.model.named_modules())
    precision = compiled.plan.precision
    if precision is not None and precision != parse_precision(run.options.precision):
        yield f"the plan computes in {precision}, which the reference does not; give precision='{precision}' to all"
    if not compiled.is_synchronous:
        yield (
            "the plan changes the results on purpose: weights are updated with older gradients, or replicas differ in "
            "between; `counterpoint strategies NAME` has its promise"
        )
    instructions = [instruction for _, instruction in compiled.program.instructions()]
    encoded = [one for one in instructions if isinstance(one, Collective | Send | Push) and one.codec]
    for name, what, options in (
        ("grad", "gradients", "compress= and quantized_gradients="),
        ("weight", "gathered weights", "quantized_weights="),
    ):
        codecs = sorted({one.codec for one in encoded if one.tensor.name == name})
        if codecs:
            yield f"{what} are compressed by {', '.join(codecs)}, which rounds them; omit {options}"
    if run.options.clip_by == "stage" and any(isinstance(one, Pipeline) for one in compiled.plan.strategies):
        yield "clip_by='stage' clips the norm of each stage, not that of the whole model; give clip_by='model'"
    if num_microbatches == 1:
        return
    norms = [path for path, module in modules.items() if isinstance(module, BATCH_NORM) and module.training]
    if norms:
        yield (
            f"batch norm ({list_names(norms)}): each microbatch is normalized by its own statistics, not by those of "
            "the whole batch; batch_norm='sync' normalizes replicas together, and a norm without batch statistics "
            "(GroupNorm, LayerNorm) is the same under every plan"
        )
    for call, what in trained.unkeyed_draws.items():
        yield describe_unkeyed(run.model, call, what, str(trained.compiled.plan), num_microbatches)
    if run.options.cross_sample == "accept":
        yield (
            "cross_sample='accept': the loss or the output of a sample depends on the others of its microbatch, which "
            "has fewer samples under this plan"
        )


BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - the base class of all of them


def list_names(names: Sequence[str]) -> str:
    """Return the first names."""
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
