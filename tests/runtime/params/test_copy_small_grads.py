"""Small gradients are copied into a flat one together."""

import pytest
import torch
from torch import nn

from counterpoint.runtime.params import flat_grads as flat_grads_module
from counterpoint.runtime.params.flat_layout import ParamSlot

SLOTS = [
    ParamSlot("a", (2,), 0, 0),
    ParamSlot("b", (1, 2), 2, 0),
    ParamSlot("c", (1,), 4, 0),
    ParamSlot("d", (2,), 5, 0),
]


def with_grads(**gradients):
    """Return parameters with these gradients, and a flat gradient of minus ones for all of them."""
    params = {slot.name: nn.Parameter(torch.zeros(slot.shape)) for slot in SLOTS}
    for name, gradient in gradients.items():
        params[name].grad = gradient
    return params, torch.full((7,), -1.0)


def copy(params, flat, slots=SLOTS):
    """Return the names of the copied gradients, and the flat gradient."""
    first: set[str] = set()
    second: set[str] = set()
    flat_grads_module.copy_small_grads(slots, params, flat, (first, second))
    assert first == second
    return sorted(first), flat.tolist()


def test_contiguous_gradients_are_copied_in_the_order_of_the_layout():
    params, flat = with_grads(a=torch.ones(2), b=torch.full((1, 2), 2.0), d=torch.full((2,), 4.0))
    result = copy(params, flat, SLOTS[::-1])
    assert result == (["a", "b", "d"], [1.0, 1.0, 2.0, 2.0, -1.0, 4.0, 4.0])
    assert all(param.grad is None for param in params.values())


def test_each_contiguous_run_is_one_call(monkeypatch):
    params, flat = with_grads(**{slot.name: torch.ones(slot.shape) for slot in SLOTS})
    calls, cat = [], torch.cat

    def counted(parts, out):
        calls.append(len(parts))
        cat(parts, out=out)

    monkeypatch.setattr(torch, "cat", counted)
    copy(params, flat, [slot for slot in SLOTS if slot.name != "c"])
    assert calls == [2, 1]


@pytest.mark.parametrize(
    "gradient", [torch.ones(2).to_sparse(), torch.ones(2, requires_grad=True)], ids=["sparse", "with a history"]
)
def test_sparse_gradients_and_those_with_a_graph_stay(gradient):
    params, flat = with_grads(a=gradient, c=torch.ones(1))
    assert copy(params, flat) == (["c"], [-1.0, -1.0, -1.0, -1.0, 1.0, -1.0, -1.0])
    assert params["a"].grad is gradient


def test_a_gradient_that_is_not_contiguous_is_copied_correctly():
    gradient = torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, :1].T
    params, flat = with_grads(b=gradient)
    assert copy(params, flat)[1][2:4] == [1.0, 2.0]


def test_nothing_is_copied_without_gradients():
    assert copy(*with_grads()) == ([], [-1.0] * 7)
