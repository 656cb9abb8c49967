"""Small models of every kind, and plans with every name, for the survey of a device."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.plan.registry import STRATEGIES

SAMPLES, STEPS = 4, 2
PLANS = (
    "solo",
    "data(2)",
    "data(2) + overlap",
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
    "tree(2)",
    "pipeline(2, schedule=gpipe)",
    "pipeline(2)",
    "pipeline(2) + recompute",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2)",
    "pipeline(2, schedule=zero_bubble)",
    "pipeline(2, schedule=pipedream)",
    "pipeline(2, schedule=pipedream_2bw)",
    "tensor(2)",
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
SYSTEMS = tuple(
    "placement(2, modules=0:0+2:1+4:0)" if name == "placement" else entry.example or f"{name}(2)"
    for name, entry in STRATEGIES.items()
    if not isinstance(entry.doc_source, type)
)


class Experts(nn.Module):
    """A mixture of experts: each sample goes to the two that its gate prefers."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        chosen = torch.zeros_like(chances).scatter(-1, chances.topk(2).indices, 1.0)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(x + (outputs * (chances * chosen)[..., None]).sum(1))


def _mlp():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12), nn.Linear(12, 4))


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(),
        nn.Linear(8, 4),
    )  # fmt: skip


def _normalized():
    return nn.Sequential(
        nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 12), nn.Linear(12, 4)
    )


def _embedding():
    return nn.Sequential(nn.EmbeddingBag(16, 8, sparse=True), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))


class Builder(NamedTuple):
    """How a model is made, and the shape of its inputs' samples if they are not whole numbers."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = ()


BUILDERS = {
    "mlp": Builder(_mlp, (8,)),
    "gpt": Builder(partial(GPT, GPTShape(num_layers=1, width=8, head_dim=4, context=4, num_tokens=11, dropout=0.2))),
    "cnn": Builder(_cnn, (1, 8, 8)),
    "sync_batch_norm": Builder(_normalized, (8,)),
    "embedding": Builder(_embedding),
    "experts": Builder(Experts, (8,)),
}


def build(name):
    """Return a model in float64, always the same."""
    torch.manual_seed(0)
    return BUILDERS[name].make().double()


def batches(name):
    """Return the inputs and targets of every step, in host memory."""
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


def make_optimizer(name, plan):
    """Return a factory of the optimizer that the model or the plan needs."""
    if "downpour" in plan:
        return partial(optim.Adagrad, lr=0.1)
    return partial(optim.SGD, lr=0.1) if name == "embedding" or "easgd" in plan else partial(optim.AdamW, lr=1e-2)


def parallelize(name, plan, device, **options):
    """Return a step of the survey, and its model."""
    model, (text, *passes) = build(name), plan.split(" + ")
    optimizer = make_optimizer(name, plan)
    options = {"batch_norm": "sync" if name == "sync_batch_norm" else "deferred", "device": device, **options}
    if passes:
        options["passes"] = tuple(passes)
    loss = sequence_loss if name == "gpt" else F.cross_entropy
    return cp.parallelize(model, optimizer(model.parameters()), loss, strategy=text, timeout_s=20.0, **options), model


def train(name, plan, device, **options):
    """Return the losses of a few steps, and the trained weights and buffers in host memory."""
    step, model = parallelize(name, plan, device, **options)
    with step:
        losses = [step(*batch) for _, batch in zip(range(STEPS), batches(name), strict=False)]
    return losses, {key: value.detach().cpu() for key, value in model.state_dict().items()}
