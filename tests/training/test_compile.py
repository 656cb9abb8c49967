"""Plans with compile=: the numbers of eager forwards, one graph for each part of the model, or an error with the line."""

import re
from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.testing.device_survey import (
    MODEL_PLANS,
    PLANS,
    TOLERANCE,
    batches,
    build,
    largest_difference,
    make_step,
)
from tests.training.compile_backend import reset_counter
from tests.training.trainers import state_of

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 4
COUNTED = "segments(backend=counting)"
QUICK = ["gpt-solo", "gpt-data(2)", "gpt-zero(2, level=3)", "gpt-pipeline(2)", "gpt-tensor(2)", "mlp-pipeline(2) + recompute"]


@pytest.fixture(name="counter", autouse=True)
def count_graphs():
    yield reset_counter()
    reset_counter()


def train(model, plan, num_steps=NUM_STEPS, **options):
    """Return the losses and trained values of a few steps of a model of the survey."""
    step, trained = make_step(model, plan, "cpu", **options)
    with step:
        losses = [float(step(*batch)) for batch in islice(batches(model), num_steps)]
    return losses, state_of(trained)


def has_pairs(model, plan):
    return "tensor" not in plan or model == "gpt"


@pytest.mark.long(quick=QUICK)
@pytest.mark.parametrize(
    ("model", "plan"),
    [("mlp", plan) for plan in PLANS if has_pairs("mlp", plan)]
    + [(model, plan) for model in ("gpt", "embedding", "experts") for plan in MODEL_PLANS if has_pairs(model, plan)],
)
def test_a_plan_trains_as_without_compilation(model, plan, counter):
    actual = train(model, plan, compile=COUNTED)
    assert counter.num_calls >= NUM_STEPS
    assert largest_difference(actual, train(model, plan)) <= TOLERANCE
