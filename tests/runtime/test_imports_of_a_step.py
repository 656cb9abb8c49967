"""Replicas of one host train without importing torch's compiler, which takes seconds and memory, or the planner."""

import subprocess
import sys

import pytest
from torch import nn, optim

from counterpoint.runtime.rebuilt_optimizer import DISABLE_CACHE_ATTRIBUTE, OPTIMIZER_METHODS, without_dynamo_import

TRAINING = """
import sys, torch
from functools import partial
from torch import nn, optim
import counterpoint as cp

with cp.parallelize(nn.Linear(4, 4), partial(optim.AdamW, lr=0.1), nn.functional.mse_loss, strategy="data(2)") as step:
    step(torch.ones(4, 4), torch.ones(4, 4))
print(*(name for name in ("torch._dynamo", "counterpoint.planner.choose") if name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.process
def test_training_imports_neither_the_compiler_nor_the_planner():
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_torch_is_restored_afterwards():
    methods = [getattr(optim.Optimizer, name).__wrapped__ for name in OPTIMIZER_METHODS]
    before = [vars(method).get(DISABLE_CACHE_ATTRIBUTE) for method in methods]
    with without_dynamo_import():
        optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert [vars(method).get(DISABLE_CACHE_ATTRIBUTE) for method in methods] == before
