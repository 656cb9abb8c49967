"""A dict of losses: its sum is trained on, and each part is reported over the whole batch."""

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.errors import DataError
from counterpoint.training.callbacks.callback import Callback
from counterpoint.training.callbacks.progress import ProgressCallback
from counterpoint.training.callbacks.run_folder import RunFolder
from tests.training.trainers import max_difference, mlp, params_of

SAMPLES = 12
PLANS = [
    ("solo", 1), ("solo", 4), ("data(2)", 2), ("zero3(2)", 2), ("tree(2)", None), ("pipeline(2)", 4),
    ("gpipe(2) * data(2)", 2), ("tensor(2)", 2), ("server(2, consistency=bsp)", None),
]  # fmt: skip


def means(output, targets):
    return {"regression": F.mse_loss(output, targets["value"]), "size": output.abs().mean() * 0.1}


def token_means(output, targets):
    mask = targets["mask"]
    squares, sizes = (output - targets["value"]) ** 2, output.abs()
    return {
        "regression": cp.WeightedMean((squares.sum(1) * mask).sum(), mask.sum()),
        "size": cp.WeightedMean((sizes.sum(1) * mask).sum() * 0.1, mask.sum()),
    }


def sums(output, targets):
    return {name: value * len(output) * 0.01 for name, value in means(output, targets).items()}


def different_weights(output, targets):
    return {"tokens": token_means(output, targets)["regression"], "samples": output.abs().mean()}


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs, values = torch.randn(2, SAMPLES, 6, generator=generator, dtype=torch.float64)
        yield inputs, {"value": values[:, :3], "mask": torch.arange(SAMPLES) % 5 % 2}


def total(parts):
    return {
        name: part.total / part.weight if isinstance(part, cp.WeightedMean) else part for name, part in parts.items()
    }


def train_plain(loss):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, parts = [], []
    for inputs, targets in batches():
        optimizer.zero_grad()
        values = total(loss(model(inputs), targets))
        value = sum(values.values())
        value.backward()
        optimizer.step()
        losses.append(value.item())
        parts.append({name: part.item() for name, part in values.items()})
    return losses, parts, params_of(model)


def train(loss, plan, num_microbatches, **options):
    model = mlp()
    losses, parts = [], []
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy=plan, num_microbatches=num_microbatches,
        **options,
    ) as step:  # fmt: skip
        for inputs, targets in batches():
            losses.append(step(inputs, targets))
            parts.append(step.loss_parts)
    return losses, parts, params_of(model)


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-12)
    for parts, expected_parts in zip(actual[1], expected[1], strict=True):
        assert parts == pytest.approx(expected_parts, rel=1e-12)
    assert max_difference(actual[2], expected[2]) < 1e-12


@pytest.mark.long(
    quick=[
        "tree(2)-None-token_means",
        "pipeline(2)-4-sums",
        "tensor(2)-2-means",
        "server(2, consistency=bsp)-None-means",
    ]
)
@pytest.mark.parametrize("loss", [means, token_means, sums])
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_a_dict_of_losses_is_summed_under_every_plan(plan, num_microbatches, loss):
    options = {"loss_reduction": "sum"} if loss is sums else {}
    assert_same(train(loss, plan, num_microbatches, **options), train_plain(loss))


@pytest.mark.parametrize("plan", [("solo", 4), ("data(4)", None), ("gpipe(2) * data(2)", 2)])
def test_parts_with_different_weights_are_those_of_the_whole_batch_if_it_is_evaluated_once(plan):
    assert_same(train(different_weights, *plan, loss_reduction="batch"), train_plain(different_weights))


@pytest.mark.parametrize("plan", [("solo", 4), ("data(2)", 2), ("zero3(2)", 2), ("pipeline(2)", 4)])
def test_parts_with_different_weights_are_refused_with_numbers(plan):
    message = r"with different weights: 'tokens' \d, 'samples' that of its samples; .*pass loss_reduction='batch'"
    with pytest.raises(DataError, match=message):
        train(different_weights, *plan)
    assert_same(train(different_weights, "solo", 1), train_plain(different_weights))


def test_two_token_means_are_not_added_up():
    def added(output, targets):
        parts = token_means(output, targets)
        return parts["regression"] + parts["size"]

    with pytest.raises(DataError, match="return them as a dict"):
        train(added, "data(2)", 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, targets: {}, "is an empty dict"),
        (lambda output, targets: {"a": output}, r"the part 'a' of the loss of microbatch 0 has the shape \(6, 3\)"),
        (lambda output, targets: {"a": 1.0}, "the part 'a' of the loss of microbatch 0 is a float"),
    ],
)
def test_a_part_that_is_no_loss_is_refused(loss, message):
    with pytest.raises(DataError, match=message):
        train(loss, "solo", 2)


class Shown(Callback):
    def on_step(self, event):
        self.parts = dict(event.loss_parts)


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_parts_are_in_the_history_and_in_evaluations_and_in_the_run_folder(plan, tmp_path, capsys):
    shown, model, (inputs, targets) = Shown(), Named(), next(batches(1))
    data = [{"x": x, "labels": {"value": value}} for x, value in zip(inputs, targets["value"], strict=True)]
    with cp.Trainer(
        model, loss=means, optimizer=partial(torch.optim.SGD, lr=0.0), strategy=plan, num_microbatches=2,
        callbacks=[shown, RunFolder(tmp_path), ProgressCallback("plain")],
    ) as trainer:  # fmt: skip
        history = trainer.fit(data, batch_size=12, max_steps=1, eval_dataset=data)
    expected = {name: value.item() for name, value in means(model(inputs), targets).items()}
    assert history.steps[0].loss_parts == shown.parts == pytest.approx(expected, rel=1e-12)
    assert history.losses[0] == pytest.approx(math.fsum(shown.parts.values()), rel=1e-12)
    assert history.evaluations[0].metrics == pytest.approx({**expected, "loss": sum(expected.values())}, rel=1e-12)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert line["loss_parts"] == shown.parts
    assert "(regression " in capsys.readouterr().out


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)
