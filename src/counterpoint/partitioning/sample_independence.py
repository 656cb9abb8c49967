"""Check that neither a model's output for a sample nor its buffers depend on how a batch is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, ModuleAttributes, num_samples, preserve_state, split_call_args
from counterpoint.partitioning.pytree import has_plain_entries


def modules_with_running_stats(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that keep running statistics of their batches.

    Example:
        >>> list(modules_with_running_stats(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1']
    """
    kinds = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001 - their common base class
    for path, module in model.named_modules():
        if isinstance(module, kinds) and module.track_running_stats:
            yield path


def require_sample_independence(
    model: nn.Module,
    inputs: Inputs,
    plan: str,
    num_microbatches: int,
    read_batch: Callable[[], Inputs] | None = None,
) -> None:
    """Check that a model's output for a sample does not depend on the other samples, in evaluation mode.

    The model runs on one microbatch, on its first half, and on this half together with the same samples multiplied
    by 16, by which sums keep their sign, but the largest value of the batch changes. A single sample is padded with
    zeros. If the model does not run on these, but on the single sample and on the whole batch, then the outputs of
    both are compared: an input without samples, such as a mask, may be as long as the batch.

    The check is skipped for a model that draws random numbers in evaluation too, has norms without running statistics,
    or does not run. A branch that the samples of a microbatch decide on together is found only if one of these
    forwards takes the other side.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.
        plan: as text, for the message.
        num_microbatches: number of microbatches of a batch.
        read_batch: returns the inputs of the whole batch; None if they cannot be read.

    Raises:
        PlanError: it does depend on them.
    """
    if num_microbatches < 2 or any(map(uses_batch_statistics, model.modules())):
        return
    with preserve_state(model, training=False):
        errors = [_find_dependence(model, inputs, read_batch, cuts_lists=cuts) for cuts in _ways_to_cut(inputs)]
    if any(not error for error in errors):
        return
    raise PlanError(
        f"the output of {type(model).__name__} for a sample depends on the other samples of its batch: it changes "
        f"by {errors[0]:.1e} of its largest value without them; {plan} computes a batch as {num_microbatches} separate "
        "microbatches, so its gradient would not be that of the whole batch; take means and norms over the "
        "features of one sample, give num_microbatches=1, name with shared=(NAME,) an input that has no samples, or "
        "pass cross_sample='accept' if each microbatch is intended to be a batch of its own"
    )


def _ways_to_cut(inputs: Inputs) -> Sequence[bool]:
    """Return whether lists without tensors are cut like tensors; both, if there are some."""
    return (True, False) if any(map(has_plain_entries, tree_leaves(inputs, is_leaf=has_plain_entries))) else (True,)


def _find_dependence(
    model: nn.Module, inputs: Inputs, read_batch: Callable[[], Inputs] | None, *, cuts_lists: bool
) -> float:
    """Return by how much outputs depend on other samples, relative to the largest one; 0 if that is unknown."""
    count = num_samples(inputs)
    batch_size, half = max(count, 2), max(count, 2) // 2
    resize = partial(_resize_batch, inputs, cuts_lists=cuts_lists)
    rng_state = torch.get_rng_state()
    try:
        first = _run_model(model, resize(0, half))
        full, again = (_run_model(model, resize(0, batch_size)) for _ in range(2))
    except Exception:  # noqa: BLE001 - training raises it again, with its location
        return 0.0 if count > 1 or read_batch is None else _compare_with_batch(model, inputs, read_batch)
    draws = not torch.equal(torch.get_rng_state(), rng_state)
    if draws or not all(map(torch.equal, full, again)):  # the latter with a generator of its own
        return 0.0
    error = _largest_error(full, first, half, batch_size)
    with suppress(Exception):  # a model need not take values that no batch has
        error = error or _largest_error(_run_model(model, _add_multiples(resize(0, half))), first, half, 2 * half)
    return error


def _compare_with_batch(model: nn.Module, sample: Inputs, read_batch: Callable[[], Inputs]) -> float:
    """Return by how much the output of a single sample differs from that in the whole batch; 0 if one does not run."""
    with suppress(Exception):
        one, batch = _run_model(model, sample), read_batch()
        return _largest_error(_run_model(model, batch), one, 1, num_samples(batch))
    return 0.0


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


def uses_batch_statistics(module: nn.Module) -> bool:
    """Tell whether a module normalizes by the statistics of its microbatch, in evaluation too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats  # noqa: SLF001


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


def _add_multiples(inputs: Inputs) -> Inputs:
    """Return samples, and the same ones multiplied by 16."""
    batch_size = num_samples(inputs)

    def add(leaf: Any) -> Any:  # noqa: ANN401
        if has_plain_entries(leaf) and len(leaf) == batch_size:
            return leaf * 2
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != batch_size:
            return leaf
        return torch.cat([leaf, leaf * 16 if leaf.is_floating_point() else leaf])

    return tree_map(add, inputs, is_leaf=has_plain_entries)


def _run_model(model: nn.Module, inputs: Inputs) -> Sequence[Any]:
    """Return the output tensors of the model, whose plain attributes are then as before."""
    args, kwargs = split_call_args(inputs)
    attributes = ModuleAttributes(model)
    try:
        return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
    finally:
        attributes.restore()


def _largest_error(outputs: Sequence[Tensor], parts: Sequence[Tensor], num_rows: int, batch_size: int) -> float:
    """Return the largest difference between the first rows of outputs and those of these samples alone.

    Args:
        outputs: of a batch.
        parts: of its first samples alone.
        num_rows: how many they are.
        batch_size: samples of the batch.
    """
    return max(
        (
            _relative_error(output, part, num_rows)
            for output, part in zip(outputs, parts, strict=False)
            if output.is_floating_point()
            and output.shape[:1] == (batch_size,)
            and part.shape == (num_rows, *output.shape[1:])
        ),
        default=0.0,
    )


def _relative_error(output: Tensor, part: Tensor, num_rows: int) -> float:
    """Return the difference of the first samples, relative to the largest value; 0 if it is rounding."""
    rows, part = output.detach()[:num_rows], part.detach()
    largest = float(output.detach().abs().max()) if rows.numel() else 0.0
    error = float((rows - part).abs().max()) / (largest or 1.0) if rows.numel() else 0.0
    return error if error > torch.finfo(output.dtype).eps ** 0.5 else 0.0
