"""Where a model draws and along which dim its samples are, found by running it, without a trace left."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.runtime.rng.draw_sites import (
    DrawSite,
    RecordedDraw,
    describe_unkeyed,
    find_batch_dim,
    find_draw_sites,
)
from tests.mistakes.documented import documented_messages


def test_the_samples_of_a_square_batch_are_found_along_the_right_dim():
    layers = nn.Sequential(nn.Dropout(0.5), nn.Flatten(0, 1), nn.Dropout(0.5))
    sites = find_draw_sites(SequenceFirst(layers[0]), torch.randn(4, 4, 3))
    assert sites.batch_dims == {DrawSite("layer", 0): 1}
    sites = find_draw_sites(layers, torch.randn(4, 4, 3))
    assert sites.batch_dims == {DrawSite("0", 0): 0, DrawSite("2", 0): 0}
    assert not sites.unkeyed


class SequenceFirst(nn.Module):
    """A layer that has the samples along dim 1, and then both dims as one."""

    def __init__(self, layer, *, is_flat=False):
        super().__init__()
        self.layer, self.is_flat = layer, is_flat

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.layer(x.flatten(0, 1) if self.is_flat else x)


def test_samples_that_are_not_adjacent_are_told_from_those_that_are():
    sites = find_draw_sites(SequenceFirst(nn.Dropout(0.5), is_flat=True), torch.randn(4, 4, 3))
    assert not sites.batch_dims
    assert sites.unkeyed == {"layer": "a draw of the shape (16, 3) for 4 samples"}


@pytest.mark.parametrize(
    ("once", "twice", "expected"),
    [((2, 5), (4, 5), 0), ((5, 2), (5, 4), 1), ((3,), (3,), None), ((), (), None), ((2, 0), (4, 0), 0)],
)
def test_the_dim_that_doubles_is_the_batch_dim(once, twice, expected):
    assert find_batch_dim(RecordedDraw(once, None), RecordedDraw(twice, None), 2) == expected


@pytest.mark.parametrize(
    ("once", "twice"), [((2, 2), (4, 4)), ((2,), (3,)), ((2,), (4, 1)), ((6,), (12,)), ((3,), (6,))]
)
def test_a_shape_of_another_kind_is_unknown(once, twice):
    with pytest.raises(LookupError):
        find_batch_dim(RecordedDraw(once, None), RecordedDraw(twice, None), 2)


class Stateful(nn.Module):
    """It changes a buffer, keeps values, differentiates in its forward, and uses Python's generator."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.kept, self.drop = nn.BatchNorm1d(3), nn.Linear(3, 3), [], nn.Dropout(0.5)

    def forward(self, x):
        x = self.linear(self.norm(x))
        self.kept.append(x)
        torch.autograd.grad(x.sum(), self.linear.weight, create_graph=True)
        return self.drop(x) * random.random()


def test_a_model_is_as_it_was_before_it_was_run():
    model = Stateful()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inputs = torch.randn(5, 3)
    states = random.getstate(), torch.get_rng_state()
    sites = find_draw_sites(model, inputs)
    assert sites.batch_dims == {DrawSite("drop", 0): 0}
    assert sites.unkeyed == {"drop": "a generator of Python or numpy"}
    assert model.kept == []
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


class FixedBatch(nn.Module):
    """It takes batches of one size only."""

    def forward(self, x):
        return F.dropout(x.view(5, 3), 0.5)


def test_nothing_is_known_of_a_model_that_takes_one_size_of_batch():
    model = FixedBatch()
    sites = find_draw_sites(model, torch.randn(5, 3))
    assert not sites.batch_dims
    assert describe_unkeyed(model, *next(iter(sites.unkeyed.items())), "data(2)", 2).startswith(
        "the random numbers of FixedBatch come from a forward that does not run on 2 or 4 samples (shape '[5, 3]' is"
    )


class Multinomial(nn.Module):
    """It draws by a function that is not known to draw by sample."""

    def forward(self, x):
        return x * torch.multinomial(torch.ones_like(x), x.shape[-1])


def test_the_warning_of_a_module_is_the_documented_one():
    model = nn.Sequential(nn.Linear(3, 3), Multinomial())
    sites = find_draw_sites(model, torch.randn(5, 3))
    warnings = [describe_unkeyed(model, call, what, "data(2)", 2) for call, what in sites.unkeyed.items()]
    assert warnings == documented_messages("Noise in a model that depends on the number of microbatches")
