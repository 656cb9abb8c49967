"""A parameter without a gradient in some step: every plan raises the same error, or uses the same zeros."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError, PlanError
from counterpoint.plan.plan import Plan
from counterpoint.runtime.commit.step_commit import decode_report, encode_report, find_unused_params, make_step_report
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.testing.parity import relative_difference
from tests.covering import each_value_once
from tests.runtime.local_ranks import WIDTH, build_local_ranks, chain

PLANS = ["data(2)", "data(4)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)", "server(2)",
         "pipeline(2) * data(2)", "pipeline(2, replicas=(2,1))"]  # fmt: skip
ASP = ["asp(2)", "data(2) * asp(2)"]
TEXT = (
    "no gradient reached 0.branch.weight, 0.branch.bias: the loss does not depend on them; freeze parameters that are "
    "not trained with requires_grad_(False), use their output in the loss of every step (this was step 1), or pass "
    "unused_parameters='skip' to leave them as they are in such a step, or 'zero' to use gradients of zeros"
)


class DataDependentBranch(nn.Module):
    """Takes its branch only where the microbatch's sum is positive."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.branch(x) if float(x.sum()) > 0 else x


def branching_model():
    torch.manual_seed(1)
    return nn.Sequential(DataDependentBranch(), *chain(3)).double()


def signed_batch(signs, number):
    """One sample or two for each of four microbatches, all positive or negative; a missing sign is an empty one."""
    draw = torch.Generator().manual_seed(number)
    ranges = tuple(split_batch(2 * len(signs) if len(signs) == 4 else len(signs), 4))
    inputs = torch.cat([sign * torch.rand(stop - start, WIDTH, generator=draw)
                        for sign, (start, stop) in zip(signs, ranges, strict=False)])  # fmt: skip
    return SlicedBatch((inputs.double(), torch.rand(len(inputs), WIDTH, generator=draw).double()), ranges)


def build_branching_local_ranks(plan, **options):
    """Return ranks of which each microbatch takes the branch or not, as a batch of its own."""
    return build_local_ranks(
        plan, num_microbatches=4 // Plan.parse(plan).global_num_microbatches, model=branching_model(),
        cross_sample="accept", **options,
    )  # fmt: skip


def train(plan, steps, **options):
    """Return the parameters after steps, each given by the signs of its microbatches."""
    with build_branching_local_ranks(plan, **options) as local_ranks:
        for number, signs in enumerate(steps):
            local_ranks.step(number, signed_batch(signs, number))
        local_ranks.export_weights()
        return {name: param.detach().clone() for name, param in local_ranks.model.named_parameters()}


def max_difference(params, others):
    return max(relative_difference(params[name], others[name]) for name in others)


def copy_weights(local_ranks):
    """Return copies of what every rank stores of every weight."""
    stores = [
        unit_params for rank in local_ranks.ranks.values() for unit_params in rank.interpreter.store.units.values()
    ]
    return [
        tensor.detach().clone()
        for unit_params in stores
        for tensor in ([flat_params.local_shard for flat_params in unit_params.flat_params]
                       or unit_params.params.values())
    ]  # fmt: skip


@pytest.mark.long(quick=["data(4)-0.1"])
@pytest.mark.parametrize(("plan", "clip_norm"), each_value_once(PLANS, [None, 0.1]))
def test_zeros_are_the_gradient_of_a_step_that_does_not_use_a_parameter_under_every_plan(plan, clip_norm):
    """Momentum and weight decay continue, in a single process without flat gradients as elsewhere."""
    steps = [(1, 1, 1, 1), (-1, -1, -1, -1), (-1, -1, -1), (-1, 1, -1, -1)]
    options = {"unused_parameters": "zero", "clip_norm": clip_norm}
    mine, solo = (train(local_ranks, steps, **options) for local_ranks in (plan, "solo"))
    assert max_difference(mine, solo) <= 1e-12
    assert not torch.equal(solo["0.branch.weight"], train("solo", steps[:1], **options)["0.branch.weight"])


SKIP_PLANS = ["solo", *PLANS, "tree(2)", "data(2, update=sharded)"]
OPTIMIZERS = {
    "AdamW": partial(optim.AdamW, lr=1e-2),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adafactor": optim.Adafactor,
}
STEPS = [(-1, -1, -1, -1), (1, 1, 1, 1), (-1, -1, -1, -1), (-1, -1, -1), (-1, 1, -1, -1), (1, 1)]


def train_plain(steps, optimizer, clip_norm):
    """Return the parameters of a plain loop, which adds up the gradients of a step's microbatches."""
    model = branching_model()
    built = optimizer(model.parameters())
    for number, signs in enumerate(steps):
        built.zero_grad()
        batch = signed_batch(signs, number)
        count = sum(batch.sizes.values())
        for micro, size in batch.sizes.items():
            if size:
                (F.mse_loss(model(batch.inputs(micro)), batch.targets(micro)) * (size / count)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)
        built.step()
    return {name: param.detach() for name, param in model.named_parameters()}, built.state_dict()["state"]


@pytest.mark.long(quick=["data(2)-SGD-0.1", "pipeline(2)-AdamW-None"])
@pytest.mark.parametrize(("plan", "name", "clip_norm"), each_value_once(SKIP_PLANS, [*OPTIMIZERS], [None, 0.1]))
def test_a_parameter_without_a_gradient_in_a_step_is_left_alone_as_in_plain_torch(plan, name, clip_norm):
    """Its momentum, decay and step count are those of the steps that used it; the first one does not."""
    optimizer = OPTIMIZERS[name]
    options = {"unused_parameters": "skip", "clip_norm": clip_norm, "optimizer": optimizer}
    expected, expected_state = train_plain(STEPS, optimizer, clip_norm)
    with build_branching_local_ranks(plan, **options) as local_ranks:
        for number, signs in enumerate(STEPS):
            local_ranks.step(number, signed_batch(signs, number))
        state = local_ranks.full_optimizer_state()["state"]
        local_ranks.export_weights()
        params = {name: param.detach().clone() for name, param in local_ranks.model.named_parameters()}
    assert max_difference(params, expected) <= 1e-12
    for index, values in expected_state.items():
        assert state[index].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(state[index][key], value, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("plan", ["asp(2)", "data(2, staleness=1)", "data(2, compress=topk:0.2)"])
def test_parameters_cannot_be_skipped_where_gradients_are_those_of_several_steps(plan):
    with (
        pytest.raises(PlanError, match=r"^unused_parameters='skip' leaves a parameter .* or unused_parameters='zero'$"),
        build_branching_local_ranks(plan, unused_parameters="skip"),
    ):
        pass


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_that_only_some_microbatches_use_is_trained_as_in_a_single_process(plan):
    """Missing gradients on some replicas are reported once; a single replica has some in every step."""
    steps = [(1, -1, -1, -1), (-1, -1, -1, 1), (-1, 1, -1), (1, 1, 1, 1)]
    solo = train("solo", steps)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert max_difference(train(plan, steps), solo) <= 1e-12
    texts = [str(local_ranks.message).partition(" on rank")[0] for local_ranks in warned]
    assert texts == ["0.branch.weight, 0.branch.bias got no gradient"] * (plan != "pipeline(2)")


def test_a_rank_without_samples_causes_no_warning():
    assert train("data(4)", [(1, 1)]).keys() == train("solo", [(1, 1)]).keys()


@pytest.mark.long(quick=["pipeline(2, replicas=(2,1))", "zero(2, level=3)"])
@pytest.mark.parametrize("plan", ["solo", *PLANS, *ASP])
def test_a_later_step_that_does_not_use_a_parameter_raises_the_same_error_under_every_plan_and_is_not_applied(plan):
    with build_branching_local_ranks(plan) as local_ranks:
        local_ranks.step(0, signed_batch((1, 1, 1, 1), 0))
        before = copy_weights(local_ranks)
        with pytest.raises(DataError) as caught:
            local_ranks.step(1, signed_batch((-1, -1, -1, -1), 1))
        assert str(caught.value) == TEXT
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(copy_weights(local_ranks), before, strict=True))


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=1)", "server(2)", "asp(2)"])
def test_a_step_without_samples_changes_nothing(plan):
    with build_branching_local_ranks(plan) as local_ranks:
        local_ranks.step(0, signed_batch((1, 1, 1, 1), 0))
        before = copy_weights(local_ranks)
        local_ranks.step(1, SlicedBatch((torch.zeros(0, WIDTH).double(),) * 2, ((0, 0),) * 4))
        local_ranks.step(2, SlicedBatch((torch.zeros(0, WIDTH).double(),) * 2, ((0, 0),) * 4))
        after = copy_weights(local_ranks)
    if plan != "asp(2)":  # a worker gets the weights that the other has changed meanwhile
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))
    assert torch.equal(after[-1], before[-1])


def test_a_parameter_is_unused_if_every_rank_that_computes_with_it_reports_it():
    reports = [
        make_step_report({}, {}, 0.0, ("a", "shared 'one'")),
        make_step_report({}, {}, 0.0, ("shared 'one'",)),
        make_step_report({}, {}, 0.0),
    ]
    warned = [decode_report(encode_report(report), report.missing_grads) for report in reports]
    assert warned == reports
    assert find_unused_params(warned, {"a": (0, 2), "shared 'one'": (0, 1), "b": (2,)}) == ("shared 'one'",)
