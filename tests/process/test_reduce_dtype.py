"""Ranks in processes sum gradients in a narrower dtype: the bits are those of ranks in one process."""

import math

import pytest
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from tests.process.forked_ranks import run_forked
from tests.training.trainers import dataset, mlp

pytestmark = pytest.mark.process


def train(plan, precision):
    """Return losses and weights of a few steps, as numbers that JSON has."""
    model, (inputs, targets) = mlp(), dataset(24).tensors
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, precision=precision) as step:
        losses = [float(step(inputs, targets)) for _ in range(4)]
    return [losses, [value.double().flatten().tolist() for value in model.state_dict().values()]]


MASTERS = "fp16(reduce=fp16, weights=compute)"


@pytest.mark.long(
    quick=["fp32(reduce=fp16)-zero(2, level=3)", "fp32(reduce=bf16)-data(2)", f"{MASTERS}-zero(2, level=2)"]
)
@pytest.mark.parametrize(
    ("precision", "plan"),
    [(text, plan) for text in ("fp32(reduce=bf16)", "fp32(reduce=fp16)") for plan in ("data(2)", "zero(2, level=3)")]
    + [(MASTERS, plan) for plan in ("zero(2, level=1)", "zero(2, level=2)")],
)
def test_processes_have_the_bits_of_ranks_in_one_process(plan, precision):
    expected = train(plan, precision)
    assert run_forked(train, ranks=2, args=(plan, precision)) == [expected] * 2
    assert expected != train(plan, None)
    assert math.isfinite(sum(expected[0]))
