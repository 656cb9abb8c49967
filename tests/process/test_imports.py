"""Ranks train without importing torch's compiler and sympy, which take memory in each of them, unless a plan needs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tests

pytestmark = pytest.mark.process

WHOLE = (
    "data(2)", "data(2, sync_every=2)", "zero(2, level=1)", "zero(2, level=2)",
    "server(2, servers=1)", "server(2, servers=1, consistency=asp)",
)  # fmt: skip
DIVIDED = (
    "zero(2, level=3)", "pipeline(2)", "pipeline(2, schedule=gpipe)", "interleaved(2)",
    "zero_bubble(2)", "zero_bubble(2, chunks_per_stage=2)", "pipedream(2)",
)  # fmt: skip
TRAINING = """
import json, sys
from functools import partial
import torch
from torch import nn, optim
from torch.nn import functional as F
import counterpoint as cp

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = x + self.middle(F.relu(self.first(x)))
        return self.last(F.layer_norm(hidden.flatten(1), (4,)).softmax(-1))

def make_sequential():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU())))

make, *plans = json.loads(sys.argv[1])
for plan in plans:
    model, data = globals()[make](), torch.arange(32.0).reshape(8, 4)
    with cp.parallelize(model, partial(optim.SGD, lr=0.1), F.mse_loss, strategy=plan, num_microbatches=4) as step:
        for _ in range(2):
            step(data, data)
    names = ("sympy", "torch._dynamo", "networkx", "counterpoint.planner.choose")
    print(json.dumps([plan, [name for name in names if name in sys.modules]]))
"""


def imports_of_training(make, plans):
    """Return which of four large modules have been imported after training under each plan, in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-c", TRAINING, json.dumps([make, *plans])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(tests.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def test_a_sequential_is_trained_without_sympy_and_the_compiler():
    plans = (*WHOLE, *DIVIDED)
    assert imports_of_training("make_sequential", plans) == {plan: [] for plan in plans}


def test_a_model_with_a_forward_of_its_own_is_trained_without_sympy_and_the_compiler():
    """It runs on the meta device, to see whether it branches on the number of samples."""
    assert imports_of_training("Residual", WHOLE) == {plan: [] for plan in WHOLE}


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("plan", ["zero(2, level=3)", "pipeline(2)", "zero_bubble(2)", "tensor(2)"])
def test_plans_that_divide_a_forward_import_what_torch_traces_it_with(plan):
    """``torch.export`` is a part of the compiler, and has sympy for sizes; what it imports but does not use is left out."""
    assert imports_of_training("Residual", [plan]) == {plan: ["sympy", "torch._dynamo"]}
