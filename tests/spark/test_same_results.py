"""The same numbers as on one rank, whatever the partitions: the works of places, exchanged in this process."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import counterpoint as cp
from counterpoint.runtime.commit.step_commit import StepGuard
from counterpoint.spark.training import train_local
from counterpoint.spark.training_loop import SparkOptions
from counterpoint.spark.weight_slices import decode_values, encode_values
from tests.spark.models import Net
from tests.spark.training_helpers import (
    TOLERANCE,
    Adam,
    make_net,
    make_samples,
    max_relative_difference,
    mse,
    split_partitions,
    train_partitions,
    train_single_process,
)

DATA = make_samples(23)
TEN = SparkOptions(batch_size=7, epochs=3, max_steps=10)


@pytest.mark.long(quick=["sizes0", "sizes1"])
@pytest.mark.parametrize("sizes", [(), (11,), (5, 9), (0, 8, 8), (23, 0, 0), (1, 1, 1)])
def test_any_partitions_end_where_solo_ends(sizes):
    expected, losses = train_single_process(DATA, TEN)
    model, result = train_partitions(split_partitions(DATA, *sizes), TEN)
    assert max_relative_difference(model, expected) < TOLERANCE
    assert result == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.long(quick=["4"])
@pytest.mark.parametrize("batch_size", [1, 4, 23, 100])
def test_any_batch_size_ends_where_solo_ends(batch_size):
    options = replace(TEN, batch_size=batch_size, epochs=10, max_steps=5)
    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 9, 3), options)[0], train_single_process(DATA, options)[0]
        )
        < TOLERANCE
    )


def test_microbatches_do_not_change_the_numbers():
    options = replace(TEN, num_microbatches=3)
    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 9, 3), options)[0], train_single_process(DATA, TEN)[0]
        )
        < TOLERANCE
    )


@pytest.mark.long(quick=["RMSprop", "NAdam"])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.Adagrad, lr=0.1),
        partial(torch.optim.NAdam, lr=0.01),
        partial(torch.optim.RMSprop, lr=0.01),
    ],
    ids=lambda factory: factory.func.__name__,
)
def test_each_slice_has_its_own_part_of_the_optimizers_state(optimizer):
    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 4, 12), TEN, optimizer)[0],
            train_single_process(DATA, TEN, optimizer)[0],
        )
        < TOLERANCE
    )


def test_groups_of_parameters_keep_their_options():
    def groups(params: Any):
        model: Any = list(params)
        return torch.optim.SGD([{"params": model[:3]}, {"params": model[3:], "lr": 0.01}], lr=0.1)

    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 4, 12), TEN, groups)[0], train_single_process(DATA, TEN, groups)[0]
        )
        < TOLERANCE
    )


def test_gradients_are_clipped_by_the_norm_of_their_sum():
    options = replace(TEN, step_guard=StepGuard(clip_norm=0.1))
    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 4, 12), options)[0],
            train_single_process(DATA, TEN, clip_norm=0.1)[0],
        )
        < TOLERANCE
    )


def test_a_schedule_changes_the_learning_rate_of_every_slice():
    def halved(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    options = replace(TEN, lr_lambda=lambda step: 0.5**step)
    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 4, 12), options)[0],
            train_single_process(DATA, TEN, lr_scheduler=halved)[0],
        )
        < TOLERANCE
    )


def squares_and_sizes(output, target):
    return {"squares": mse(output, target), "sizes": 0.1 * output.abs().mean()}


def test_the_parts_of_a_loss_are_reported_over_the_whole_batch():
    model = make_net()
    with cp.Trainer(
        model, loss=squares_and_sizes, optimizer=Adam, strategy="solo", progress="off", seed=TEN.seed
    ) as trainer:
        history = trainer.fit(DATA, batch_size=TEN.batch_size, epochs=TEN.epochs, max_steps=TEN.max_steps)
    for sizes in [(), (5, 9), (0, 8, 8)]:
        actual = make_net()
        done = train_local(split_partitions(DATA, *sizes), actual, loss=squares_and_sizes, optimizer=Adam, options=TEN)
        assert max_relative_difference(actual, model) < TOLERANCE
        for step, expected in zip(done.steps, history.steps, strict=True):
            assert step.loss_parts == pytest.approx(expected.loss_parts, rel=TOLERANCE)


def test_slices_that_come_to_the_driver_on_the_way_change_nothing():
    first, second = (
        train_partitions(split_partitions(DATA, 4, 12), replace(TEN, snapshot_every=every))[0] for every in (1, 100)
    )
    assert max_relative_difference(first, second) == 0


def test_a_step_sends_what_the_programs_formula_says():
    done = train_local(split_partitions(DATA, 9, 3), make_net(), loss=mse, optimizer=torch.optim.SGD, options=TEN)
    weights = sum(param.numel() for param in make_net().parameters() if param.requires_grad)
    assert {step.sent_bytes for step in done.steps} == {done.step_bytes} == {2 * 2 * weights * 8}


def test_half_the_bytes_travel_with_bf16():
    options = replace(TEN, codec="bf16")
    done = train_local(
        split_partitions(DATA, 9, 3), make_net().float(), loss=mse, optimizer=torch.optim.SGD, options=options
    )
    weights = sum(param.numel() for param in make_net().parameters() if param.requires_grad)
    assert {step.sent_bytes for step in done.steps} == {done.step_bytes} == {2 * 2 * weights * 2}


def test_bf16_ends_near_where_all_bits_end():
    whole, half = (
        train_partitions(split_partitions(DATA, 9, 3), replace(TEN, codec=code), model=make_net().float())[0]
        for code in ("", "bf16")
    )
    assert 0 < max_relative_difference(half, whole) < 0.02


def test_bf16_is_rounded_to_the_nearest_and_the_even_one_of_two():
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 1.005, -1.005])
    read = decode_values(encode_values(values, "bf16"), torch.float32, "bf16")
    assert read.tolist() == [1.0, 1.0, 1.015625, 1.0078125, -1.0078125]


def test_a_loss_that_is_not_finite_leaves_out_the_step_on_all_slices():
    bad = [*DATA[:5], (torch.full((3,), torch.inf, dtype=torch.float64), DATA[5][1]), *DATA[6:]]
    options = replace(TEN, epochs=1, max_steps=None, step_guard=StepGuard(nonfinite="skip"))
    done = train_local(split_partitions(bad, 9, 3), make_net(), loss=mse, optimizer=torch.optim.SGD, options=options)
    assert sum(step.is_skipped for step in done.steps) == 1


def test_what_a_model_draws_is_the_same_when_a_task_runs_again():
    def dropping():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

    first, second = (train_partitions(split_partitions(DATA, 4, 12), TEN, model=dropping())[0] for _ in range(2))
    assert max_relative_difference(first, second) == 0


def test_the_users_model_keeps_its_ties_and_what_is_frozen():
    model, _ = train_partitions(split_partitions(DATA, 4, 12), TEN)
    assert isinstance(model, Net)
    assert model.tied.weight is model.again.weight
    assert model.frozen.tolist() == [0.5] * 5


ADAM = partial(torch.optim.Adam, lr=0.01)


def test_a_weighted_mean_is_that_of_the_whole_batch():
    def masked(output, targets):
        mask = targets > 0
        return cp.WeightedMean(((output - targets) ** 2 * mask).sum(), mask.sum())

    model, plain = make_net(), make_net()
    done = train_local(split_partitions(DATA, 5), model, loss=masked, optimizer=ADAM, options=TEN)
    trainer = cp.Trainer(plain, loss=masked, optimizer=ADAM, strategy="solo", progress="off", seed=TEN.seed)
    history = trainer.fit(DATA, batch_size=TEN.batch_size, epochs=TEN.epochs, max_steps=TEN.max_steps)
    assert done.losses == pytest.approx(history.losses, rel=1e-12)
    assert max_relative_difference(model, plain) < TOLERANCE
