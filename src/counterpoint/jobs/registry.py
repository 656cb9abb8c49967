"""Registry of the built-in training jobs."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial

import torch.nn.functional as F
from torch.optim import Adagrad, Adam, RAdam

from counterpoint.data.digits import split_digits
from counterpoint.data.lines import NUM_CLASSES, NUM_ROWS, split_lines
from counterpoint.data.text import split_text
from counterpoint.errors import PlanError
from counterpoint.jobs.job import (
    LargeBatchConfig,
    MetricTarget,
    TrainingJob,
    measure_accuracy,
    measure_bits,
    sequence_loss,
    with_seed,
)
from counterpoint.jobs.models import GPT, GPTShape, LinesNet, SmallCNN
from counterpoint.optim.lamb import LAMB
from counterpoint.optim.lars import LARS

JOBS: dict[str, TrainingJob] = {
    "digits": TrainingJob(
        name="digits",
        summary="handwritten digits, a small convolutional network with BatchNorm",
        build_model=with_seed(SmallCNN),
        build_data=split_digits,
        loss=F.cross_entropy,
        optimizer=partial(Adam, lr=2e-3),
        batch_size=64,
        epochs=10,
        metrics=measure_accuracy,
        target=MetricTarget("accuracy", 0.95, "higher"),
        large_batch={
            "lars": LargeBatchConfig(partial(LARS, lr=0.5, trust_coefficient=0.02), rule="linear", power=2.0),
            "lamb": LargeBatchConfig(partial(LAMB, lr=2e-2), rule="sqrt", power=1.0),
        },
    ),
    "text": TrainingJob(
        name="text",
        summary="the standard library's sources byte by byte, a small GPT with tied embeddings",
        build_model=with_seed(partial(GPT, GPTShape())),
        build_data=partial(split_text, held_out_limit=256),
        loss=sequence_loss,
        # RAdam is AdamW with built-in warm-up, so the job needs no learning rate schedule
        optimizer=partial(RAdam, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, decoupled_weight_decay=True),
        batch_size=24,
        epochs=1,
        max_steps=650,
        metrics=measure_bits,
        target=MetricTarget("bits_per_byte", 2.3, "lower"),
    ),
    "lines": TrainingJob(
        name="lines",
        summary="which package a source line comes from, a table of a million embeddings",
        build_model=with_seed(partial(LinesNet, NUM_CLASSES, NUM_ROWS)),
        build_data=split_lines,
        loss=F.cross_entropy,
        optimizer=partial(Adagrad, lr=0.1),
        batch_size=512,
        epochs=1,
        metrics=measure_accuracy,
        target=MetricTarget("accuracy", 0.55, "higher"),
    ),
}


def find_job(name: str) -> TrainingJob:
    """Return the job of a name.

    Raises:
        PlanError: it is unknown; the message suggests the nearest name.

    Example:
        >>> find_job("digits").batch_size
        64
    """
    if name in JOBS:
        return JOBS[name]
    near = get_close_matches(name, JOBS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"give one of {', '.join(JOBS)}"
    raise PlanError(f"unknown job {name!r}; the built-in jobs are {', '.join(JOBS)}; {remedy}")
