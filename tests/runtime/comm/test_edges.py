"""Skip connections over stages: the bytes that are sent, how long values are stored, and who reads inputs."""

import pytest
import torch
from torch import nn

from counterpoint.training.batches.global_batch import microbatches_to_read
from tests.runtime.local_ranks import WIDTH, build_local_ranks, make_batch


class SkipModel(nn.Module):
    """Each of the last layers adds the output of one of the first; the model adds its input to the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        values = [x]
        for index, layer in enumerate(self.layers):
            values.append(torch.tanh(layer(values[-1])) + (values[6 - index] if index > 2 else 0.0))
        return values[-1] + x


def skip_model():
    torch.manual_seed(0)
    return SkipModel().double()


class CountingFabric:
    """A fabric that counts the bytes sent, without the masks that say which values need a gradient."""

    def __init__(self, fabric):
        self.fabric, self.sent = fabric, 0

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def send(self, peer, label, tensors):
        self.sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors[1:])
        self.fabric.send(peer, label, tensors)


PLANS = ["pipeline(2)", "pipeline(3)", "pipeline(6)", "pipeline(2, schedule=zero_bubble)",
         "pipeline(3, schedule=interleaved, chunks_per_stage=2)", "pipeline(3, replicas=(1,2,1))"]  # fmt: skip


@pytest.mark.long(quick=["pipeline(3, replicas=(1,2,1))", "pipeline(3)", "pipeline(2, schedule=zero_bubble)"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_sends_the_bytes_of_the_cost_estimate(plan):
    with build_local_ranks(plan, model=skip_model(), num_microbatches=4) as local_ranks:
        for rank in local_ranks.ranks.values():
            rank.interpreter.communication.fabric = CountingFabric(rank.interpreter.fabric)
        local_ranks.step(0, make_batch(4))
        expected = [rank.other_bytes for rank in local_ranks.compiled.cost.ranks]
        assert [rank.interpreter.communication.fabric.sent for rank in local_ranks.ranks.values()] == expected


def num_stored(rank):
    executor = rank.interpreter.executor
    return len(executor.values), len(executor.grads), len(executor.saved)


@pytest.mark.parametrize(
    "plan", ["pipeline(3)", "pipeline(3, schedule=interleaved, chunks_per_stage=2)", "zero(2, level=3)"]
)
def test_after_a_step_no_value_and_no_gradient_is_stored(plan):
    with build_local_ranks(plan, model=skip_model(), num_microbatches=4) as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        assert {num_stored(rank) for rank in local_ranks.ranks.values()} == {(0, 0, 0)}


def test_a_middle_stage_does_not_see_values_that_skip_it():
    with build_local_ranks("pipeline(3)", model=skip_model()) as local_ranks:
        local_ranks.step(0, make_batch(1))
        values = local_ranks.compiled.model.values
        segment = local_ranks.ranks[1].interpreter.executor.by_first[2][1]
        assert [values[at].producer for at in segment.inputs] == [1]
        assert [values[at].consumers for at in segment.outputs] == [(4,)]


def test_only_stages_that_read_inputs_or_targets_get_them():
    with build_local_ranks("pipeline(6)", model=skip_model(), num_microbatches=2) as local_ranks:
        program, input_blocks = local_ranks.compiled.program, local_ranks.compiled.model.input_blocks
        assert input_blocks == {0, 5}
        assert [microbatches_to_read(program, [rank], input_blocks) for rank in range(6)] == [
            [0, 1],
            [],
            [],
            [],
            [],
            [0, 1],
        ]
