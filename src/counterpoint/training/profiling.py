"""How long a user's model takes, piece by piece: measured once on a machine and then remembered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from counterpoint.cutting.eager import Inputs, num_samples
from counterpoint.errors import PlanError
from counterpoint.launchers.machine import processor_name
from counterpoint.model.timing import Timing, known_pieces, known_weights
from counterpoint.optim.options import require_counts
from counterpoint.profiler.cache import remembered
from counterpoint.profiler.measure import measure
from counterpoint.profiler.roofline import count
from counterpoint.profiler.subject import Loss, Subject
from counterpoint.profiler.watch import Repetition
from counterpoint.runtime.build import call_form
from counterpoint.runtime.feed import cut as first_of
from counterpoint.runtime.optimizers import Face, Factory
from counterpoint.training.checks import make_face
from counterpoint.training.choice import FEW_SAMPLES
from counterpoint.training.cutting import finest_cut
from counterpoint.training.norms import least_samples
from counterpoint.training.trained import trainable, with_unused
from counterpoint.world.cluster import Device


def profile(  # noqa: PLR0913 - what is timed, and how, all by keyword
    model: nn.Module,
    inputs: Inputs,
    targets: Any = None,  # noqa: ANN401 - whatever the loss takes
    *,
    loss: Loss | None = None,
    optimizer: optim.Optimizer | Factory = optim.AdamW,
    samples: Sequence[int] = (),
    threads: int | None = None,
    roof: Device | None = None,
    folder: str | Path | None = None,
    anew: bool = False,
) -> Timing:
    """Return how long every piece of a model takes, forward, backward and to update; the model stays as it is.

    Args:
        model: as it would be trained.
        inputs: of some samples: what it is called with, a tensor, a tuple, or a dict by name.
        targets: what the loss takes beside the output.
        loss: from output and targets to the mean loss; the mean of the output where there is none.
        optimizer: an optimizer on the model's parameters, or a factory.
        samples: sizes of microbatches; by default as many as there are inputs, a quarter and a sixteenth of them.
        threads: to compute with; those of this process by default.
        roof: a device; operations are then counted and put under its roof, and nothing is run but one forward.
        folder: where timings are kept, as ``profiler/cache.py`` says; None to measure without keeping.
        anew: whether it is measured even where the folder has it.

    Raises:
        PlanError: the model does not take the inputs, or a number makes no sense.

    Example:
        >>> import torch, counterpoint as cp
        >>> timing = cp.profile(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), torch.zeros(4, 2))
        >>> [piece.name for piece in timing.pieces], timing.at(4).whole.seconds > 0
        (['0', '1'], True)

    Cost:
        Some dozens of steps for each size of microbatch, within seconds for models of seconds; memory for two more
        copies of the parameters.
    """
    require_counts(optional=True, threads=threads)
    for size in samples:
        require_counts(samples=size)
    face = make_face(optimizer, model)
    subject = subject_of(model, call_form(inputs), targets, loss=loss or mean_of_output, face=face)
    sizes = sorted(set(samples)) or sizes_from(num_samples(inputs), least_samples(model))
    if roof is not None:
        return count(subject, "counted", roof, samples=sizes)
    device, used = name_of(subject.device), threads or torch.get_num_threads()
    take = partial(measure, subject, device, samples=sizes, threads=used, effort=Repetition())
    if folder is None:
        return take()
    return remembered(Path(folder), facts_of(subject, sizes, device, used), take, is_wanted_anew=anew)


def subject_of(model: nn.Module, inputs: Inputs, targets: Any, *, loss: Loss, face: Face) -> Subject:  # noqa: ANN401
    """Return a model ready to be timed, in the pieces that a pipeline of it would have, if it can be cut at all.

    Raises:
        PlanError: it cannot even be called with these inputs.
    """
    few = first_of(inputs, 0, min(num_samples(inputs), FEW_SAMPLES))
    cut = finest_cut(model, few, ("chain", "regions"))
    return Subject(model, cut, with_unused(trainable(cut.spec, face)), loss, face, (inputs, targets))


def sizes_from(num: int, least: int) -> list[int]:
    """Return sizes of microbatches to be timed: all samples, a quarter and a sixteenth of them.

    Example:
        >>> sizes_from(64, 1), sizes_from(2, 1)
        ([4, 16, 64], [1, 2])
    """
    return sorted({max(least, 1, num // part) for part in (1, 4, 16)})


def mean_of_output(output: Any, targets: Any) -> Tensor:  # noqa: ANN401 - whatever a model gives
    """Return the mean of all numbers that a model gives, where nobody says what its loss is."""
    del targets
    means = [leaf.mean() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not means:
        raise PlanError("the model gives no tensor of floating point, so it cannot be timed backward; give a loss")
    return torch.stack(means).sum()


def name_of(device: torch.device) -> str:
    """Return the name of a device."""
    return processor_name() if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def facts_of(subject: Subject, samples: Sequence[int], device: str, threads: int) -> dict[str, object]:
    """Return all that the figures of a timing depend on."""
    leaves = [leaf for leaf in tree_leaves(subject.batch) if isinstance(leaf, Tensor)]
    return {
        "model": type(subject.model).__name__,
        "pieces": [[one.name, one.cost, one.output_bytes] for one in known_pieces(subject.spec)],
        "weights": known_weights(subject.spec),
        "samples": [list(samples), *([list(leaf.shape[1:]), str(leaf.dtype)] for leaf in leaves)],
        "loss": getattr(subject.loss, "__qualname__", type(subject.loss).__name__),
        "optimizer": [subject.face.kind.__name__, str(subject.face.optimizer.defaults)],
        "device": device,
        "threads": threads,
        "torch": torch.__version__,
    }
