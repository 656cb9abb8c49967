"""A model in layers, detached between them, trains and evaluates as the model itself does."""

import pytest
import torch
from torch import nn

from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.tracing.traced import TracedPartition
from tests.covering import each_value_once
from tests.partitioning.models import ALL, cnn, gpt, long_skip
from tests.partitioning.segment_runs import in_segments, seed, worst_of


@pytest.mark.long(quick=["perceptron-blocks", "long_skip-tensor_parallel"])
@pytest.mark.parametrize(("name", "granularity"), each_value_once([*ALL], ["blocks", "tensor_parallel"]))
def test_losses_gradients_and_buffers_equal_those_of_the_model(name, granularity):
    model, inputs = ALL[name]()
    assert worst_of(partition_model(model, inputs, granularity=granularity), model, inputs) <= 1e-12


@pytest.mark.long(quick=["perceptron", "cnn", "long_skip", "changes_in_place"])
@pytest.mark.parametrize("name", ALL)
def test_evaluation_in_layers_equals_evaluation(name):
    model, inputs = ALL[name]()
    assert worst_of(partition_model(model, inputs, granularity="blocks"), model, inputs, training=False) <= 1e-12


@pytest.mark.long(quick=["bounds0"])
@pytest.mark.parametrize("bounds", [(0, 16), (0, 1, 16), (0, 6, 16), (0, 3, 4, 15, 16)])
def test_any_run_of_layers_may_be_one_segment(bounds):
    model, inputs = gpt()
    assert worst_of(partition_model(model, inputs, granularity="blocks"), model, inputs, bounds) <= 1e-12


def test_a_model_that_is_not_split_runs_unchanged():
    model, inputs = gpt()
    partitioned = partition_model(model, inputs, granularity="whole")
    model.zero_grad()
    seed("")
    values = partitioned.segment(0, 1, training=True)(partitioned.flatten_inputs(inputs).values, {}, {}, seed)
    assert torch.equal(values[0].detach(), in_segments(TracedPartition(model, inputs), model, inputs, (0, 16))[3][0])


def test_batch_norm_counts_its_batches_in_the_buffers_it_was_given():
    model, inputs = cnn()
    *_, buffers, _ = in_segments(TracedPartition(model, inputs), model, inputs)
    assert int(buffers["1.num_batches_tracked"]) == 1
    assert int(model[1].num_batches_tracked) == 0


def test_a_layer_takes_only_what_it_reads_itself():
    partitioned = TracedPartition(*long_skip())
    made = partitioned.values(training=True)
    parts = [partitioned.segment(index, index + 1, training=True) for index in range(5)]
    assert [[made[at].producer for at in part.inputs] for part in parts] == [[-1], [0], [1], [2], [-1, -1, 0, 3]]
    assert [[made[at].consumers for at in part.outputs] for part in parts] == [[(1, 4)], [(2,)], [(3,)], [(4,)], []]


def test_a_tied_parameter_has_its_first_name_in_both_of_its_layers():
    partitioned = TracedPartition(*gpt())
    assert "tok.weight" in partitioned.spec.blocks[0].params
    assert "tok.weight" in partitioned.spec.blocks[-1].params
    assert partitioned.spec.units[0, 3] == ("tok.weight",)


def test_the_output_gets_back_its_nesting():
    model, inputs = long_skip()
    *_, values = in_segments(partitioned := TracedPartition(model, inputs), model, inputs)
    output = partitioned.unflatten_output(values)
    assert list(output) == ["z", "late", "nothing", "three"]
    assert (output["nothing"], output["three"]) == (None, 3)


@pytest.mark.long(quick=["1"])
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_another_number_of_samples_is_traced_when_it_comes(samples):
    model, (tokens,) = gpt()
    partitioned = TracedPartition(model, (tokens,))
    assert worst_of(partitioned, model, (torch.randint(0, 11, (samples, tokens.shape[1])),)) <= 1e-12


def test_partitioning_leaves_no_mark_on_the_model():
    model, inputs = cnn()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for granularity in ("whole", "blocks", "tensor_parallel"):
        partition_model(model, inputs, granularity=granularity)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert [model.training, model[1].training] == [True, False]


def test_a_chain_may_do_what_cannot_be_traced():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else self.layer(x * 2)

    model, inputs = nn.Sequential(Odd(), Odd(), nn.Sequential(nn.ReLU(), Odd())), (torch.randn(3, 4),)
    partitioned = partition_model(model, inputs, granularity="blocks")
    assert [block.name for block in partitioned.spec.blocks] == ["0", "1", "2.1"]
    assert worst_of(partitioned, model, inputs) <= 1e-12
