"""A linear layer's weight gradient is written to its sink, except where autograd needs it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.kernels.weight_grad import GradSinks, in_place_grad_functions, run_backward


class RecordingGradSink:
    """A sink for one gradient."""

    def __init__(self, weight):
        self.memory, self.is_used, self.accepts_grads = torch.full_like(weight, torch.nan), False, True
        self.is_deferred = False

    def submit(self, job):
        job()

    def target(self):
        was_used, self.is_used = self.is_used, True
        return self.memory.detach(), was_used

    def is_bounded(self, rows, inputs):
        return False

    def check(self, grad, *, is_bounded=False):
        assert not is_bounded
        assert grad.data_ptr() == self.memory.data_ptr()


def layer():
    torch.manual_seed(0)
    result = nn.Linear(5, 3).double()
    return result, RecordingGradSink(result.weight), torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)


def expected(module, x, loss):
    return torch.autograd.grad(loss(module, x), [x, module.bias, module.weight])


def square_loss(module, x):
    return module(x).square().sum()


def double_use_loss(module, x):
    return (module(x).sum() * module(2 * x)).square().sum()


def checkpointed_loss(module, x):
    return checkpoint(module, x, use_reentrant=False).square().sum()


@pytest.mark.parametrize("loss", [square_loss, double_use_loss, checkpointed_loss])
def test_gradients_are_torchs(loss):
    module, sink, x = layer()
    to_input, to_bias, to_weight = expected(module, x, loss)
    with InterceptFunctions(in_place_grad_functions(GradSinks({id(module.weight): sink}))):
        run_backward([loss(module, x)], [None])
    assert torch.allclose(x.grad, to_input)
    assert torch.allclose(module.bias.grad, to_bias)
    assert module.weight.grad is None
    assert torch.allclose(sink.memory, to_weight)


def test_weights_without_a_sink_are_torchs():
    module, _, x = layer()
    with InterceptFunctions(in_place_grad_functions(GradSinks())):
        module(x).sum().backward()
    assert module.weight.grad is not None


def test_a_gradient_that_is_differentiated_is_torchs():
    module, sink, x = layer()
    with InterceptFunctions(in_place_grad_functions(GradSinks({id(module.weight): sink}))):
        (slope,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        slope.square().sum().backward()
    result, sink.accepts_grads = module.weight.grad + (sink.memory if sink.is_used else 0), False
    module.weight.grad = None
    (slope,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert torch.allclose(result, module.weight.grad)


def test_a_gradient_outside_of_a_step_is_returned():
    module, sink, x = layer()
    sink.accepts_grads = False
    with InterceptFunctions(in_place_grad_functions(GradSinks({id(module.weight): sink}))):
        (result,) = torch.autograd.grad(square_loss(module, x), module.weight)
    assert not sink.is_used
    assert torch.allclose(result, expected(module, x, square_loss)[2])


def test_a_compiled_graph_stays_one_graph():
    module, sink, x = layer()
    *_, to_weight = expected(module, x, square_loss)
    whole = torch.compile(module, backend="eager", fullgraph=True)
    with InterceptFunctions(in_place_grad_functions(GradSinks({id(module.weight): sink}))):
        run_backward([square_loss(whole, x)], [None])
    assert torch.allclose(sink.memory if sink.is_used else module.weight.grad, to_weight)


@pytest.mark.parametrize(("num_rows", "is_asked"), [(2, True), (40, False)])
def test_factors_are_read_if_they_are_smaller_than_the_product(num_rows, is_asked, monkeypatch):
    module = nn.Linear(64, 32)
    sink: Any = RecordingGradSink(module.weight)
    asked = list[int]()

    def is_bounded(rows, inputs):
        asked.append(len(rows))
        return False

    monkeypatch.setattr(sink, "is_bounded", is_bounded)
    with InterceptFunctions(in_place_grad_functions(GradSinks({id(module.weight): sink}))):
        run_backward([module(torch.randn(num_rows, 64)).square().sum()], [None])
    assert asked == ([num_rows] if is_asked else [])
