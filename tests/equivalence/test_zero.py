"""ZeRO of every level, with every option, trains every kind of model to the weights and losses of a plain loop."""

import warnings
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.testing.parity_models import ParityModel, make_parity_model, plan_for
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.training.ranks import run_compiler
from tests.process.forked_ranks import run_forked
from tests.training.trainers import build_seeded, max_difference

ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
WIDTH, NUM_SAMPLES = 6, (12, 12, 7, 12)


class Adapter(nn.Module):
    """A frozen linear layer, and a product of low rank that is trained."""

    def __init__(self, num_outputs):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, num_outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, num_outputs, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Experts(nn.Module):
    """Send each sample to the expert that its first feature names: the first two have half a batch each, others none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        chosen, output = (x[:, 0] > 0).long(), x.clone()
        for number, expert in enumerate(self.experts):
            if (rows := (chosen == number).nonzero().flatten()).numel():
                output = output.index_add(0, rows, expert(x[rows]))
        return output


class Branches(nn.Module):
    """A forward that depends on values, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden.tanh() if hidden.isfinite().all() else -hidden)


def dense_batches():
    """Return batches whose first half has a negative first feature, so that ranks use different experts."""
    draw, result = torch.Generator().manual_seed(4), []
    for length in NUM_SAMPLES:
        inputs = torch.randn(length, WIDTH, generator=draw, dtype=torch.float64)
        inputs[:, 0] = inputs[:, 0].abs() * torch.where(torch.arange(length) < length // 2, -1, 1)
        result.append((inputs, torch.randn(length, 3, generator=draw, dtype=torch.float64)))
    return tuple(result)


def token_batches(sizes):
    draw = torch.Generator().manual_seed(4)
    tokens = [torch.randint(0, 11, (samples, length + 1), generator=draw) for samples, length in sizes]
    return tuple((one[:, :-1], one[:, 1:]) for one in tokens)


def gpt():
    return GPT(GPTShape(num_layers=2, width=8, head_dim=4, context=8, num_tokens=11, dropout=0.0))


BUILDERS = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    "lora": lambda: nn.Sequential(Adapter(WIDTH), nn.Tanh(), Adapter(3)),
    "experts": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 3)),
    "untraceable": Branches,
    "gpt": gpt,
    "lengths": gpt,
}
TOKENS = {"gpt": [(12, 8)] * 4, "lengths": [(12, 5), (12, 8), (7, 3), (12, 1)]}
MODELS = (*BUILDERS, "cnn")
LEVELS = {
    "1": "level=1",
    "2": "level=2",
    "3": "level=3",
    "3 whole": "level=3, persistence_threshold=60",
    "3 kept": "level=3, reshard_after_forward=off",
    "3 kept whole": "level=3, reshard_after_forward=off, persistence_threshold=60",
}
LAYOUTS = {
    "zero": "zero(2, {})",
    "inside": "zero(2, {}) * data(2)",
    "outside": "data(2) * zero(2, {})",
    "thirds": "zero(3, {})",
}
"""The second and the third shard among neighbours, or across; shards of three ranks are not equally long."""
PASSES = {"": (), "prefetch": ("overlap", "prefetch"), "prefetch 2": ("overlap", "prefetch:2")}
PLACES = {
    "memory": (),
    "disk": ("offload:state=disk",),
    "host": ("offload:state=host",),
    "weights": ("offload:params=disk",),
    "all": ("offload:params=disk", "offload:state=disk"),
}
"""Of optimizer state and of weights; the latter are offloaded where all of them are gathered for each use."""


@pytest.fixture(name="small_chunks", autouse=True)
def use_small_chunks(monkeypatch):
    """Cut state of these small models into several chunks."""
    monkeypatch.setattr(run_compiler, "OFFLOAD_CHUNK_BYTES", 256)


def make_case(name):
    """Return a model with its batches; that of the parity table for BatchNorm."""
    if name == "cnn":
        return make_parity_model(name)
    if name in TOKENS:
        return ParityModel(name, partial(build_seeded, BUILDERS[name]), token_batches(TOKENS[name]), sequence_loss)
    return ParityModel(name, partial(build_seeded, BUILDERS[name]), dense_batches(), F.mse_loss)


def train(name, plan, **options):
    """Return the losses of a few steps, and what the model is afterwards."""
    case = make_case(name)
    model = case.build()
    settings = {"unused_parameters": "skip", "cross_sample": "accept", "batch_norm": "deferred", **options}
    with cp.parallelize(model, ADAMW(model.parameters()), case.loss, strategy=plan, **settings) as step:
        losses = [float(step(inputs, targets)) for inputs, targets in case.batches]
        step.export_weights()
    return losses, {key: value.detach().cpu().double() for key, value in model.state_dict().items()}


@cache
def plain_loop(name):
    """Return the same of plain torch; of one rank where microbatches have running statistics."""
    case = make_case(name)
    if name == "cnn":
        return train(name, plan_for("solo", 12))
    model = case.build()
    optimizer, losses = ADAMW(model.parameters()), []
    for inputs, targets in case.batches:
        optimizer.zero_grad()
        loss = case.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def train_with(name, strategy, passes=(), place="memory", folder=None):
    """Train with these passes, and optimizer state and weights in a place."""
    plan = plan_for(strategy, 12)
    options = {"device": StandInAccelerator()} if place == "host" else {"offload_folder": folder}
    return train(name, replace(plan, passes=(*passes, *PLACES[place])), **options)


def check(name, losses, weights, names=None):
    """Check that both are those of the plain loop."""
    expected_losses, expected = plain_loop(name)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(weights, expected, names) <= 1e-12


CASES = [
    pytest.param(level, layout, passes, place, id=f"{level}-{layout}-{passes or 'blocking'}-{place}")
    for level, layout, passes, place in product(LEVELS, LAYOUTS, PASSES, PLACES)
    if (level.startswith("3") or not passes)  # below there is nothing to prefetch
    and (place == "memory" or layout in ("zero", "inside") or (place, layout) == ("weights", "thirds"))
    and (place not in {"weights", "all"} or level in {"3", "3 kept"})
]
QUICK = [
    "mlp-1-zero-blocking-disk", "mlp-3 kept-inside-prefetch-memory", "lora-3 whole-zero-prefetch-disk",
    "experts-2-zero-blocking-memory", "experts-3 kept whole-outside-prefetch-memory",
    "untraceable-3-inside-prefetch-memory", "gpt-3 kept whole-zero-prefetch-host", "lengths-3-zero-prefetch-memory",
    "cnn-3-inside-blocking-disk", "gpt-3-zero-prefetch 2-memory", "experts-3 whole-outside-prefetch 2-memory",
    "mlp-3-thirds-prefetch-weights", "gpt-3-inside-blocking-weights", "lora-3 kept-zero-prefetch-all",
]  # fmt: skip
PROCESSES = {
    2: [("1", "zero", "", "disk"), ("2", "zero", "", "memory"), ("3", "zero", "prefetch", "disk"),
        ("3 kept whole", "zero", "prefetch", "memory"), ("3", "zero", "prefetch", "all")],
    3: [("2", "thirds", "", "memory"), ("3 whole", "thirds", "prefetch", "memory"),
        ("3", "thirds", "prefetch 2", "memory"), ("3", "thirds", "", "weights")],
    4: [("1", "inside", "", "memory"), ("3 kept", "inside", "prefetch", "memory"), ("2", "outside", "", "memory"),
        ("3 whole", "outside", "prefetch", "memory")],
}  # fmt: skip


@pytest.mark.long(quick=QUICK)
@pytest.mark.filterwarnings("ignore:.* gathers weights block by block:UserWarning")  # of the untraceable model
@pytest.mark.parametrize(("level", "layout", "passes", "place"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_every_option_of_every_level_ends_where_plain_torch_ends(name, level, layout, passes, place, tmp_path):
    losses, weights = train_with(name, LAYOUTS[layout].format(LEVELS[level]), PASSES[passes], place, tmp_path)
    check(name, losses, weights)


@pytest.mark.parametrize("strategy", ["zero(2, level=2)", "zero(2, level=3)"])
def test_experts_that_no_rank_activates_are_an_error_unless_zeros_are_asked_for(strategy):
    """With zeros, weight decay moves them, as it moves those that plain torch gives a gradient of zeros."""
    with pytest.raises(cp.DataError, match=r"no gradient reached 1\.experts\.2\.weight.* unused_parameters='skip'"):
        train("experts", plan_for(strategy, 4), unused_parameters="error")
    losses, weights = train("experts", plan_for(strategy, 4), unused_parameters="zero")
    check(
        "experts",
        losses,
        weights,
        names=[key for key in weights if ".experts.3" not in key and ".experts.2" not in key],
    )
    start, rate = make_case("experts").build().state_dict()["1.experts.3.weight"], (1 - 1e-2 * 0.1) ** len(NUM_SAMPLES)
    assert max_difference({"": weights["1.experts.3.weight"]}, {"": start * rate}) <= 1e-12


def train_all(cases, folder):
    """Return, as one rank, what becomes of each case."""
    warnings.simplefilter("ignore")
    results = []
    for name, level, layout, passes, place in cases:
        strategy = LAYOUTS[layout].format(LEVELS[level])
        losses, weights = train_with(name, strategy, PASSES[passes], place, folder)
        results.append([losses, weights])
    return results


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("num_ranks", PROCESSES)
@pytest.mark.parametrize("name", MODELS)
def test_real_processes_end_there_too(name, num_ranks, tmp_path):
    cases = [(name, *case) for case in PROCESSES[num_ranks]]
    for results in run_forked(train_all, ranks=num_ranks, args=[cases, str(tmp_path)]):
        assert len(results) == len(cases), results  # of a rank that failed, its error
        for losses, weights in results:
            check(name, losses, weights)
