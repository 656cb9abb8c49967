"""Check that neither a model's output for a sample nor its buffers and gradients depend on how a batch is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import PlanError
from counterpoint.partitioning.batch_statistics import uses_batch_statistics
from counterpoint.partitioning.compiled_modules import run_eagerly
from counterpoint.partitioning.dry_run import (
    Inputs,
    ModuleAttributes,
    num_samples,
    preserve_state,
    replace_tensors,
    split_call_args,
)
from counterpoint.partitioning.pytree import has_plain_entries
from counterpoint.runtime.compiler_import import without_dynamo_import, without_sympy_import
from counterpoint.runtime.gradient_code import GradientCodeDetector, gradient_errors
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.output_errors import find_rounding, is_from_rounding, largest_error, run_model
from counterpoint.runtime.rng.draw_sites import DrawRecorder, UnkeyedDrawDetector
from counterpoint.runtime.rng.random_functions import random_functions
from counterpoint.runtime.value_reads import ValueReadDetector


def require_sample_independence(
    model: nn.Module,
    inputs: Inputs,
    plan: str,
    num_microbatches: int,
    read_batch: Callable[[], Inputs] | None = None,
) -> bool:
    """Check that a model's output for a sample does not depend on the other samples, in evaluation and in training.

    The model runs in evaluation mode on one microbatch and on each of its halves; and on the first half together with
    the same samples multiplied by 16, -16 and 0, by which the largest value and the sign of sums change. A single
    sample is padded with zeros. If the model does not run on these, but on the single sample and on the whole batch,
    then the outputs of both are compared: an input without samples, such as a mask, may be as long as the batch.

    The same is done in training mode, unless the outputs are those of evaluation, and its Python code reads no value of
    a tensor, as ``if x.mean() > 0`` does. Torch's own modules remain in evaluation mode there, because other checks
    treat batch norms, and random numbers are replaced by constants.

    A branch on the number of samples may take one side for a microbatch, and the other for the batch. If the model does
    not run on half of a microbatch, or calls other functions for as many samples as the batch has, which is seen on
    torch's meta device, then it runs on the microbatch's samples, repeated to this number; in both modes.

    The check is skipped in a mode in which the model draws other random numbers, and for a model that has norms without
    running statistics, or does not run. A branch that the samples of a microbatch decide on together is found only if
    one of these forwards takes the other side.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.
        plan: as text, for the message.
        num_microbatches: number of microbatches of a batch.
        read_batch: returns the inputs of the whole batch; None if they cannot be read.

    Returns:
        Whether Python code of the forward reads values of tensors, by which other batches may take another branch.

    Raises:
        PlanError: it does depend on them.
    """
    if num_microbatches < 2 or any(map(uses_batch_statistics, model.modules())):
        return False
    reads = ValueReadDetector()
    found = [
        _find_dependence(model, inputs, read_batch, reads, cuts_lists=cuts)
        or _find_dependence_on_number(model, inputs, num_microbatches, cuts_lists=cuts)
        for cuts in _ways_to_cut(inputs)
    ]
    dependence = found[0]
    if dependence is None or None in found:
        return reads.has_read
    raise PlanError(
        f"the output of {type(model).__name__} for a sample depends on the other samples of its batch: it changes "
        f"by {dependence.error:.1e} of its largest value {dependence.when}; {plan} computes a batch as "
        f"{num_microbatches} separate microbatches, so its gradient would not be that of the whole batch; take means "
        "and norms over the features of one sample, and let no branch depend on several samples, give "
        "num_microbatches=1, name with shared=(NAME,) an input that has no samples, or pass cross_sample='accept' if "
        "each microbatch is intended to be a batch of its own"
    )


class Dependence(NamedTuple):
    """How the output for some samples depends on others.

    Args:
        error: the largest difference, relative to the largest value.
        when: what was changed.
    """

    error: float
    when: str


def _ways_to_cut(inputs: Inputs) -> Sequence[bool]:
    """Return whether lists without tensors are cut like tensors; both, if there are some."""
    return (True, False) if any(map(has_plain_entries, tree_leaves(inputs, is_leaf=has_plain_entries))) else (True,)


def _find_dependence(
    model: nn.Module,
    inputs: Inputs,
    read_batch: Callable[[], Inputs] | None,
    reads: ValueReadDetector,
    *,
    cuts_lists: bool,
) -> Dependence | None:
    """Return how outputs depend on other samples; None if they do not, or if that is unknown.

    Args:
        model: to run.
        inputs: of a microbatch.
        read_batch: returns the inputs of the whole batch; None if they cannot be read.
        reads: finds out whether Python code reads values.
        cuts_lists: whether lists have an entry for each sample.
    """
    cut = partial(_resize_batch, inputs, cuts_lists=cuts_lists)
    batch_size = max(num_samples(inputs), 2)
    with preserve_state(model, training=False):
        try:
            with reads:
                outputs = run_model(model, cut(0, batch_size))
            found = _find_dependence_in_mode(model, cut, batch_size, outputs)
        except Exception:  # noqa: BLE001 - training raises it again, with its location
            if num_samples(inputs) > 1 or read_batch is None:
                return None
            return _compare_with_batch(model, inputs, read_batch)
    if found is not None:
        return found
    with suppress(Exception), training_without_draws(model):  # training raises it again, with its location
        with reads:
            trained = run_model(model, cut(0, batch_size))
        is_other = len(trained) != len(outputs) or not all(map(torch.equal, trained, outputs))
        return _find_dependence_in_mode(model, cut, batch_size, trained) if is_other or reads.has_read else None
    return None


def _find_dependence_on_number(
    model: nn.Module, inputs: Inputs, num_microbatches: int, *, cuts_lists: bool
) -> Dependence | None:
    """Return how outputs change where samples are repeated to as many as the batch has; None if they do not."""
    compare = partial(_compare_with_repeated, model, inputs, num_microbatches, cuts_lists=cuts_lists)
    with suppress(Exception), run_eagerly(model), preserve_state(model, training=False):  # which need not take them
        if (found := compare(DrawRecorder())) is not None:
            return found
    with suppress(Exception), run_eagerly(model), training_without_draws(model) as draws:
        return compare(draws) if any(module.training for module in model.modules()) else None
    return None


def _compare_with_repeated(
    model: nn.Module, inputs: Inputs, num_microbatches: int, draws: DrawRecorder, *, cuts_lists: bool
) -> Dependence | None:
    """Return what ``_find_dependence_on_number`` does, for the mode that the model is in; ``draws`` records its own."""
    size = num_samples(inputs)
    batch_size = size * num_microbatches
    runs_on_half = size < 2 or _runs(model, _resize_batch(inputs, 0, size // 2, cuts_lists=cuts_lists))
    calls = CallsForNumber.compare(model, inputs, num_microbatches, cuts_lists=cuts_lists)
    is_suspect = calls is CallsForNumber.OTHER or not runs_on_half
    if calls is CallsForNumber.SAME and not is_suspect and not _has_forward_hooks(model):
        return None
    with UnkeyedDrawDetector(draws):
        one = run_model(model, repeat_samples(inputs, size, 1, cuts_lists=cuts_lists))
    is_too_large = _count_elements((inputs, one)) * num_microbatches > MAX_ELEMENTS
    if draws.unkeyed or (not is_suspect and (is_too_large or draws.draws)):  # constants may depend on the number, too
        return None
    whole, again = (
        run_model(model, repeat_samples(inputs, size, times, cuts_lists=cuts_lists)) for times in (num_microbatches, 1)
    )
    rounding = find_rounding(model)
    if largest_error(again, one, range(size), size, rounding):
        return None  # it depends on how often it was called, not on the number
    error = largest_error(whole, one, range(size), batch_size, rounding)
    samples = repeat_samples(inputs, size, 1, cuts_lists=cuts_lists)
    if not error or is_from_rounding(model, samples, one, whole, range(size), batch_size):
        return None
    return Dependence(error, f"with the same samples repeated to {batch_size}")


MAX_ELEMENTS = 4_000_000
"""Of inputs and outputs of a batch on which a model is run because it is unknown what it calls for as many samples."""


def _count_elements(values: object) -> int:
    """Return the number of elements of all tensors in a nest."""
    return sum(leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _has_forward_hooks(model: nn.Module) -> bool:
    """Tell whether there are hooks, which may depend on the number of samples."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())  # noqa: SLF001 - there is no other way to see them


@contextmanager
def _without_forward_hooks(model: nn.Module) -> Iterator[None]:
    """Run without hooks, which may keep what they see, and should see no tensors without values."""
    hooks = [
        (own, dict(own))
        for module in model.modules()
        for own in (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - as above
        if own
    ]
    try:
        for own, _ in hooks:
            own.clear()
        yield
    finally:
        for own, values in hooks:
            own.update(values)


class CallsForNumber(Enum):
    """Whether a model calls the same functions for as many samples as the batch has."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"

    @staticmethod
    def compare(model: nn.Module, inputs: Inputs, times: int, *, cuts_lists: bool = False) -> CallsForNumber:
        """Run a model, without its hooks, on torch's meta device, where nothing is computed.

        Args:
            model: the module; its attributes are restored.
            inputs: of some samples.
            times: how often they are repeated.
            cuts_lists: whether lists have an entry for each sample.

        Returns:
            ``UNKNOWN`` for a model that does not run there.
        """
        if all(map(_is_defined_by_torch, model.modules())):
            return CallsForNumber.SAME
        try:
            with without_dynamo_import(), without_sympy_import():  # which operations on the meta device would import
                on_meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
                repeated = repeat_samples(on_meta, num_samples(inputs), times, cuts_lists=cuts_lists)
                is_same = _calls(model, on_meta) == _calls(model, repeated)
        except Exception:  # noqa: BLE001 - a model need not run without values
            return CallsForNumber.UNKNOWN
        return CallsForNumber.SAME if is_same else CallsForNumber.OTHER


def _is_defined_by_torch(module: nn.Module) -> bool:
    """Tell whether the forward of a module is torch's own, which has no branch on the number of samples.

    It spares most perceptrons a run on the meta device, for which torch imports 40 MiB of Python code.
    """
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)


def _runs(model: nn.Module, inputs: Inputs) -> bool:
    """Tell whether a model runs on some samples."""
    try:
        run_model(model, inputs)
    except Exception:  # noqa: BLE001 - whatever it raises
        return False
    return True


def _calls(model: nn.Module, inputs: Inputs) -> list[Any]:
    """Return the functions of torch that a model calls on the meta device, and the numbers that it computes with."""
    recorder, attributes = CallRecorder(), ModuleAttributes(model)
    values = {id(tensor): tensor.to("meta") for tensor in (*model.parameters(), *model.buffers())}
    args, kwargs = split_call_args(inputs)
    try:
        with replace_tensors(model, values), _without_forward_hooks(model), recorder:
            model(*args, **kwargs)
    finally:
        attributes.restore()
    return recorder.calls


class CallRecorder(TorchFunctionMode):
    """Records the functions of torch that Python code calls, with numbers that are computed with.

    Example:
        >>> with CallRecorder() as recorder:
        ...     _ = torch.ones(3) * 2
        >>> [name for name, _ in recorder.calls]
        ['ones', 'mul']
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[float]]] = []

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - any function of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function."""
        name = getattr(func, "__name__", "")
        if name != "__get__":  # of attributes, such as a shape
            is_arithmetic = name.strip("_") in ARITHMETIC
            kinds = (int, float) if is_arithmetic else float  # integers are sizes in other functions
            self.calls.append((name, [value for value in args if isinstance(value, kinds)]))
        return func(*args, **(kwargs or {}))


ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "truediv", "rtruediv", "true_divide", "pow", "rpow"})


def _find_dependence_in_mode(
    model: nn.Module, cut: Callable[[int, int], Inputs], batch_size: int, full: Sequence[Tensor]
) -> Dependence | None:
    """Return what ``_find_dependence`` does, for the mode that the model is in.

    Args:
        model: to run.
        cut: returns copies of the samples from one on and up to another.
        batch_size: samples of a microbatch, two or more.
        full: its outputs for all of them.
    """
    half, draws = batch_size // 2, DrawRecorder()
    with UnkeyedDrawDetector(draws):  # the state of the generator does not tell, since calls of modules may set it
        first = run_model(model, cut(0, half))
    again = run_model(model, cut(0, batch_size))
    if draws.unkeyed or not all(map(torch.equal, full, again)):  # the latter with a generator of Python or numpy
        return None
    rounding = find_rounding(model)
    for start, stop, part in ((0, half, first), (half, batch_size, None)):
        with suppress(Exception):  # a model need not take zeros in the place of a sample
            own = run_model(model, cut(start, stop)) if part is None else part
            error = largest_error(full, own, range(start, stop), batch_size, rounding)
            if error and not is_from_rounding(model, cut(start, stop), own, full, range(start, stop), batch_size):
                return Dependence(error, "without them")
    for factor in FACTORS:
        with suppress(Exception):  # a model need not take values that no batch has
            multiples = run_model(model, _add_multiples(cut(0, half), factor))
            error = largest_error(multiples, first, range(half), 2 * half, rounding)
            if error and not is_from_rounding(model, cut(0, half), first, multiples, range(half), 2 * half):
                return Dependence(error, f"together with the same samples multiplied by {factor}")
    return None


FACTORS = (16, -16, 0)
"""What samples are multiplied with, to be other samples."""


def find_state_dependence(model: nn.Module, inputs: Inputs) -> float:
    """Return by how much a second forward depends, through what the first has kept, on other samples of its batch.

    In training mode, with random numbers replaced by constants, the model runs twice on a microbatch, and twice on each
    half of it. What it keeps for each sample, or counts, has no effect; a mean over samples has.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.

    Returns:
        The largest difference, relative to the largest value; 0 if there is none, or if it does not run on halves.
    """
    batch_size, rounding = max(num_samples(inputs), 2), find_rounding(model)
    largest = 0.0
    with suppress(Exception):  # a model need not take zeros in the place of a sample
        full, again = (_run_twice(model, _resize_batch(inputs, 0, batch_size, cuts_lists=True)) for _ in range(2))
        if not all(map(torch.equal, full, again)):
            return 0.0
        for start, stop in ((0, batch_size // 2), (batch_size // 2, batch_size)):
            part = _run_twice(model, _resize_batch(inputs, start, stop, cuts_lists=True))
            largest = max(largest, largest_error(full, part, range(start, stop), batch_size, rounding))
    return largest


def _run_twice(model: nn.Module, inputs: Inputs) -> Sequence[Tensor]:
    """Return the outputs of a second forward on the same samples."""
    args, kwargs = split_call_args(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs))
    with training_without_draws(model), torch.enable_grad():  # for a forward that differentiates
        model(*args, **kwargs)
        return run_model(model, inputs)


@contextmanager
def training_without_draws(model: nn.Module) -> Iterator[DrawRecorder]:
    """Put the user's modules into training mode, where they draw constants; torch's modules into evaluation mode.

    Args:
        model: the module; its state is preserved.
    """
    draws = DrawRecorder()
    with preserve_state(model), InterceptFunctions(random_functions(draws)):
        for module in model.modules():
            kinds = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)  # noqa: SLF001 - their common base classes
            if type(module).__module__.startswith("torch.") or isinstance(module, kinds):
                module.training = False
        yield draws


def _compare_with_batch(model: nn.Module, sample: Inputs, read_batch: Callable[[], Inputs]) -> Dependence | None:
    """Return how the output of a single sample differs from that in the whole batch; None if one does not run."""
    with suppress(Exception):
        one, batch = run_model(model, sample), read_batch()
        outputs, batch_size = run_model(model, batch), num_samples(batch)
        error = largest_error(outputs, one, range(1), batch_size, find_rounding(model))
        if error and not is_from_rounding(model, sample, one, outputs, range(1), batch_size):
            return Dependence(error, "without them")
    return None


def require_independent_buffers(
    model: nn.Module, inputs: Inputs, plan: str, num_microbatches: int, runs_per_rank: int
) -> None:
    """Check that no forward in training changes a buffer in another way than a forward on the whole batch would.

    The model runs on the first half of a microbatch and, if that changes a buffer, on the second half. Buffers of batch
    norms are not checked: their statistics are those of the whole batch under every plan, or a warning says what they
    are. The check is skipped for a model that does not run on half a microbatch.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.
        plan: as text, for the message.
        num_microbatches: number of microbatches of a batch.
        runs_per_rank: forwards of a block on one rank in a step.

    Raises:
        PlanError: one is changed by its samples, of which a forward has only some, or several times in a step.
    """
    if num_microbatches < 2:
        return
    changed = find_changed_buffers(model, inputs)
    for name, depends_on_samples in changed.items():
        if not depends_on_samples and runs_per_rank < 2:  # every replica makes the change of the whole batch
            continue
        way = "according to its samples" if depends_on_samples else "whenever it runs"
        raise PlanError(
            f"the forward of {type(model).__name__} changes the buffer {name} {way}, but {plan} runs it on "
            f"{num_microbatches} microbatches in a step, {runs_per_rank} of them on one rank after each other, so the "
            "buffer, and what is computed from it, would not be those of one forward on the whole batch; train with "
            f"{'one microbatch on one rank' if depends_on_samples else 'one microbatch for each replica'}, or pass "
            "cross_sample='accept' if each microbatch is intended to be a batch of its own"
        )


def find_changed_buffers(model: nn.Module, inputs: Inputs) -> dict[str, bool]:
    """Return the buffers, except those of batch norms, that a forward in training changes.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.

    Returns:
        By name, whether the change depends on the samples.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    of_norms = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if id(buffer) not in of_norms}
    if not before:
        return {}
    half = max(num_samples(inputs) // 2, 1)
    try:
        first = _buffers_after(model, _take_samples(inputs, 0, half))
        changed = [name for name in before if not _are_equal(before[name], first.get(name))]
        second = _buffers_after(model, _take_samples(inputs, half, 2 * half)) if changed else {}
    except Exception:  # noqa: BLE001 - training raises it again, with its location
        return {}
    return {name: not _are_equal(second.get(name), first.get(name)) for name in changed}


def require_additive_gradients(model: nn.Module, inputs: Inputs, plan: str, num_microbatches: int) -> str:
    """Check that the gradient of a batch is the sum of those of its parts, where Python code computes gradients.

    If outputs for samples are independent of each other, then torch's own operations have such gradients. A custom
    autograd ``Function``, or a hook on the gradient of an activation, may do something else: divide by the norm over
    all samples, or scale them together before they are rounded, as some products in fp8 do. So if a forward has one of
    these, it runs in training mode on a microbatch and on both halves, with random numbers replaced by constants, and
    the gradients of ``sum(output * factors)`` are compared. Those of a number that the model computes from all samples,
    such as its loss, are compared with what those of the halves' numbers add up to, if it is a mean or a sum.

    The check is skipped for a model that does not run on half a microbatch, whose gradients differ between two runs, or
    which has norms without running statistics.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.
        plan: as text, for the message.
        num_microbatches: number of microbatches of a batch.

    Returns:
        The code whose gradients are not twice as large if those of outputs are, as of a hook that clamps each element;
        empty if there is none. With it, backward has to start from the factor that a plain loop has.

    Raises:
        PlanError: it is not.
    """
    if num_microbatches < 2 or any(map(uses_batch_statistics, model.modules())):
        return ""
    params = {  # a hook on a parameter may count its calls
        name: param
        for name, param in model.named_parameters()
        if param.requires_grad and not param._backward_hooks  # noqa: SLF001 - there is no other way to see them
    }
    detector, found, is_proportional = GradientCodeDetector(finds_detached=True), None, True
    # training raises it again, with its location
    with suppress(Exception), training_without_draws(model), torch.enable_grad(), detector:
        found, is_proportional = _compare_gradients(model, inputs, params, detector)
    scalars = GradientCodeDetector(finds_detached=True)
    if found is None:
        with suppress(Exception), training_without_draws(model), torch.enable_grad(), scalars:
            found, is_in_proportion = _compare_scalar_gradients(model, inputs, params, scalars)
            is_proportional = is_proportional and is_in_proportion
    if found is None:
        return "" if is_proportional else " or ".join(detector.names or scalars.names)
    name, error = found
    if scalars.names:
        raise PlanError(
            f"the gradient of {name} for the number that {type(model).__name__} computes from a microbatch differs by "
            f"{error:.1e} of its largest value from what those for its halves add up to, because of "
            f"{' or '.join(scalars.names)}; {plan} computes a batch as {num_microbatches} separate microbatches, and "
            "backward starts from the share of each; let backward(ctx, grad_output) multiply what it returns with "
            "grad_output, compute the gradient of each sample from this sample alone, give num_microbatches=1 on one "
            "rank, or pass cross_sample='accept' if each microbatch is intended to be a batch of its own"
        )
    raise PlanError(
        f"the gradient of {name} in {type(model).__name__} is not the sum of those of its samples: for a microbatch it "
        f"differs from those of its halves by {error:.1e} of its largest value, perhaps by a value of all samples in "
        f"{' or '.join(detector.names)}; {plan} computes a batch as {num_microbatches} separate microbatches, so its "
        "gradient would not be that of the whole batch; compute the gradient of each sample from this sample alone, "
        "give num_microbatches=1 on one rank, or pass cross_sample='accept' if each microbatch is intended to be a "
        "batch of its own"
    )


def _compare_gradients(
    model: nn.Module, inputs: Inputs, params: Mapping[str, nn.Parameter], detector: GradientCodeDetector
) -> tuple[tuple[str, float] | None, bool]:
    """Compare the gradients for all samples with those for halves, and with those of outputs multiplied by 2.

    Returns:
        The parameter whose gradient differs most from the sum of those of halves, and by how much, None if there is
        none; and whether gradients are proportional to those of outputs.
    """
    batch_size = max(num_samples(inputs), 2)

    def differentiate(start: int, stop: int, scale: float = 1.0) -> list[Tensor | None]:
        """Return the gradients for some of the samples."""
        outputs = run_model(model, _resize_batch(inputs, start, stop, cuts_lists=True))
        rows = [one for one in outputs if one.requires_grad and one.shape[:1] == (stop - start,)]
        detector.find_functions(rows)
        if not rows or not detector.names:
            return []
        factors = [_make_factors(one, start) * scale for one in rows]
        return list(torch.autograd.grad(rows, [*params.values()], factors, allow_unused=True))

    whole = differentiate(0, batch_size)
    if not whole:
        return None, True
    again = differentiate(0, batch_size)
    if any(gradient_errors(whole, again, detector.eps)):
        return None, True
    doubled = [None if one is None else one / 2 for one in differentiate(0, batch_size, 2.0)]
    is_proportional = not any(gradient_errors(whole, doubled, detector.eps))
    halves = [differentiate(0, batch_size // 2), differentiate(batch_size // 2, batch_size)]
    sums = [None if first is None or second is None else first + second for first, second in zip(*halves, strict=True)]
    errors = gradient_errors(whole, sums, detector.eps)
    largest = max(zip(params, errors, strict=True), key=lambda pair: pair[1])
    return largest if largest[1] else None, is_proportional


def _compare_scalar_gradients(
    model: nn.Module, inputs: Inputs, params: Mapping[str, nn.Parameter], detector: GradientCodeDetector
) -> tuple[tuple[str, float] | None, bool]:
    """Compare the gradients of a mean or sum over all samples with what those of halves add up to.

    Returns:
        As :func:`_compare_gradients`; of a number that is neither a mean nor a sum over samples, such as a mean over
        tokens, only whether its gradients are proportional to what backward starts from.
    """
    batch_size = max(num_samples(inputs), 2)
    middle = batch_size // 2
    bounds, share = ((0, batch_size), (0, middle), (middle, batch_size)), middle / batch_size
    is_proportional = True

    def differentiate(number: Tensor, start: float) -> list[Tensor | None]:
        """Return the gradients if backward starts from a factor."""
        factor = torch.full_like(number, start)
        return list(torch.autograd.grad(number, [*params.values()], factor, retain_graph=True, allow_unused=True))

    def compare(gradients: Sequence[Tensor | None], halves: Sequence[Tensor], *shares: float) -> tuple[str, float]:
        """Return the parameter whose gradient differs most from what those of halves add up to, and by how much."""
        parts = [differentiate(half, share) for half, share in zip(halves, shares, strict=True)]
        sums = [None if one is None or two is None else one + two for one, two in zip(*parts, strict=True)]
        errors = gradient_errors(gradients, sums, detector.eps)
        return max(zip(params, errors, strict=True), key=lambda pair: pair[1])

    runs = [run_model(model, _resize_batch(inputs, *ends, cuts_lists=True)) for ends in bounds]
    for whole, *halves in zip(*runs, strict=True):
        if whole.dim() or not whole.requires_grad:
            continue
        detector.find_functions([whole])
        if not detector.names:
            continue
        gradients = differentiate(whole, 1.0)
        for shares in ((share, 1 - share), (1.0, 1.0)):
            expected = sum(half.item() * one for half, one in zip(halves, shares, strict=True))
            if abs(expected - whole.item()) <= detector.eps**0.5 * abs(whole.item()):
                largest = compare(gradients, halves, *shares)
                weight = _find_weight(gradients, [differentiate(half, 1.0) for half in halves])
                is_other = largest[1] and compare(gradients, halves, weight, 1 - weight)[1]
                return largest if is_other else None, is_proportional
        doubled = [None if one is None else one / 2 for one in differentiate(whole, 2.0)]
        is_proportional = is_proportional and not any(gradient_errors(gradients, doubled, detector.eps))
    return None, is_proportional


def _find_weight(whole: Sequence[Tensor | None], halves: Sequence[Sequence[Tensor | None]]) -> float:
    """Return the weight of the first half, with which the gradients for all samples are the mean of those of halves.

    A number may be a mean over tokens, say. That of a new model hardly depends on which samples weigh more, so that it
    may be what a mean over samples is, too.
    """
    found = [
        (own.double(), one.double(), two.double())
        for own, one, two in zip(whole, *halves, strict=True)
        if own is not None and one is not None and two is not None
    ]
    between = sum(float(((one - two) ** 2).sum()) for _, one, two in found)
    along = sum(float(((own - two) * (one - two)).sum()) for own, one, two in found)
    return min(max(along / between, 0.0), 1.0) if between else 0.5


def _make_factors(output: Tensor, start: int) -> Tensor:
    """Return what some samples' outputs are multiplied with: other factors for each, larger ones for later samples.

    Args:
        output: of some samples.
        start: the first of them.
    """
    per_sample = output[:1].numel()
    index = torch.arange(start * per_sample, (start + len(output)) * per_sample, device=output.device)
    samples = torch.div(index, max(per_sample, 1), rounding_mode="floor")
    return (torch.cos(index.double()) * (1 + samples)).reshape(output.shape).to(output.dtype)


def _buffers_after(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the buffers after a forward in training, which are then as before."""
    args, kwargs = split_call_args(inputs)
    with preserve_state(model):
        model(*args, **kwargs)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _take_samples(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Return copies of some samples, or zeros in the place of samples that do not exist."""
    batch_size = num_samples(inputs)

    def take(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or leaf.shape[0] != batch_size:
            return leaf.clone()
        return leaf[start:stop].clone() if stop <= batch_size else torch.zeros_like(leaf)

    return tree_map(take, inputs)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two tensors have the same values, nan or not."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _resize_batch(inputs: Inputs, start: int, stop: int, *, cuts_lists: bool) -> Inputs:
    """Return copies of some samples, padded with zeros if there are too few; a model may change them."""
    batch_size = num_samples(inputs)

    def resize(leaf: Any) -> Any:  # noqa: ANN401
        if cuts_lists and has_plain_entries(leaf) and len(leaf) == batch_size:
            return (leaf * 2 if stop > batch_size else leaf)[start:stop]
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or leaf.shape[0] != batch_size:
            return leaf.clone()
        return (leaf if stop <= batch_size else torch.cat([leaf, torch.zeros_like(leaf)]))[start:stop].clone()

    return tree_map(resize, inputs, is_leaf=has_plain_entries if cuts_lists else None)


def repeat_samples(inputs: Inputs, batch_size: int, times: int, *, cuts_lists: bool) -> Inputs:
    """Return samples several times.

    Args:
        inputs: any nest of samples and other values.
        batch_size: the number of samples.
        times: how often.
        cuts_lists: whether lists have an entry for each sample.
    """

    def repeat(leaf: Any) -> Any:  # noqa: ANN401 - of any type
        if cuts_lists and has_plain_entries(leaf) and len(leaf) == batch_size:
            return leaf * times
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch_size:
            return leaf
        if leaf.is_meta:  # where torch.cat is Python code, which imports a package for symbols
            return leaf.new_empty((batch_size * times, *leaf.shape[1:]))
        return torch.cat([leaf] * times)

    return tree_map(repeat, inputs, is_leaf=has_plain_entries if cuts_lists else None)


def _add_multiples(inputs: Inputs, factor: int) -> Inputs:
    """Return samples, and the same ones with their floating-point values multiplied by a factor."""
    batch_size = num_samples(inputs)

    def add(leaf: Any) -> Any:  # noqa: ANN401
        if has_plain_entries(leaf) and len(leaf) == batch_size:
            return leaf * 2
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch_size:
            return leaf
        return torch.cat([leaf, leaf * factor if leaf.is_floating_point() else leaf])

    return tree_map(add, inputs, is_leaf=has_plain_entries)
