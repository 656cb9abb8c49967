"""Autocasts around the calls of a custom loop, where a pipeline computes a batch in a later call."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from tests.training.trainers import build_seeded, dataset, max_difference, mlp, params_of

SGD = partial(optim.SGD, lr=0.1)


def batch(at):
    part = at if isinstance(at, slice) else slice(12 * at, 12 * at + 12)
    inputs, targets = (values[part] for values in dataset().tensors)
    return inputs.float(), targets


def one_step(*, is_cast):
    """What a step of torch makes of the first batch."""
    model = mlp().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        loss = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
    loss.backward()
    SGD(model.parameters()).step()
    return params_of(model), float(loss.detach())


@pytest.mark.parametrize("is_cast", [False, True])
def test_an_async_pipeline_finishes_a_batch_under_the_autocasts_of_its_own_call(is_cast):
    expected, loss = one_step(is_cast=is_cast)
    step = cp.parallelize(mlp().float(), SGD, F.cross_entropy, strategy="pipedream(2)")
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        step(*batch(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_cast):
        assert step.flush() == [pytest.approx(loss, rel=1e-6)]
    assert max_difference(params_of(step.export_weights()), expected) < 1e-6
    step.close()


def test_each_batch_has_autocasts_of_its_own():
    step = cp.parallelize(mlp().float(), partial(optim.SGD, lr=0.0), F.cross_entropy, strategy="pipedream(2)")
    with step:
        with torch.autocast("cpu", torch.bfloat16):
            step(*batch(0))
        losses = [step(*batch(0)), *step.flush()]
    assert losses == [pytest.approx(one_step(is_cast=is_cast)[1], rel=1e-6) for is_cast in (True, False)]
    assert losses[0] != losses[1]


class Halves(nn.Module):
    """A model that plans split along the operations of its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def halves():
    return build_seeded(Halves).float()


@pytest.mark.parametrize("strategy", ["zero3(2)", "pipeline(2)"])
def test_an_evaluation_with_other_numbers_of_samples_computes_under_the_autocast_of_the_plan(strategy):
    """It was traced again under the autocast, where values have other dtypes than in the first trace, and refused."""
    found = []
    for plan in (strategy, "solo"):
        with cp.Trainer(
            halves(), loss=F.cross_entropy, optimizer=SGD, strategy=plan, precision="bf16(autocast=true)",
            progress="off",
        ) as trainer:  # fmt: skip
            data = TensorDataset(*batch(slice(0, 36)))
            trainer.fit(data, batch_size=12, max_steps=1)
            found.append([trainer.evaluate(data, batch_size=size)["loss"] for size in (12, 36, 20)])
    assert found[0] == pytest.approx(found[1], rel=1e-2)


@pytest.mark.parametrize("first", [False, True])
def test_an_autocast_may_begin_or_end_with_a_batch_of_another_number_of_samples(first):
    losses: dict[str, list[float]] = {}
    for plan in ("zero3(2)", "data(2)"):
        with cp.parallelize(halves(), SGD, F.cross_entropy, strategy=plan) as step:
            losses[plan] = []
            for count, is_cast in ((12, first), (8, not first), (16, True), (16, False)):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                    losses[plan].append(step(*batch(slice(0, count))))
    assert losses["zero3(2)"] == pytest.approx(losses["data(2)"], rel=1e-6)
