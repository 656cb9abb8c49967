"""The weight part of a backward computes the deferred weight gradients, with the same results."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.runtime.autograd.deferred_weight_grad import DeferredGradSink, WeightGradQueue, build_grad_sinks
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.kernels.weight_grad import GradSinks, in_place_grad_functions, run_backward
from counterpoint.runtime.params.grad_check import GradCheck
from counterpoint.runtime.params.grad_sinks import ParamGradSink
from tests.runtime.local_ranks import build_local_ranks


class InBackward:
    """State of a rank in the middle of a step's backward."""

    in_backward = True
    grad_check = GradCheck()


def intercept_with(module, queue):
    places = {
        id(param): DeferredGradSink(ParamGradSink(name, param, InBackward()), queue)
        for name, param in module.named_parameters()
    }
    return InterceptFunctions(in_place_grad_functions(GradSinks(places, places)))


class KernelRecorder(TorchDispatchMode):
    """Records the names of all called operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def run_in_parts(module, x, times=1):
    """Run forward and both parts of the backward; return which weights had a gradient in between, and the jobs."""
    queue = WeightGradQueue()
    with intercept_with(module, queue):
        loss = sum(module(x).square().sum() for _ in range(times))
        with queue.recording() as jobs:
            run_backward([loss], [None])
    early = {name for name, param in module.named_parameters() if param.grad is not None}
    with torch.no_grad():
        for job in jobs:
            job()
    return early, jobs


class TwiceUsedWeight(nn.Module):
    """Uses its weight in a product, and then in a linear layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return F.linear(x @ self.weight, self.weight)


class TwoTables(nn.Module):
    """Looks up in two tables, one of them with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.dense, self.sparse = nn.Embedding(5, 4), nn.Embedding(5, 4, sparse=True)

    def forward(self, x):
        rows = x.long().abs() % 5
        return self.dense(rows) + self.sparse(rows)


def strided():
    return nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)


def normed():
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))


def padded():
    return nn.Conv2d(2, 2, 3, padding="same")


ROWS = [[0, 1, 0], [4, 0, 2]]
MODULES = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 5, 4), {"bias"}),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), lambda: torch.randn(2, 4), set()),
    "convolution": (strided, lambda: torch.randn(2, 4, 7, 7), {"bias"}),
    "convolution of a line": (lambda: nn.Conv1d(2, 3, 3, dilation=2, bias=False), lambda: torch.randn(2, 2, 9), set()),
    "table": (lambda: nn.Embedding(5, 3, padding_idx=1), lambda: torch.tensor(ROWS), set()),
    "bags": (lambda: nn.EmbeddingBag(5, 3), lambda: torch.tensor(ROWS), set()),
    "norm": (normed, lambda: torch.randn(3, 4), {"1.weight", "1.bias"}),
    "a weight used in two ways": (TwiceUsedWeight, lambda: torch.randn(3, 4), {"weight"}),
    "padding by name": (padded, lambda: torch.randn(1, 2, 5, 5), {"weight", "bias"}),
}
"""A module, its input, and the weights whose gradients come with the input part."""


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("name", MODULES)
def test_both_parts_together_give_torchs_gradients_and_products_run_in_the_second(name, times):
    build, draw, expected_early = MODULES[name]
    module, x = build().double(), draw()
    x = x.double().requires_grad_() if x.is_floating_point() else x
    wanted = [param for param in (x, *module.parameters()) if param.requires_grad]
    expected = torch.autograd.grad(sum(module(x).square().sum() for _ in range(times)), wanted)
    early, jobs = run_in_parts(module, x, times)
    assert early == expected_early
    assert bool(jobs) == (name != "padding by name")
    for param, gradient in zip(wanted, expected, strict=True):
        assert torch.allclose(param.grad, gradient, rtol=1e-12, atol=1e-12)


def test_a_whole_backward_defers_nothing():
    queue, module = WeightGradQueue(), nn.Linear(4, 3)
    with intercept_with(module, queue):
        run_backward([module(torch.randn(2, 4)).sum()], [None])
    assert module.weight.grad is not None


def test_two_microbatches_add_up_in_any_order_of_their_weight_parts():
    module, x = nn.Linear(4, 3).double(), torch.randn(2, 4, dtype=torch.float64)
    later = [run_in_parts(module, part)[1] for part in (x[:1], x[1:])]
    module.zero_grad()
    for job in (*later[1], *later[0]):
        job()
    (expected,) = torch.autograd.grad(module(x).square().sum(), module.weight)
    result = module.weight.grad
    assert result is not None
    assert torch.allclose(result, expected)


def transposed():
    table = nn.Embedding(5, 3)
    table.weight = nn.Parameter(torch.randn(3, 5).t())
    return table


@pytest.mark.parametrize("name", ["table", "bags", "transposed table"])
def test_rows_are_added_to_a_tables_gradient_without_another_one_of_its_size(name):
    build, draw, _ = MODULES.get(name, (transposed, lambda: torch.tensor(ROWS), set()))
    module, x = build().double(), draw()
    (expected,) = torch.autograd.grad(2 * module(x).square().sum(), module.weight)
    ways = GradSinks({}, {id(module.weight): ParamGradSink("weight", module.weight, InBackward())})
    for _ in range(2):
        with InterceptFunctions(in_place_grad_functions(ways)), KernelRecorder() as kernels:
            run_backward([module(x).square().sum()], [None])
    assert torch.allclose(module.weight.grad, expected, rtol=1e-12, atol=1e-12)
    assert not any(result.startswith(("embedding_dense", "_embedding_bag_dense")) for result in kernels.names)


@pytest.mark.parametrize("plan", ["pipeline(2)", "pipedream(2)", "pipedream_2bw(2)"])
def test_tables_of_every_version_have_sinks_and_others_do_not(plan):
    model = nn.Sequential(TwoTables(), nn.Linear(4, 6)).double()
    with build_local_ranks(plan, model=model, num_microbatches=2) as one:
        store = one.ranks[0].interpreter.store
        read = (
            [store.params] if store.weight_versions is None else [one.leaves for one in store.weight_versions.versions]
        )
        assert set(build_grad_sinks(store, None).row_sinks) == {id(leaves["0.dense.weight"]) for leaves in read}
