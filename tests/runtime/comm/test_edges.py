"""Values that skip stages: what passes on a fabric, what is kept for how long, who reads the inputs."""

import pytest
import torch
from torch import nn

from counterpoint.training.batches.global_batch import microbatches_to_read
from tests.runtime.local_ranks import WIDTH, build_team, make_batch


class Ladder(nn.Module):
    """Each of the last layers also adds what one of the first has made; the last one reads the input again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        made = [x]
        for place, layer in enumerate(self.layers):
            made.append(torch.tanh(layer(made[-1])) + (made[6 - place] if place > 2 else 0.0))
        return made[-1] + x


def ladder():
    torch.manual_seed(0)
    return Ladder().double()


class Scale:
    """A fabric that weighs what is sent, but for the byte by which a message says of a value that it is learned."""

    def __init__(self, fabric):
        self.fabric, self.sent = fabric, 0

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def send(self, peer, label, tensors):
        self.sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors[1:])
        self.fabric.send(peer, label, tensors)


PLANS = ["pipeline(2)", "pipeline(3)", "pipeline(6)", "pipeline(2, schedule=zero_bubble)",
         "pipeline(3, schedule=interleaved, chunks_per_stage=2)", "pipeline(3, replicas=(1,2,1))"]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_messages_of_a_step_weigh_what_the_forecast_says(plan):
    with build_team(plan, model=ladder(), num_microbatches=4) as one:
        for rank in one.ranks.values():
            rank.interpreter.communication.fabric = Scale(rank.interpreter.fabric)
        one.step(0, make_batch(4))
        said = [rank.other_bytes for rank in one.compiled.cost.ranks]
        assert [rank.interpreter.communication.fabric.sent for rank in one.ranks.values()] == said


def kept(rank):
    compute = rank.interpreter.compute
    return len(compute.values), len(compute.gradients), len(compute.tapes)


@pytest.mark.parametrize(
    "plan", ["pipeline(3)", "pipeline(3, schedule=interleaved, chunks_per_stage=2)", "zero(2, level=3)"]
)
def test_behind_a_step_no_value_and_no_gradient_is_kept(plan):
    with build_team(plan, model=ladder(), num_microbatches=4) as one:
        one.step(0, make_batch(one.global_num_microbatches))
        assert {kept(rank) for rank in one.ranks.values()} == {(0, 0, 0)}


def test_a_stage_in_the_middle_has_nothing_of_what_passes_it_by():
    with build_team("pipeline(3)", model=ladder()) as one:
        one.step(0, make_batch(1))
        made = one.compiled.model.values
        segment = one.ranks[1].interpreter.executor.by_first[2][1]
        assert [made[at].producer for at in segment.inputs] == [1]
        assert [made[at].consumers for at in segment.outputs] == [(4,)]


def test_only_stages_that_read_inputs_or_targets_are_fed():
    with build_team("pipeline(6)", model=ladder(), num_microbatches=2) as one:
        program, fed = one.compiled.program, one.compiled.model.input_blocks
        assert fed == {0, 5}
        assert [microbatches_to_read(program, [rank], fed) for rank in range(6)] == [[0, 1], [], [], [], [], [0, 1]]
