"""Functions of torch that import its compiler, or sympy, are called without these, and torch is restored afterwards."""

import subprocess
import sys

import pytest

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


WITHOUT_SYMPY = """
import sys, torch
from torch import nn
from counterpoint.runtime.compiler_import import without_dynamo_import, without_sympy_import

x = torch.ones(2, 4, device="meta")
with without_dynamo_import(), without_sympy_import():
    nn.LayerNorm(4, device="meta")(nn.Linear(4, 4, device="meta")(x)).softmax(-1) + 1
    root = torch.ones(2, requires_grad=True) * 2
    torch.autograd.grad(root, [root], torch.ones(2))
    with_error = None
    try:
        x @ x
    except RuntimeError as error:
        with_error = error
assert "must have same reduction dim" in str(with_error) or "cannot be multiplied" in str(with_error), with_error
assert not {"sympy", "torch.fx.experimental.symbolic_shapes"} & set(sys.modules)
with without_sympy_import():
    import sympy
    assert issubclass(sympy.Symbol, sympy.Basic)  # what else uses it imports it
assert sys.modules["sympy"].Basic is sympy.Basic
"""
WITH_SYMBOLS = """
import sys, torch
from counterpoint.runtime.compiler_import import without_sympy_import

with without_sympy_import():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, expect_true, free_unbacked_symbols, sym_eq
    assert sym_eq((2, 3), [2, 3]) and not sym_eq((2,), (2, 3)) and not free_unbacked_symbols(torch.ones(2))
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(shape_env=ShapeEnv()) as mode:
    symbol = mode.shape_env.create_unbacked_symint()
    assert free_unbacked_symbols(torch.empty(symbol))
    assert expect_true(symbol == symbol) and isinstance(sym_eq((symbol,), (3,)), torch.SymBool)
"""


@pytest.mark.process
@pytest.mark.parametrize("code", [WITHOUT_SYMPY, WITH_SYMBOLS], ids=["numbers", "symbols"])
def test_sympy_is_imported_for_symbols_only(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


BRANCHES = """
import sys, torch
from torch import nn
import counterpoint as cp
from counterpoint.errors import PlanError

class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if len(x) < 8 else 2.0)

try:
    with cp.parallelize(Branch(4, 4), torch.optim.SGD, nn.functional.mse_loss, strategy="data(2)") as step:
        step(torch.ones(8, 4), torch.ones(8, 4))
except PlanError as error:
    print(error)
print("sympy" in sys.modules)
"""


@pytest.mark.process
def test_a_branch_on_the_number_of_samples_is_found_without_sympy():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BRANCHES], capture_output=True, text=True, check=True)
    error, is_imported = done.stdout.splitlines()
    assert "with the same samples repeated to 8" in error
    assert is_imported == "False"
