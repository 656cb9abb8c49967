"""Weights that the rank of a process does not read: no memory between steps, and whole again where they come back."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.testing.parity import TOLERANCE
from counterpoint.training.between_steps.stale_weights import StaleGrads, StaleWeights, without_stale_reads
from counterpoint.training.ranks.process_memory import MIN_BYTES, ReleasedParameters, is_private_cpu_tensor
from tests.process.forked_ranks import run_forked
from tests.training.trainers import equal_bits, max_difference, params_of

WIDTH = 128
"""A weight of a layer is worth a mapping of its own in float64; a bias is not."""
WEIGHTS = ["0.weight", "2.weight"]
OPTIMIZER = partial(optim.SGD, lr=0.1)


def wide():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def batch(value=1.0):
    draw = torch.Generator().manual_seed(2)
    return [value * torch.randn(8, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)]


def begin(model, strategy="pipeline(2)"):
    return cp.parallelize(model, OPTIMIZER, nn.functional.mse_loss, strategy=strategy, num_microbatches=2)


def kinds(model):
    """Return of each weight whether it is zeros, nan or numbers."""
    with without_stale_reads():
        named = {name: param.detach() for name, param in model.named_parameters()}
    return ["zeros" if not named[name].any() else "nan" if named[name].isnan().all() else "numbers" for name in WEIGHTS]


def train():
    """Return what the weights were before, in and behind steps, and the parameters after each giving back."""
    model, seen, given = wide(), [], []
    with begin(model) as step:
        for _ in range(2):
            seen.append(kinds(model))
            step(*batch())
            seen.append(kinds(model))
            given.append(params_of(step.export_weights()))
        seen.append(kinds(model))
        step(*batch())
    return [*seen, kinds(model)], [*given, params_of(model)]


def fail():
    """Return the weights behind a failed second step, and what the error notes."""
    model, notes = wide(), []
    try:
        with begin(model) as step:
            step(*batch())
            step(*batch(torch.nan))
    except cp.DataError as error:
        notes = error.__notes__
    return kinds(model), notes


def measure():
    """Return whether a model that was evaluated, and never trained, is as it was."""
    model = wide()
    data = torch.utils.data.TensorDataset(*batch())
    with cp.Trainer(
        model, loss=nn.functional.mse_loss, optimizer=OPTIMIZER, strategy="pipeline(2)", progress="off"
    ) as one:
        one.evaluate(data)
    return equal_bits(params_of(model), params_of(wide()))


def keep():
    """Return the weights after a step where the ends are one, trained by both ranks, and the middle is frozen."""
    model = wide().append(nn.Linear(WIDTH, WIDTH).double())
    model[3].weight = model[0].weight
    model[2].requires_grad_(requires_grad=False)
    with begin(model) as step:
        step(*batch())
        return kinds(model)


def shard():
    """Return the weights before, between and after steps in which ranks train shards, and those given back."""
    model, seen = wide(), []
    with begin(model, "zero(2, level=3)") as step:
        for _ in range(3):
            seen.append(kinds(model))
            step(*batch())
    return seen, params_of(model)


class OwnLoss(nn.Sequential):
    """A model that computes its loss itself."""

    def forward(self, x):
        return super().forward(x).square().mean()


def check():
    """Return the weights after a step of ranks that train shards, whose model may have to run for a check."""
    model = OwnLoss(*wide())
    with cp.parallelize(
        model, OPTIMIZER, lambda output, _: output, strategy="zero(2, level=3)", num_microbatches=2
    ) as step:
        step(*batch())
        return kinds(model)


def tell():
    """Return all of these, in one start of the processes; the failing one ends their connection."""
    return train(), measure(), keep(), shard(), check(), fail()


@pytest.fixture(scope="module")
def results_by_rank():
    return run_forked(tell, ranks=2)


def alone():
    model, given = wide(), []
    with begin(model, "solo") as step:
        for _ in range(3):
            step(*batch())
            given.append(params_of(step.export_weights()))
    return given


@pytest.mark.long(quick=["1"])
@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_they_are_zeros_from_a_step_until_they_are_exported(results_by_rank, rank):
    (seen, _), *_ = results_by_rank[rank]
    between = ["zeros", "zeros"]
    between[rank] = "numbers"
    whole = ["numbers", "numbers"]
    assert seen == [whole, between, whole, between, whole, whole]


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_they_come_back_as_they_were_trained(results_by_rank, rank):
    (_, given), *_ = results_by_rank[rank]
    assert max(max_difference(mine, theirs) for mine, theirs in zip(given, alone(), strict=True)) <= TOLERANCE


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_was_only_measured_stays_as_it_was(results_by_rank, rank):
    assert results_by_rank[rank][1]


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_tied_ones_are_trained_in_flat_memory_and_frozen_ones_stay(results_by_rank, rank):
    assert results_by_rank[rank][2] == ["zeros", "numbers"]


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_train_shards_hold_no_whole_weights(results_by_rank, rank):
    """The model's own parameters had 4 bytes of each weight in every process, beside the shards."""
    seen, given = results_by_rank[rank][3]
    assert seen == [["numbers"] * 2, ["zeros"] * 2, ["zeros"] * 2]
    assert max_difference(given, alone()[-1]) <= TOLERANCE


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_computes_its_own_loss_keeps_its_weights_to_check_later_batches(results_by_rank, rank):
    assert results_by_rank[rank][4] == ["numbers"] * 2


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_run_leaves_nan_and_a_note(results_by_rank, rank):
    weights, notes = results_by_rank[rank][5]
    lost = WEIGHTS[1 - rank]
    assert weights[1 - rank] == "nan"
    assert weights[rank] == "numbers"
    assert any(
        note.startswith(f"{lost} of the model, which no rank of this process trains whole, are nan") for note in notes
    )


def large(**how):
    return nn.Parameter(torch.ones(MIN_BYTES // 4), **how)


def test_a_parameter_is_left_and_found_by_what_is_written_into_it():
    param = large()
    elsewhere = ReleasedParameters({"weight": param})
    assert param.all()
    elsewhere.release()
    assert not param.any()
    param.detach().fill_(2.0)
    elsewhere.poison()
    assert (param == 2.0).all()
    elsewhere.release()
    elsewhere.poison()
    assert param.isnan().all()


def test_they_become_nan_also_where_a_read_would_need_ranks_that_have_ended():
    """The trials of a planner end without an export: the first of them to be closed raised."""
    param = large()
    elsewhere = ReleasedParameters({"weight": param})
    grads = StaleGrads({"weight": param}, "pipeline(2)", dict, is_single_process=False)
    elsewhere.release()
    StaleWeights({"weight": param}, "pipeline(2)", None, grads).mark()
    elsewhere.poison()
    with without_stale_reads():
        assert param.isnan().all()


def try_plans():
    """Return the plans that were tried, and the loss of a step under the one that was taken."""
    with cp.parallelize(wide(), OPTIMIZER, nn.functional.mse_loss, strategy="auto(2)", num_measured_plans=2) as step:
        loss = step(*batch())
        assert step.local_ranks.choice is not None
        return [str(trial.plan) for trial in step.local_ranks.choice.trials], loss


@pytest.mark.long
@pytest.mark.process
def test_plans_of_which_ranks_have_parts_can_be_tried_in_several_processes():
    (plans, loss), other = run_forked(try_plans, ranks=2)
    assert any(plan.startswith(("pipeline", "tensor")) for plan in plans)
    assert other == (plans, loss)


def test_nothing_is_lost_that_was_never_left():
    param = large()
    ReleasedParameters({"weight": param}).poison()
    assert param.all()


STAY = {
    "small": lambda: nn.Parameter(torch.ones(MIN_BYTES // 4 - 1)),
    "a view": lambda: nn.Parameter(torch.ones(MIN_BYTES)[: MIN_BYTES // 4]),
    "strided": lambda: nn.Parameter(torch.ones(256, 256).t()),
    "shared": lambda: nn.Parameter(torch.ones(MIN_BYTES // 4).share_memory_()),
    "of a class of its own": lambda: type("Own", (nn.Parameter,), {})(torch.ones(MIN_BYTES // 4)),
}


@pytest.mark.parametrize("make", STAY.values(), ids=STAY)
def test_what_is_no_plain_memory_of_its_own_stays(make):
    assert is_private_cpu_tensor(large())
    assert not is_private_cpu_tensor(make())


def test_nothing_is_left_where_all_ranks_are_here():
    model = wide()
    with begin(model) as step:
        step(*batch())
        assert step.local_ranks.released_params.params == {}
