"""Weights of several versions: each in memory of its own, and no more of them than are read."""

import torch
from torch import nn

from counterpoint.runtime.params.flat_layout import WHOLE, build_layouts
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.weight_versions import WeightVersions


def params():
    return {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}


def in_arena(named):
    described = [(name, tuple(param.shape), param.dtype, 0) for name, param in named.items()]
    (layout,) = build_layouts(described, may_split_params=True)
    return [FlatParams(layout, named, WHOLE)]


def updated(named, editions, times):
    """Add 1 to every parameter, in place as optimizers do, so many times."""
    for _ in range(times):
        editions.advance(is_new=True)
        with torch.no_grad():
            for param in named.values():
                param += 1


def test_a_version_reads_as_it_stood_so_many_updates_ago():
    for housed in (False, True):
        named = params()
        editions = WeightVersions(named, in_arena(named) if housed else [], 3)
        updated(named, editions, 5)
        assert [editions.read(-back)["a"][1, 2].item() for back in range(3)] == [5.0, 4.0, 3.0]
        assert named["b"][3].item() == 5.0


def test_an_update_that_is_left_out_makes_the_newest_weights_one_older_without_a_copy():
    named = params()
    editions = WeightVersions(named, [], 3)
    updated(named, editions, 2)
    editions.advance(is_new=False)
    assert [editions.read(-back)["b"][0].item() for back in range(3)] == [2.0, 2.0, 1.0]
    assert editions.read(0) is editions.read(-1)


def test_versions_take_turns_in_as_much_memory_as_there_are_versions():
    named = params()
    editions = WeightVersions(named, [], 2)
    seen = set()
    for _ in range(6):
        updated(named, editions, 1)
        seen.add(named["a"].data_ptr())
    assert len(seen) == 2


def test_a_backward_sees_the_weights_of_its_forward_after_an_update_in_place():
    named = params()
    editions = WeightVersions(named, [], 2)
    updated(named, editions, 1)
    x = torch.ones(3, requires_grad=True)
    out = (editions.read(0)["a"] @ x).sum()
    updated(named, editions, 1)
    out.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    editions.fold_grads(-1)
    assert named["a"].grad is not None
    assert float(named["a"].grad.sum()) == 6.0
    assert editions.read(-1)["a"].grad is None
