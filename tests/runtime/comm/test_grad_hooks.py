"""Hooks that are put on and taken off: who else listens goes on to, and nothing is left."""

import pytest
import torch
from torch import nn

from counterpoint.runtime.comm.reducer import ToggledGradHooks


def test_others_hear_as_before_whether_it_listens_or_not():
    param, heard = nn.Parameter(torch.ones(2)), []
    param.register_post_accumulate_grad_hook(lambda _: heard.append("other"))
    listening = ToggledGradHooks([param], [lambda _: heard.append("own")])
    param.sum().backward()
    with listening.enabled():
        param.sum().backward()
    param.sum().backward()
    assert heard == ["other", "other", "own", "other"]


def test_it_listens_again_and_again_to_each_parameter_with_its_own_hook():
    params, heard = [nn.Parameter(torch.ones(1)) for _ in range(3)], []

    def hook(at):
        return lambda _: heard.append(at)

    listening = ToggledGradHooks(params, [hook(at) for at in range(3)])
    for param in reversed(params):
        with listening.enabled():
            param.sum().backward()
    assert heard == [2, 1, 0]


def test_no_hook_is_left_after_an_error_inside():
    param = nn.Parameter(torch.ones(1))
    heard: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), ToggledGradHooks([param], [heard.append]).enabled():
        raise ZeroDivisionError
    param.sum().backward()
    assert heard == []
    assert not param._post_accumulate_grad_hooks
