"""Autocasts around the calls of a custom loop, where a pipeline computes a batch in a later call."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from tests.training.trainers import dataset, max_difference, mlp, params_of

SGD = partial(optim.SGD, lr=0.1)


def batch(at):
    inputs, targets = (values[12 * at : 12 * at + 12] for values in dataset().tensors)
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
