"""Versions of weights: each in memory of its own, and no more of them than are read."""

import torch
from torch import nn

from counterpoint.runtime.params.flat_layout import WHOLE, build_layouts
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.weight_versions import WeightVersions


def params():
    return {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}


def flattened(named):
    layout_params = [(name, tuple(param.shape), param.dtype, 0) for name, param in named.items()]
    (layout,) = build_layouts(layout_params, split_size=1)
    return [FlatParams(layout, named, WHOLE)]


def update(named, versions, times):
    """Add 1 to every parameter, in place as optimizers do, so many times."""
    for _ in range(times):
        versions.advance(is_new=True)
        with torch.no_grad():
            for param in named.values():
                param += 1


def test_a_version_has_the_values_of_so_many_updates_ago():
    for is_flat in (False, True):
        named = params()
        versions = WeightVersions(named, flattened(named) if is_flat else [], 3)
        update(named, versions, 5)
        assert [versions.read(-back)["a"][1, 2].item() for back in range(3)] == [5.0, 4.0, 3.0]
        assert named["b"][3].item() == 5.0


def test_a_skipped_update_counts_the_newest_version_twice_without_a_copy():
    named = params()
    versions = WeightVersions(named, [], 3)
    update(named, versions, 2)
    versions.advance(is_new=False)
    assert [versions.read(-back)["b"][0].item() for back in range(3)] == [2.0, 2.0, 1.0]
    assert versions.read(0) is versions.read(-1)


def test_versions_reuse_as_many_buffers_as_there_are_versions():
    named = params()
    versions = WeightVersions(named, [], 2)
    addresses = set()
    for _ in range(6):
        update(named, versions, 1)
        addresses.add(named["a"].data_ptr())
    assert len(addresses) == 2


def test_a_backward_uses_the_weights_of_its_forward_after_an_in_place_update():
    named = params()
    versions = WeightVersions(named, [], 2)
    update(named, versions, 1)
    x = torch.ones(3, requires_grad=True)
    out = (versions.read(0)["a"] @ x).sum()
    update(named, versions, 1)
    out.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    versions.fold_grads(-1)
    assert named["a"].grad is not None
    assert float(named["a"].grad.sum()) == 6.0
    assert versions.read(-1)["a"].grad is None
