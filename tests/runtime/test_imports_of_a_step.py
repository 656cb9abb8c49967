"""Replicas of one host train without importing torch's compiler, which takes seconds and memory, or the planner."""

import subprocess
import sys

import pytest

TRAINING = """
import sys, torch
from functools import partial
from torch import nn, optim
import counterpoint as cp

with cp.parallelize(nn.Linear(4, 4), partial(optim.AdamW, lr=0.1), nn.functional.mse_loss, strategy="data(2)") as step:
    step(torch.ones(4, 4), torch.ones(4, 4))
print(*(name for name in ("torch._dynamo", "counterpoint.planner.choose") if name in sys.modules))
"""


@pytest.mark.process
def test_training_imports_neither_the_compiler_nor_the_planner():
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


OTHER_PROCESS = """
import sys, torch
from torch import nn, optim
from counterpoint.runtime.compiler_import import DISABLE_CACHE_ATTRIBUTE, without_dynamo_import

with without_dynamo_import():
    optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).zero_grad()
    nn.Linear(2, 2, device="meta")(torch.ones(2, 2, device="meta"))
assert "torch._dynamo" not in sys.modules
method = optim.Optimizer.zero_grad.__wrapped__
assert not hasattr(method, DISABLE_CACHE_ATTRIBUTE)
with without_dynamo_import():
    assert torch._dynamo.is_compiling() is False  # what uses the compiler imports it
assert hasattr(sys.modules["torch._dynamo"], "optimize")
optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).zero_grad()
assert getattr(method, DISABLE_CACHE_ATTRIBUTE) is not method
"""


@pytest.mark.process
def test_torch_is_restored_afterwards():
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
