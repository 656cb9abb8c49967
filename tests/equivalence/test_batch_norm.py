"""SyncBatchNorm in a plan: replicas normalize together, and come to what BatchNorm comes to on the global batch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.launchers import launch
from counterpoint.program.text import parse_program
from counterpoint.runtime.batch_norm.sync import SyncBatchNormModule, require_no_deadlock
from tests.training.trainers import build_seeded, make_generator, max_difference, state_of

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
PLANS = ["data(2)", "data(4)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2) * data(2)",
         "pipeline(2) * zero(2, level=1)", "data(2, update=sharded) * data(2)"]  # fmt: skip
OF_GRAPHS = ["data(4)", "zero(2, level=3)", "pipeline(2) * data(2)", "tensor(2) * data(2)"]


class Whole(nn.Module):
    """Its branches are not a chain; two norms, one of which has no weight of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other, self.head = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)

    def forward(self, x):
        x = F.tanh(self.norm(self.first(x))).flatten(1)
        return self.head(self.other(self.right(F.tanh(self.left(x)))) + x)


def chain():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 8), nn.Tanh(),
        nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


class Again(nn.Module):
    """Keeps nothing of its forward but its inputs."""

    def __init__(self):
        super().__init__()
        self.inner = chain()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def batches(build):
    """What cannot be traced for a lone sample has none on two replicas."""
    random = make_generator()
    lengths = (12, 7, 5 if build is Whole else 3, 12)
    inputs = [torch.randn(length, 2, 4, generator=random, dtype=torch.float64) for length in lengths]
    return [(x, torch.randint(0, 3, (len(x),), generator=random)) for x in inputs]


def trained(build, strategy, *, convert=True, num_batches=4, **options):
    """Return the state and the losses after a few uneven batches."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_seeded(build)) if convert else build_seeded(build)
    given = {"strategy": strategy, **({"num_microbatches": 1} if isinstance(strategy, str) else {}), **options}
    with cp.parallelize(model, SGD, F.cross_entropy, **given) as step:
        losses = [step(x, y) for x, y in batches(build)[:num_batches]]
    return {**state_of(model), "losses": torch.tensor(losses, dtype=torch.float64)}


def alone(build):
    """Return what plain BatchNorm comes to in a loop of torch."""
    model = build_seeded(build)
    optimizer, losses = SGD(model.parameters()), []
    for x, y in batches(build):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {**state_of(model), "losses": torch.tensor(losses, dtype=torch.float64)}


@pytest.mark.long(quick=["zero(2, level=1)-chain"])
@pytest.mark.parametrize(
    ("strategy", "build"), [*((one, chain) for one in PLANS), *((one, Whole) for one in OF_GRAPHS)]
)
def test_replicas_normalize_as_the_global_batch_does(strategy, build):
    """The chain's third batch has 3 samples: one of four replicas has none, and still gets the statistics."""
    assert max_difference(trained(build, strategy), alone(build)) <= 1e-12


@pytest.mark.parametrize("strategy", ["data(4)", "pipeline(2) * data(2)"])
def test_one_option_has_every_norm_do_so(strategy):
    """In the third batch a replica has no sample."""
    result = trained(chain, strategy, convert=False, batch_norm="sync")
    assert max_difference(result, alone(chain)) <= 1e-12


@pytest.mark.parametrize("convert", [True, False])
def test_running_statistics_of_several_microbatches_are_those_of_the_whole_batch(convert):
    """Each is normalized with that of the other replica; what is kept is what one call on everything would see."""
    with pytest.warns(
        UserWarning, match=r"^\w*BatchNorm\w* '1' normalizes .* not the microbatches that one runs after"
    ):
        result = trained(chain, "data(2)", convert=convert, num_batches=1, num_microbatches=2, batch_norm="sync")
    x, model = batches(chain)[0][0], build_seeded(chain)
    model[:2](x)
    assert max_difference(result, {f"1.{name}": value for name, value in model[1].named_buffers()}) <= 1e-12


def test_replicas_without_one_copy_normalize_together_too():
    assert max_difference(trained(chain, "data(2)", share_params_on_host=False), alone(chain)) <= 1e-12


def test_replicas_keep_equal_running_statistics():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_seeded(chain))
    with cp.parallelize(model, SGD, F.cross_entropy, strategy="data(4)") as step:
        for x, y in batches(chain):
            step(x, y)
        stores = [rank.interpreter.store.buffers for rank in step.local_ranks.ranks.values()]
    assert all(torch.equal(stores[0][name], other[name]) for other in stores[1:] for name in other)


def test_each_microbatch_is_normalized_with_those_that_other_replicas_run_concurrently():
    """Of four, replicas run 0 and 1, and 2 and 3: 0 is normalized with 2, and 1 with 3."""
    x, y = batches(chain)[0]
    model, expected = nn.SyncBatchNorm.convert_sync_batchnorm(build_seeded(chain)), build_seeded(chain)
    options: dict[str, Any] = {"strategy": "data(2)", "num_microbatches": 2, "batch_norm": "microbatch"}
    with cp.parallelize(model, SGD, F.cross_entropy, **options) as step:
        step(x, y)
    optimizer = SGD(expected.parameters())
    for rows in ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]):
        (F.cross_entropy(expected(x[rows]), y[rows]) / 2).backward()
    optimizer.step()
    assert max_difference(state_of(model), state_of(expected)) <= 1e-12


def test_replicas_that_train_apart_normalize_apart():
    plan, options = "data(2, sync_every=2)", {"num_batches": 2, "batch_norm": "deferred"}
    mine, plain = (trained(chain, plan, convert=convert, **options) for convert in (True, False))
    assert max_difference(mine, plain) <= 1e-12


def test_a_lone_sample_of_the_last_batch_is_normalized_with_the_others():
    x, y = batches(chain)[1]
    states = []
    for strategy, build in (("data(2)", nn.SyncBatchNorm.convert_sync_batchnorm), ("solo", lambda model: model)):
        model = build(build_seeded(chain))
        trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=SGD, strategy=strategy, num_microbatches=1)
        trainer.fit(TensorDataset(x, y), batch_size=4)
        states.append(state_of(model))
    assert max_difference(*states) <= 1e-12


def test_a_block_that_is_computed_again_in_the_backward_is_normalized_together_again():
    """As torch's own, it counts the batch twice; its weights are those of a run that keeps everything."""
    again, kept = (trained(build, "data(2)", num_batches=2) for build in (Again, chain))
    again = {name.removeprefix("inner."): value for name, value in again.items()}
    assert (
        max_difference(again, kept, [name for name in kept if "running" not in name and "tracked" not in name]) <= 1e-12
    )


def test_replicas_that_would_wait_for_ever_are_refused():
    program = parse_program("F0.0 F0.2 B0.2 B0.0 commit@0,1 U0\nF0.1 B0.1 F0.3 B0.3 commit@0,1 U0")
    with pytest.raises(cp.PlanError, match=r"^norm is a SyncBatchNorm, in which replicas wait for each other, and in"):
        require_no_deadlock(program, [SyncBatchNormModule("norm", "norm.weight", ())])


def test_a_norm_that_cannot_be_distinguished_from_others_is_refused():
    norm = nn.SyncBatchNorm(6, affine=False, track_running_stats=False)
    with pytest.raises(cp.PlanError, match=r"^0 is a SyncBatchNorm with affine=False and track_running_stats=False,"):
        cp.parallelize(nn.Sequential(norm, nn.Linear(6, 3)), SGD, F.cross_entropy, strategy="data(2)")(
            torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
        )


@pytest.mark.long
@pytest.mark.process
def test_processes_normalize_as_the_global_batch_does():
    result = launch(on_processes, ranks=2)
    assert all(max_difference(mine, alone(chain)) <= 1e-12 for states in result for mine in states)


def on_processes():
    return [trained(chain, strategy) for strategy in ("data(2)", "zero(2, level=3)")]


def test_a_lone_replica_with_samples_keeps_up_those_without():
    layers = nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    x, y = batches(chain)[0]
    states = []
    for strategy, build in (("data(2)", nn.SyncBatchNorm.convert_sync_batchnorm), ("solo", lambda model: model)):
        model = build(build_seeded(lambda: nn.Sequential(*copy.deepcopy(layers))))
        trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=SGD, strategy=strategy, num_microbatches=1)
        trainer.fit(TensorDataset(x[:9], y[:9]), batch_size=4)
        states.append(state_of(model))
    assert max_difference(*states) <= 1e-12


@pytest.mark.parametrize("strategy", ["data(2)", "zero3(2)"])
def test_replicas_that_normalize_apart_are_not_silent_about_it(strategy):
    """Only several microbatches of one replica caused a notice; outputs and weights differ as much with one each."""
    with pytest.warns(UserWarning, match=r"^BatchNorm1d '1' normalizes microbatches of 6 samples, 2 to a batch under"):
        trained(chain, strategy, convert=False, num_batches=1)


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.first(self.norm(x)))).mean(1)


def test_a_module_that_is_called_twice_in_a_forward_is_not_silent_about_its_running_statistics():
    """They are updated once for both calls, where torch updates them twice; the weights are those of a plain loop."""
    with pytest.warns(UserWarning, match=r"^batch norm 'norm' is called several times in a forward; .* in every call"):
        found = trained(CalledTwice, "data(2)", convert=False, batch_norm="sync")
    expected = alone(CalledTwice)
    differing = {
        name for name in found if not torch.allclose(found[name].double(), expected[name].double(), atol=1e-12)
    }
    assert differing == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
