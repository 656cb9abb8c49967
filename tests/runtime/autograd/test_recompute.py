"""What a rank keeps to compute a forward again, and what it finds when the second time is another."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.runtime.autograd.recompute import sample_values, samples_match
from tests.mistakes.documented import documented_messages
from tests.runtime.local_ranks import WIDTH, build_team, chain, make_batch, observe_calls

PAGE = "Another result the second time"


class Scaled(nn.Module):
    """Changes what it is given."""

    def forward(self, x):
        return x.mul_(0.5)


class Noisy(nn.Module):
    """Draws from Python's own generator, which nobody restores."""

    def forward(self, x):
        return x * random.random()


class Seen(nn.Module):
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


def losses(model, plan, passes):
    with build_team(plan, num_microbatches=2, model=model, passes=passes) as one:
        found = [one.step(number, make_batch(one.global_num_microbatches)).loss for number in range(3)]
        one.export_weights()
        return found


def test_a_layer_that_changes_the_data_in_place_is_refused_by_name():
    model = nn.Sequential(Scaled(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    with pytest.raises(DataError) as caught:
        losses(model, "pipeline(2, schedule=gpipe, recompute=always)", ())
    assert documented_messages(PAGE)[1] == f"DataError: {caught.value}"


def test_what_a_later_block_changes_is_found_when_the_earlier_one_is_computed_again():
    with build_team("solo", passes=("recompute",)) as one:
        compute = one.ranks[0].interpreter.executor
        compute.begin_step(make_batch(1), compute.loss_weights)
        compute.loss_weights.weights[0] = 1.0
        compute.recompute_store.begin_step(one.ranks[0].interpreter.recompute_sets["step"])
        compute.forward(0, 3, 0)
        compute.recompute_store.saved[1, 0].leaves[0].data.add_(1)
        compute.recompute_store.saved[1, 0].leaf_versions[0] -= 1
        with pytest.raises(DataError, match="was changed in place"):
            compute.recompute(1, 1, 0)


def test_random_numbers_that_nobody_restores_are_found_by_the_results():
    with pytest.raises(DataError) as caught:
        losses(layers(Noisy()), "solo", ("recompute",))
    assert documented_messages(PAGE)[0] == f"DataError: {caught.value}"


def test_a_buffer_that_a_forward_changes_is_computed_with_as_it_was_and_stays_as_it_is():
    plain, again = layers(Seen()), layers(Seen())
    assert losses(plain, "solo", ()) == losses(again, "solo", ("recompute",))
    assert torch.equal(plain[1].norm, again[1].norm)
    assert torch.equal(plain[0].weight, again[0].weight)


def test_only_what_enters_a_stage_is_kept_of_a_forward():
    def look(rank):
        compute = rank.interpreter.compute
        return len(compute.tapes), len(compute.again.kept), len(compute.values)

    with build_team(
        "pipeline(2, schedule=gpipe, recompute=always) * data(2)", num_microbatches=3, passes=("overlap",)
    ) as one:
        seen = observe_calls(one, look)
    for rank in range(4):
        tapes, kept, values = map(max, zip(*seen[rank], strict=True))
        assert tapes <= 2  # of the two blocks of a stage, or of both as one
        assert kept >= 3
        assert values <= 3 + 1
    with build_team("pipeline(2, schedule=gpipe)", num_microbatches=3) as one:
        assert max(tapes for tapes, _, _ in observe_calls(one, look)[0]) == 3


def test_replicas_that_normalize_together_do_not_recompute():
    model = layers(nn.SyncBatchNorm(WIDTH))
    said = "1 is a SyncBatchNorm, which replicas normalize together, and rank 0 computes"
    with pytest.raises(PlanError, match=said), build_team("data(2)", model=model, passes=("recompute",)):
        pass


def test_batch_norm_that_was_told_to_normalize_together_is_called_what_it_is():
    model = layers(nn.BatchNorm1d(WIDTH))
    said = r"1 is a BatchNorm1d under batch_norm='sync', which .*; leave batch_norm='sync' out, so that each"
    options = {"passes": ("recompute",), "batch_norm": "sync"}
    with pytest.raises(PlanError, match=said), build_team("data(2)", model=model, **options):
        pass


def test_samples_are_equal_but_for_rounding():
    one = torch.linspace(-1, 1, 1000)
    assert sample_values(one).numel() <= 64
    assert samples_match(sample_values(one), sample_values(one * (1 + 1e-6)))
    assert not samples_match(sample_values(one), sample_values(F.dropout(one, 0.5)))
    assert samples_match(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not samples_match(torch.arange(3), torch.arange(3) + 1)


def test_evaluations_recompute_nothing():
    with cp.parallelize(chain(4), torch.optim.SGD, F.mse_loss, strategy="solo", passes=("recompute",)) as step:
        step(torch.ones(4, WIDTH).double(), torch.ones(4, WIDTH).double())
        calls = step.local_ranks.ranks[0].interpreter.forward_calls
        assert {type(call).__name__ for call, _, _ in calls} == {"ForwardRun"}


class Choosing(nn.Module):
    """Goes by what it computes, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else -y


def test_a_model_that_cannot_be_cut_is_not_recomputed():
    said = "recompute needs a model in blocks: .*; or leave out the pass recompute"
    with pytest.raises(PlanError, match=said), build_team("solo", model=Choosing().double(), passes=("recompute",)):
        pass
    with build_team("solo", model=Choosing().double()):
        pass
