"""Running statistics that change once per batch: those of batch norm that sees the whole batch, under any plan."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.data.sampler import Sampler, split_batch
from counterpoint.fabric.local import LocalFabric
from counterpoint.plan.plan import Plan
from counterpoint.testing.parity_models import plan_for
from tests.process.forked_ranks import run_forked
from tests.references import batch_norm
from tests.training.trainers import build_seeded, equal_bits, make_generator, max_difference, state_of

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
PLANS = [
    "solo", "pipeline(2)", "pipeline(4)", "pipeline(2, schedule=gpipe)", "pipeline(2, schedule=zero_bubble)", "data(2)",
    "pipeline(2) * data(2)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2, replicas=(2,1))", "data(4)",
    "server(2)", "data(2, update=sharded) * data(2)", "pipeline(2, recompute=always)",
    "pipeline(2, recompute=except_last) * data(2)",
]  # fmt: skip


class Block(nn.Module):
    """Two convolutions beside a shortcut, each with a norm."""

    def __init__(self, before, behind):
        super().__init__()
        norm = nn.BatchNorm2d(behind, momentum=0.3)
        self.first = nn.Sequential(nn.Conv2d(before, behind, 3, padding=1, bias=False), norm, nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(behind, behind, 3, padding=1, bias=False), nn.BatchNorm2d(behind))
        self.shortcut = nn.Sequential(nn.Conv2d(before, behind, 1, bias=False), nn.BatchNorm2d(behind, affine=False))

    def forward(self, x):
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class Pool(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def resnet():
    """A small ResNet, as a chain of its blocks."""
    stem = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*stem, Block(4, 4), Block(4, 6), Pool(), nn.Linear(6, 3))


class Traced(nn.Module):
    """The same, but no chain."""

    def __init__(self):
        super().__init__()
        self.layers = resnet()

    def forward(self, x):
        return self.layers(x)


def chain(*norms):
    """Return a chain around norms of four channels."""
    layers = [layer for norm in norms for layer in (nn.Conv2d(4, 4, 1, bias=False), norm, nn.Tanh())]
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), *layers, nn.Flatten(), nn.Linear(16, 3))


def kinds():
    """Norms that keep a mean over all batches, nothing, and what has no weight."""
    return chain(
        nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4, affine=False)
    )


def frozen():
    model = chain(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    model[2].eval()
    return model


class Again(nn.Module):
    """Keeps nothing of its forward but its inputs."""

    def __init__(self):
        super().__init__()
        self.inner = kinds()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def batches():
    """Of four microbatches some are smaller than others, and in the last batch one is empty."""
    random = make_generator()
    inputs = [torch.randn(count, 1, 4, 4, generator=random, dtype=torch.float64) for count in (12, 7, 5, 10, 3) * 2]
    return [(x, torch.randint(0, 3, (len(x),), generator=random)) for x in inputs]


def trained(build, strategy, *, num_micros=4, **options):
    model = build_seeded(build)
    plan = plan_for(strategy, num_micros)
    with cp.parallelize(model, SGD, F.cross_entropy, **{"strategy": plan, "batch_norm": "deferred", **options}) as step:
        losses = [step(x, y) for x, y in batches()]
    return {**state_of(model), "losses": torch.tensor(losses, dtype=torch.float64)}


def expected(build, *, num_micros=4):
    model = build_seeded(build)
    microbatches = [[(x[a:b], y[a:b]) for a, b in split_batch(len(x), num_micros)] for x, y in batches()]
    losses = batch_norm.train(model, batches=microbatches, loss=F.cross_entropy, optimizer=SGD)
    return {**state_of(model), "losses": torch.tensor(losses, dtype=torch.float64)}


@pytest.mark.long(quick=["pipeline(2, replicas=(2,1))"])
@pytest.mark.parametrize("strategy", PLANS)
def test_a_resnet_has_the_running_statistics_of_whole_batches(strategy):
    assert max_difference(trained(resnet, strategy), expected(resnet)) <= 1e-12


@pytest.mark.long
def test_so_has_one_that_was_traced():
    assert max_difference(trained(Traced, "pipeline(2) * data(2)"), expected(Traced)) <= 1e-12


@pytest.mark.long(quick=["pipeline(2) * data(2)-frozen"])
@pytest.mark.parametrize("build", [kinds, frozen])
@pytest.mark.parametrize("strategy", ["solo", "pipeline(2) * data(2)"])
def test_norms_of_any_kind_change_once_per_batch(strategy, build):
    assert max_difference(trained(build, strategy), expected(build)) <= 1e-12


@pytest.mark.long(quick=["data(2)-microbatch"])
@pytest.mark.parametrize("rule", ["deferred", "microbatch"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_model_that_computes_blocks_again_in_the_backward_takes_nothing_in_twice(strategy, rule):
    again, once = (trained(build, strategy, batch_norm=rule) for build in (Again, kinds))
    assert max_difference({name.removeprefix("inner."): value for name, value in again.items()}, once) <= 1e-12


def test_the_step_says_what_was_computed_again():
    """What a recomputation of blocks asks for: nothing of it is taken in."""
    model = build_seeded(kinds)
    with cp.parallelize(
        model, SGD, F.cross_entropy, strategy="solo", num_microbatches=2, batch_norm="deferred"
    ) as step:
        step(*batches()[0])
        compute = step.local_ranks.ranks[0].interpreter.executor
        before = {name: buffer.clone() for name, buffer in compute.store.buffers.items()}
        with compute.function_mode(0, 0, is_recompute=True):
            model.train()(batches()[0][0])
        assert compute.batch_norm is not None
        compute.batch_norm.start_gather({0})
        compute.batch_norm.commit(is_applied=True)
        assert all(torch.equal(compute.store.buffers[name], value) for name, value in before.items())


def test_batch_statistics_are_sent_before_the_step_reports(monkeypatch):
    """So that no rank waits for several rounds of messages."""
    labels, start = [], LocalFabric.all_gather

    def noted(fabric, label, *rest):
        labels.append((fabric.rank, label))
        return start(fabric, label, *rest)

    monkeypatch.setattr(LocalFabric, "all_gather", noted)
    trained(resnet, "data(2)")
    own = [label for rank, label in labels if rank == 1 and label in {"running statistics", "commit"}]
    assert own[:4] == ["running statistics", "commit"] * 2


def test_a_step_that_fails_after_its_commit_leaves_the_statistics_unchanged():
    model = build_seeded(kinds)
    with cp.parallelize(model, SGD, F.cross_entropy, strategy="data(2)", batch_norm="deferred") as step:
        step(*batches()[0])
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with pytest.raises(cp.DataError, match="loss"):
            step(batches()[0][0] * torch.nan, batches()[0][1])
        buffers = step.local_ranks.ranks[0].interpreter.executor.store.buffers
        assert all(torch.equal(buffers[name], value) for name, value in before.items())


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", ["solo", "pipeline(2)", "data(2)"])
def test_a_fit_of_several_epochs_has_them_too(strategy):
    data = TensorDataset(*map(torch.cat, zip(*batches()[:2], strict=True)))
    model, plain = build_seeded(resnet), build_seeded(resnet)
    options: dict[str, Any] = {"strategy": plan_for(strategy, 4), "batch_norm": "deferred", "progress": "off"}
    with cp.Trainer(model, loss=F.cross_entropy, optimizer=SGD, **options) as trainer:
        trainer.fit(data, batch_size=12, epochs=2)
    batch_positions = [Sampler(19, 12, 0).batch(epoch, number) for epoch in range(2) for number in range(2)]
    given = [[data[list(one[a:b])] for a, b in split_batch(len(one), 4)] for one in batch_positions]
    batch_norm.train(plain, batches=given, loss=F.cross_entropy, optimizer=SGD)
    assert max_difference(state_of(model), state_of(plain)) <= 1e-12


@pytest.mark.parametrize("num_micros", [1, 4])
def test_a_skipped_step_does_not_change_running_statistics(num_micros):
    (x, y), model = batches()[0], build_seeded(resnet)
    options: dict[str, Any] = {"num_microbatches": num_micros, "batch_norm": "deferred", "nonfinite": "skip"}
    with cp.parallelize(model, SGD, F.cross_entropy, strategy="pipeline(2)", **options) as step:
        step(x, y)
        before = state_of(step.export_weights())
        step(x * float("nan"), y)
    assert equal_bits(state_of(model), before)


def stream(strategy, **options):
    """Return the running statistics of what never learns: they depend on nothing but the batches."""
    still, model = partial(optim.SGD, lr=0.0), build_seeded(resnet)
    with cp.parallelize(model, still, F.cross_entropy, strategy=strategy, batch_norm="deferred", **options) as step:
        for x, y in batches():
            step(x, y)
    return state_of(model)


def test_a_stream_defers_to_the_update_of_a_stage():
    result, model = stream("pipedream_2bw(2)", num_microbatches=4), build_seeded(resnet)
    microbatches = [[(x[a:b], y[a:b]) for a, b in split_batch(len(x), 4)] for x, y in batches()]
    batch_norm.train(model, batches=microbatches, loss=F.cross_entropy, optimizer=partial(optim.SGD, lr=0.0))
    assert max_difference(result, state_of(model)) <= 1e-12


def test_replicas_that_train_apart_defer_apart_and_have_their_mean():
    result, models = stream("data(2, sync_every=2)", num_microbatches=2), [build_seeded(resnet) for _ in range(2)]
    for at, model in enumerate(models):
        microbatches = [
            [(x[a:b], y[a:b]) for a, b in split_batch(len(x), 4)[2 * at : 2 * at + 2]] for x, y in batches()
        ]
        batch_norm.train(model, batches=microbatches, loss=F.cross_entropy, optimizer=partial(optim.SGD, lr=0.0))
    states = [state_of(model) for model in models]
    assert (
        max_difference(result, {name: (states[0][name] + states[1][name]) / 2 for name in result if "running" in name})
        <= 1e-12
    )


@pytest.mark.parametrize(("strategy", "build"), [("data(4)", resnet), ("solo", resnet), ("data(2)", Traced)])
def test_norms_that_do_not_see_the_whole_batch_are_refused_where_that_is_an_error(strategy, build):
    refusal = (
        r"^BatchNorm2d '(layers\.)?1' normalizes microbatches of 3 samples, 4 to a batch under .*, which batch_norm="
    )
    with pytest.raises(cp.PlanError, match=refusal):
        trained(build, strategy, batch_norm="error")


def test_norms_that_see_the_whole_batch_are_not():
    """A replica of SyncBatchNorm does, and so does one rank with one microbatch."""
    result = []
    for strategy, build in (("data(2)", nn.SyncBatchNorm.convert_sync_batchnorm), ("solo", lambda model: model)):
        model = build(build_seeded(resnet))
        plan = replace(Plan.parse(strategy), num_microbatches=1)
        with cp.parallelize(model, SGD, F.cross_entropy, strategy=plan, batch_norm="error") as step:
            step(*batches()[0])
        result.append(state_of(model))
    assert max_difference(*result) <= 1e-12


def test_a_rule_that_is_none_is_refused():
    with pytest.raises(cp.PlanError, match="batch_norm='later' is not one of deferred, microbatch, sync, error"):
        trained(resnet, "solo", batch_norm="later")


@pytest.mark.long
@pytest.mark.process
def test_processes_have_them_too():
    result = run_forked(on_processes, ranks=2, threads_per_rank=1)
    assert all(max_difference(mine, expected(resnet)) <= 1e-12 for states in result for mine in states)


def on_processes():
    return [trained(resnet, strategy) for strategy in ("pipeline(2)", "data(2)", "zero(2, level=2)")]
