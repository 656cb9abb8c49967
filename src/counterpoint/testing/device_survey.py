"""The survey of a device: small models of every kind, trained under plans with every name, there and on the CPU.

The tests run it on the stand-in device, ``benchmarks/gpu`` on a GPU. In float64 a case has the CPU's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

from counterpoint.device.accelerator import Accelerator
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.plan.registry import STRATEGIES
from counterpoint.training.parallelize import TrainStep, parallelize
from counterpoint.training.trainer import Trainer

SAMPLES, STEPS = 4, 3
"""Of a batch, and of a case: the decision of the second step stays on the device, and is read after the third."""
TOLERANCE = 1e-12
"""Largest difference of a loss or a weight in float64."""

PLANS = (
    "solo",
    "data(2)",
    "data(2) + overlap",
    "data(2, bucket=0, first_bucket=0) + overlap",
    "data(2, compress=fp16)",
    "data(2, compress=int8)",
    "data(2, compress=topk)",
    "data(2, compress=sign)",
    "data(2, compress=twobit)",
    "data(2, compress=powersgd)",
    "data(2, reduce=adasum)",
    "data(2, update=sharded)",
    "data(2, sync_every=2)",
    "data(2, staleness=1)",
    "zero(2, level=1)",
    "zero(2, level=2)",
    "zero(2, level=3)",
    "zero(2, level=3) + overlap + prefetch",
    "zero(2, level=3) + overlap + prefetch:2",
    "tree(2)",
    "pipeline(2, schedule=gpipe)",
    "pipeline(2)",
    "pipeline(2) + recompute",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2)",
    "pipeline(2, schedule=zero_bubble)",
    "pipeline(2, schedule=pipedream)",
    "pipeline(2, schedule=pipedream_2bw)",
    "tensor(2)",
    "tensor(2) + recompute + partition_activations",
    "server(2)",
    "server(2, consistency=asp)",
    "pipeline(2) * data(2)",
    "tensor(2) * zero(2, level=3)",
)
MODEL_PLANS = (
    "solo",
    "solo + recompute",
    "data(2)",
    "zero(2, level=1)",
    "zero(2, level=3)",
    "pipeline(2)",
    "pipeline(2, schedule=zero_bubble)",
    "tensor(2)",
    "server(2)",
    "pipeline(2) * data(2)",
)
"""For models that are more expensive than the smallest one."""
LISTED_STRATEGIES = {
    entry.doc_source for name, entry in STRATEGIES.items() if any(f"{name}(" in plan for plan in PLANS)
}
OTHER_NAMES = tuple(
    "placement(2, modules=0:0+2:1+4:0)" if name == "placement" else entry.example or f"{name}(2)"
    for name, entry in STRATEGIES.items()
    if entry.doc_source not in LISTED_STRATEGIES
)
"""A plan of every system, and of every strategy that the plans above lack."""
OPTION_PLANS = ("solo", "data(2)", "zero(2, level=3)", "pipeline(2)", "pipeline(2) * data(2)")
"""For options, and for ``Trainer``."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "clip, check gradients": {"clip_norm": 0.5, "check_finite": "gradients", "nonfinite": "skip"}
}

Batch: TypeAlias = tuple[Tensor, Tensor]
Outcome: TypeAlias = tuple[list[float], dict[str, Tensor]]
"""The losses of a few steps, and the trained weights and buffers in host memory."""
Observer: TypeAlias = Callable[[Callable[[], float]], float]
"""Takes the last step: it gets a function that does, and returns its loss."""


class SurveyCase(NamedTuple):
    """One line of the survey.

    Args:
        model: a key of ``BUILDERS``.
        plan: of ``parallelize``, with its passes.
        options: a key of ``OPTIONS``; "trainer" for ``Trainer`` in place of ``parallelize``; empty for neither.
    """

    model: str
    plan: str
    options: str = ""

    def __str__(self) -> str:
        return " | ".join(filter(None, self))


class MixtureOfExperts(nn.Module):
    """A mixture of experts: each sample goes to the two that its gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, 4)``."""
        chances = self.gate(x).softmax(-1)
        chosen = torch.zeros_like(chances).scatter(-1, chances.topk(2).indices, 1.0)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        result: Tensor = self.head(x + (outputs * (chances * chosen)[..., None]).sum(1))
        return result


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12), nn.Linear(12, 4))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(),
        nn.Linear(8, 4),
    )  # fmt: skip


def _normalized() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 12), nn.Linear(12, 4)
    )


def _embedding() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(16, 8, sparse=True), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))


class SurveyModel(NamedTuple):
    """How a model is made, and the shape of its inputs' samples if they are not whole numbers."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = ()


BUILDERS = {
    "mlp": SurveyModel(_mlp, (8,)),
    "gpt": SurveyModel(
        partial(GPT, GPTShape(num_layers=1, width=8, head_dim=4, context=4, num_tokens=11, dropout=0.2))
    ),
    "cnn": SurveyModel(_cnn, (1, 8, 8)),
    "sync_batch_norm": SurveyModel(_normalized, (8,)),
    "embedding": SurveyModel(_embedding),
    "experts": SurveyModel(MixtureOfExperts, (8,)),
}
CASES = (
    *(SurveyCase("mlp", plan) for plan in dict.fromkeys(PLANS + OTHER_NAMES)),
    *(SurveyCase(name, plan) for name in BUILDERS if name != "mlp" for plan in MODEL_PLANS),
    *(SurveyCase("mlp", plan, options) for options in (*OPTIONS, "trainer") for plan in OPTION_PLANS),
)


def build(name: str) -> nn.Module:
    """Return a model in float64, always the same."""
    torch.manual_seed(0)
    return BUILDERS[name].make().double()


def batches(name: str) -> Iterator[Batch]:
    """Yield the inputs and targets of every step, in host memory."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS + 2):
        if name == "gpt":
            tokens = torch.randint(0, 11, (SAMPLES, 5), generator=draw)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            continue
        if name == "embedding":
            inputs = torch.randint(0, 16, (SAMPLES, 5), generator=draw)
        else:
            inputs = torch.randn(SAMPLES, *BUILDERS[name].shape, generator=draw, dtype=torch.float64)
        yield inputs, torch.randint(0, 4, (SAMPLES,), generator=draw)


def make_optimizer(name: str, plan: str) -> Callable[[Iterable[nn.Parameter]], optim.Optimizer]:
    """Return a factory of the optimizer that the model or the plan needs."""
    if "downpour" in plan:
        return partial(optim.Adagrad, lr=0.1)
    return partial(optim.SGD, lr=0.1) if name == "embedding" or "easgd" in plan else partial(optim.AdamW, lr=1e-2)


def make_step(name: str, plan: str, device: str | Accelerator, **options: Any) -> tuple[TrainStep, nn.Module]:  # noqa: ANN401 - of parallelize
    """Return a step of the survey, and its model."""
    model, (text, *passes) = build(name), plan.split(" + ")
    optimizer = make_optimizer(name, plan)
    options = {"batch_norm": "sync" if name == "sync_batch_norm" else "deferred", "device": device, **options}
    if passes:
        options["passes"] = tuple(passes)
    loss = sequence_loss if name == "gpt" else F.cross_entropy
    return parallelize(model, optimizer(model.parameters()), loss, strategy=text, timeout_s=20.0, **options), model


def train(
    case: SurveyCase,
    device: str | Accelerator,
    *,
    num_steps: int = STEPS,
    observe_last: Observer = lambda step: step(),
    environment: RankEnvironment | None = None,
) -> Outcome:
    """Train a case on a device.

    Args:
        case: the model, and how it is trained.
        device: where.
        num_steps: how many; those of ``Trainer`` are fixed.
        observe_last: takes the last step.
        environment: of this rank, if the ranks are in several processes; not for ``Trainer``.
    """
    if case.options == "trainer":
        return _fit(case, device)
    step, model = make_step(case.model, case.plan, device, environment=environment, **OPTIONS.get(case.options, {}))
    with step:
        *before, last = (batch for _, batch in zip(range(num_steps), batches(case.model), strict=False))
        losses = [step(*batch) for batch in before]
        losses.append(observe_last(lambda: step(*last)))
    return losses, _values_of(model)


def _fit(case: SurveyCase, device: str | Accelerator) -> Outcome:
    """Train with ``Trainer`` on a dataset in host memory."""
    model, parts = build(case.model), list(batches(case.model))
    dataset = TensorDataset(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    optimizer = make_optimizer(case.model, case.plan)
    trainer = Trainer(
        model, loss=F.cross_entropy, optimizer=optimizer, strategy=case.plan, device=device, progress="off"
    )
    with trainer:
        history = trainer.fit(dataset, batch_size=2 * SAMPLES, epochs=1)
    return list(history.losses), _values_of(model)


def _values_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().cpu() for key, value in model.state_dict().items()}


def largest_difference(actual: Outcome, expected: Outcome) -> float:
    """Return the largest difference of a loss, or of a trained value; nan if one is nan and the other is not.

    Example:
        >>> largest_difference(
        ...     ([1.0, math.nan], {"w": torch.ones(2)}), ([1.0, math.nan], {"w": torch.tensor([1.0, 1.5])})
        ... )
        0.5
    """
    (losses, values), (expected_losses, expected_values) = actual, expected
    found = [
        abs(loss - other)
        for loss, other in zip(losses, expected_losses, strict=True)
        if not (math.isnan(loss) and math.isnan(other))  # a pipeline without a flush has no loss at first
    ]
    if values.keys() != expected_values.keys():
        return math.nan
    found += [float((values[name].double() - other.double()).abs().max()) for name, other in expected_values.items()]
    return math.nan if any(math.isnan(value) for value in found) else max(found)
