"""Toggled hooks: other hooks of a parameter keep working, and none is left."""

import pytest
import torch
from torch import nn

from counterpoint.runtime.comm.reducer import ToggledGradHooks


def test_other_hooks_are_called_whether_it_is_enabled_or_not():
    param, calls = nn.Parameter(torch.ones(2)), []
    param.register_post_accumulate_grad_hook(lambda _: calls.append("other"))
    grad_hooks = ToggledGradHooks([param], [lambda _: calls.append("own")])
    param.sum().backward()
    with grad_hooks.enabled():
        param.sum().backward()
    param.sum().backward()
    assert calls == ["other", "other", "own", "other"]


def test_it_can_be_enabled_repeatedly_with_a_hook_per_parameter():
    params, calls = [nn.Parameter(torch.ones(1)) for _ in range(3)], []

    def hook(at):
        return lambda _: calls.append(at)

    grad_hooks = ToggledGradHooks(params, [hook(at) for at in range(3)])
    for param in reversed(params):
        with grad_hooks.enabled():
            param.sum().backward()
    assert calls == [2, 1, 0]


def test_no_hook_is_left_after_an_error_inside():
    param = nn.Parameter(torch.ones(1))
    calls: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), ToggledGradHooks([param], [calls.append]).enabled():
        raise ZeroDivisionError
    param.sum().backward()
    assert calls == []
    assert not param._post_accumulate_grad_hooks
