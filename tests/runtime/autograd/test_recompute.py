"""What a rank saves to recompute a forward, and the errors when the second result differs."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.runtime.autograd.recompute import sample_values, samples_match
from tests.mistakes.documented import documented_messages
from tests.runtime.local_ranks import WIDTH, build_local_ranks, chain, make_batch, observe_calls

PAGE = "Recomputation with another result"


class InPlaceScale(nn.Module):
    """Changes its input in place."""

    def forward(self, x):
        return x.mul_(0.5)


class PythonNoise(nn.Module):
    """Draws from Python's own generator, which recomputation does not restore."""

    def forward(self, x):
        return x * random.random()


class RunningNorm(nn.Module):
    """Divides by a running norm that every forward changes first."""

    norm: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.ones(()).double())

    def forward(self, x):
        with torch.no_grad():
            self.norm.mul_(0.9).add_(0.1 * torch.linalg.vector_norm(x))
        return x / self.norm


def layers(*modules):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *modules, nn.Linear(WIDTH, WIDTH)).double()


def losses(model, plan, passes, **options):
    with build_local_ranks(plan, num_microbatches=2, model=model, passes=passes, **options) as local_ranks:
        step_losses = [
            local_ranks.step(number, make_batch(local_ranks.global_num_microbatches)).loss for number in range(3)
        ]
        local_ranks.export_weights()
        return step_losses


def test_a_layer_that_changes_its_input_in_place_is_an_error():
    model = nn.Sequential(InPlaceScale(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    with pytest.raises(DataError) as caught:
        losses(model, "pipeline(2, schedule=gpipe, recompute=always)", ())
    assert documented_messages(PAGE)[1] == f"DataError: {caught.value}"


def test_an_in_place_change_by_a_later_block_is_found_in_recomputation():
    with build_local_ranks("solo", passes=("recompute",)) as local_ranks:
        executor = local_ranks.ranks[0].interpreter.executor
        executor.begin_step(make_batch(1), executor.loss_factors)
        executor.loss_factors.sample_fractions[0] = 1.0
        executor.recompute_store.begin_step(local_ranks.ranks[0].interpreter.recompute_sets["step"])
        executor.forward(0, 3, 0)
        executor.recompute_store.saved[1, 0].leaves[0].data.add_(1)
        executor.recompute_store.saved[1, 0].leaf_versions[0] -= 1
        with pytest.raises(DataError, match="was changed in place"):
            executor.recompute(1, 1, 0)


def test_random_numbers_from_python_are_found_by_the_results():
    with (
        pytest.warns(
            UserWarning, match=r"\(PythonNoise\) come from a generator of Python or numpy, which are not keyed"
        ),
        pytest.raises(DataError) as caught,
    ):
        losses(layers(PythonNoise()), "solo", ("recompute",))
    assert documented_messages(PAGE)[0] == f"DataError: {caught.value}"


def test_recomputation_reads_a_changed_buffer_as_it_was_and_does_not_change_it():
    plain, again = layers(RunningNorm()), layers(RunningNorm())
    accept = {"cross_sample": "accept"}  # two microbatches move the norm twice
    assert losses(plain, "solo", (), **accept) == losses(again, "solo", ("recompute",), **accept)
    assert torch.equal(plain[1].norm, again[1].norm)
    assert torch.equal(plain[0].weight, again[0].weight)


def test_a_recomputed_forward_saves_only_the_inputs_of_its_stage():
    def sizes(rank):
        executor = rank.interpreter.executor
        return len(executor.saved), len(executor.recompute_store.saved), len(executor.values)

    with build_local_ranks(
        "pipeline(2, schedule=gpipe, recompute=always) * data(2)", num_microbatches=3, passes=("overlap",)
    ) as local_ranks:
        observed = observe_calls(local_ranks, sizes)
    for rank in range(4):
        num_saved, num_recomputable, values = map(max, zip(*observed[rank], strict=True))
        assert num_saved <= 2  # one per block of the stage, or one for both
        assert num_recomputable >= 3
        assert values <= 3 + 1
    with build_local_ranks("pipeline(2, schedule=gpipe)", num_microbatches=3) as local_ranks:
        assert max(num_saved for num_saved, _, _ in observe_calls(local_ranks, sizes)[0]) == 3


def test_replicas_that_normalize_together_do_not_recompute():
    model = layers(nn.SyncBatchNorm(WIDTH))
    message = "1 is a SyncBatchNorm, which replicas normalize together, and rank 0 recomputes"
    with pytest.raises(PlanError, match=message), build_local_ranks("data(2)", model=model, passes=("recompute",)):
        pass


def test_the_error_names_batch_norm_by_its_class():
    model = layers(nn.BatchNorm1d(WIDTH))
    message = r"1 is a BatchNorm1d under batch_norm='sync', which .*; drop batch_norm='sync', so that each"
    options = {"passes": ("recompute",), "batch_norm": "sync"}
    with pytest.raises(PlanError, match=message), build_local_ranks("data(2)", model=model, **options):
        pass


def test_samples_match_up_to_rounding():
    values = torch.linspace(-1, 1, 1000)
    assert sample_values(values).numel() <= 64
    assert samples_match(sample_values(values), sample_values(values * (1 + 1e-6)))
    assert not samples_match(sample_values(values), sample_values(F.dropout(values, 0.5)))
    assert samples_match(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not samples_match(torch.arange(3), torch.arange(3) + 1)


def test_evaluations_recompute_nothing():
    with cp.parallelize(chain(4), torch.optim.SGD, F.mse_loss, strategy="solo", passes=("recompute",)) as step:
        step(torch.ones(4, WIDTH).double(), torch.ones(4, WIDTH).double())
        calls = step.local_ranks.ranks[0].interpreter.forward_calls
        assert {type(call).__name__ for call, _, _ in calls} == {"ForwardRun"}


class DataDependentSign(nn.Module):
    """Depends on computed values, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else -y


def test_a_model_that_cannot_be_partitioned_is_not_recomputed():
    message = "recompute needs a model in blocks: .*; or omit the pass recompute"
    with (
        pytest.raises(PlanError, match=message),
        build_local_ranks("solo", model=DataDependentSign().double(), passes=("recompute",)),
    ):
        pass
    with build_local_ranks("solo", model=DataDependentSign().double()):
        pass
