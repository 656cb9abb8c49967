"""Where a stage may begin inside a block: where one activation is all there is, and nothing forbids it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.partitioning.input_shapes import list_input_shapes
from counterpoint.partitioning.tracing.traced import TracedPartition
from tests.partitioning.models import gpt, residual
from tests.partitioning.segment_runs import with_samples


def places(model, inputs):
    return [layer.modules_started[0] for layer in TracedPartition(model, inputs).spec.layers if layer.can_start_stage]


def in_a_list(make):
    """Return a model of two such blocks between two layers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(make() for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    return Model(), (torch.randn(4, 6),)


class Two(nn.Module):
    """Two steps, each a norm and a layer added to what came in."""

    def __init__(self):
        super().__init__()
        self.norm1, self.layer1, self.norm2, self.layer2 = (
            nn.LayerNorm(6),
            nn.Linear(6, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 6),
        )

    def forward(self, x):
        x = x + self.layer1(self.norm1(x))
        return x + self.layer2(self.norm2(x))


def test_a_transformer_may_be_parted_between_attention_and_feed_forward():
    assert places(*gpt()) == ["pos", "blocks.0.norm2", "blocks.1.norm2", "head"]


@pytest.mark.long
def test_all_traces_have_the_same_places():
    model, inputs = gpt()
    partitioned = TracedPartition(model, inputs)
    ways = [(mode, with_samples(list_input_shapes(inputs), samples)) for mode in (True, False) for samples in (1, 4)]
    result = [partitioned.split_trace(training=training, input_shapes=shapes) for training, shapes in ways]
    assert len({layout.structure for layout in result}) == 1
    assert [len(layout.intra_block_starts) for layout in result] == [4] * 4


def test_a_block_of_two_steps_may_be_parted_between_them():
    assert places(*in_a_list(Two)) == ["blocks.0.norm2", "blocks.1.norm2"]


class Basic(nn.Module):
    """The block of a ResNet: two convolutions with batch norm, beside what came in."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def test_a_residual_block_has_no_place_inside_where_two_values_would_cross():
    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks = nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(Basic(4), Basic(4))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    assert places(ResNet(), (torch.randn(4, 1, 6, 6),)) == []


def test_links_of_a_chain_have_no_place_inside():
    assert places(*residual()) == []


class Shares(Two):
    """Both steps use one layer."""

    def __init__(self):
        super().__init__()
        self.layer2 = self.layer1


class Changes(Two):
    """The first step is changed in place by the second one, while a view of it is in use."""

    def forward(self, x):
        x = x + self.layer1(self.norm1(x))
        half = x[:, :3]
        return torch.cat((half, self.layer2(self.norm2(x.mul_(2.0)))), 1)[:, 3:]


class Draws(Two):
    """Both steps draw from the block's own random state."""

    def forward(self, x):
        x = x + F.dropout(self.layer1(self.norm1(x)), 0.5, self.training)
        return x + F.dropout(self.layer2(self.norm2(x)), 0.5, self.training)


@pytest.mark.parametrize("make", [Shares, Changes, Draws])
def test_there_is_no_place_where_something_prevents_it(make):
    assert places(*in_a_list(make)) == []
