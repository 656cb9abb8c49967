"""What the user's own code does inside a step: hooks, named tuples, errors of the model; and steps after the end."""

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from tests.training.trainers import (
    STRATEGIES,
    build_seeded,
    dataset,
    equal_bits,
    list_rank_threads,
    mlp,
    params_of,
    state_of,
)

SGD = partial(optim.SGD, lr=0.1)


def step_of(model, strategy, **options):
    return cp.parallelize(model, SGD, F.cross_entropy, strategy=strategy, **options)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_hooks_are_refused_where_they_would_not_be_called(strategy, register):
    model = mlp()
    getattr(model[0].weight, register)(lambda _: None)
    with (
        pytest.raises(
            cp.PlanError, match=r"^0.weight has a gradient hook, which under .* or train in a single process$"
        ),
        step_of(model, strategy) as step,
    ):
        step(*dataset(12).tensors)
    assert list_rank_threads() == []


def test_gradient_hooks_are_called_under_solo():
    model = mlp()
    model[0].weight.register_hook(torch.zeros_like)
    with step_of(model, "solo") as step:
        step(*dataset(12).tensors)
    assert torch.equal(model[0].weight, mlp()[0].weight)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, y):
        return self.first(x) + self.second(y)


Two = namedtuple("Two", ["x", "y"])


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_inputs_may_be_a_named_tuple(strategy):
    x, targets = dataset(12).tensors
    result = []
    for form in (tuple, Two._make):
        with step_of(build_seeded(Sum), strategy) as step:
            step(form((x, x * 2)), targets)
        result.append(params_of(step.local_ranks.model))
    assert equal_bits(*result)


class Fussy(nn.Module):
    """Cannot do with the last batch of 11 samples in batches of 4."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if len(x) == 1:
            raise KeyError("alone")
        return self.layer(x)


def fit_uneven(model, strategy, **goals):
    x, targets = dataset(11).tensors
    options: dict[str, Any] = {"num_microbatches": 1 + ("data" not in strategy), "batch_norm": "deferred"}
    trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=SGD, strategy=strategy, **options)
    trainer.fit(TensorDataset(x, targets), batch_size=4, **goals)


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_an_error_of_the_models_forward_says_which_samples_and_blocks_it_had(strategy):
    with pytest.raises(KeyError) as mistake:
        fit_uneven(build_seeded(Fussy), strategy)
    assert mistake.value.__notes__[0] == (
        "raised by the model's forward: block 0 of 1 on microbatch 1 of step 2, which has 1 of the batch's 3 samples, "
        "with inputs of the shapes (1, 6)"
    )


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_batch_norm_on_a_lone_sample_of_the_last_batch_is_refused_before_the_first_step(strategy):
    model = build_seeded(normed)
    with pytest.raises(cp.DataError) as refusal:
        fit_uneven(model, strategy)
    assert str(refusal.value) == (
        "batch norm got one value per channel and cannot train on it: the last batch of an epoch has 3 samples, and "
        "microbatch 1 of it has only 1; give batches whose every microbatch has 2 samples or more, the last batch "
        "included (another batch_size, fewer microbatches, or drop the last samples), or use a norm without batch "
        "statistics, such as LayerNorm or GroupNorm"
    )
    assert equal_bits(state_of(model), state_of(build_seeded(normed)))
    fit_uneven(model, strategy, max_steps=2)


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_batch_norm_on_a_lone_sample_in_a_loop_says_which_microbatch_it_is(strategy):
    x, targets = dataset(11).tensors
    options: dict[str, Any] = {"num_microbatches": 1 + ("data" not in strategy), "batch_norm": "deferred"}
    step = step_of(build_seeded(normed), strategy, **options)
    step(x[:8], targets[:8])
    with pytest.raises(cp.DataError, match=r"microbatch 1 of step 1, which has 1 of the batch's 3 samples"), step:
        step(x[8:], targets[8:])


def test_autocast_around_a_step_reaches_all_ranks():
    """Only the caller's thread had it, and so no rank of several."""
    result = []
    for strategy in ("solo", "data(2)"):
        with step_of(mlp().float(), strategy) as step, torch.autocast("cpu", dtype=torch.bfloat16):
            step.local_ranks.model[0].register_forward_hook(lambda _, __, output: result.append(output.dtype))
            step(dataset(12).tensors[0].float(), dataset(12).tensors[1])
    assert set(result) == {torch.bfloat16}


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_step_after_close_is_refused_at_once(strategy):
    """It waited for ever for ranks that had ended."""
    batch = dataset(12).tensors
    step = step_of(mlp(), strategy)
    step(*batch)
    step.close()
    step.close()
    with pytest.raises(cp.PlanError, match=r"^step 1 was called after close\(\); close when"):
        step(*batch)
