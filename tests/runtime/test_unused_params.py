"""A parameter that no gradient reaches in some step: every plan says so, or every plan gives it zeros."""

import warnings

import pytest
import torch
from torch import nn

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.step_commit import decode_report, encode_report, find_unused_params, make_step_report
from counterpoint.testing.parity import relative_difference
from tests.runtime.local_ranks import WIDTH, build_team, chain

PLANS = ["data(2)", "data(4)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)", "server(2)",
         "pipeline(2) * data(2)", "pipeline(2, replicas=(2,1))"]  # fmt: skip
ASP = ["asp(2)", "data(2) * asp(2)"]
TEXT = (
    "no gradient reached 0.branch.weight, 0.branch.bias: the loss does not depend on them; freeze what is not trained "
    "with requires_grad_(False), use its output in the loss of every step (this was step 1), or pass unused_parameters='zero' to "
    "train on with gradients of zeros"
)


class Moody(nn.Module):
    """Takes its branch only where the microbatch's sum is positive."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.branch(x) if float(x.sum()) > 0 else x


def moody():
    torch.manual_seed(1)
    return nn.Sequential(Moody(), *chain(3)).double()


def fed(signs, number):
    """One sample or two for each of four microbatches, all positive or negative; a missing sign is an empty one."""
    draw = torch.Generator().manual_seed(number)
    places = tuple(split_batch(2 * len(signs) if len(signs) == 4 else len(signs), 4))
    inputs = torch.cat([sign * torch.rand(stop - start, WIDTH, generator=draw)
                        for sign, (start, stop) in zip(signs, places, strict=False)])  # fmt: skip
    return SlicedBatch((inputs.double(), torch.rand(len(inputs), WIDTH, generator=draw).double()), places)


def moody_team(plan, **options):
    return build_team(plan, num_microbatches=4 // Plan.parse(plan).global_num_microbatches, model=moody(), **options)


def trained(plan, steps, **options):
    """Return the parameters after steps, each given by the signs of its microbatches."""
    with moody_team(plan, **options) as one:
        for number, signs in enumerate(steps):
            one.step(number, fed(signs, number))
        one.export_weights()
        return {name: param.detach().clone() for name, param in one.model.named_parameters()}


def worst(mine, theirs):
    return max(relative_difference(mine[name], theirs[name]) for name in theirs)


def held(one):
    """What every rank keeps of every weight."""
    stores = [store for rank in one.ranks.values() for store in rank.interpreter.store.units.values()]
    return [
        tensor.detach().clone()
        for store in stores
        for tensor in ([arena.weights if arena.kept is None else arena.kept for arena in store.arenas]
                       or store.params.values())
    ]  # fmt: skip


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("plan", PLANS)
def test_zeros_are_the_gradient_of_a_step_that_does_not_use_a_parameter_under_every_plan(plan, clip_norm):
    """Momentum and weight decay go on, as much under solo, which has no buffer of gradients, as elsewhere."""
    steps = [(1, 1, 1, 1), (-1, -1, -1, -1), (-1, -1, -1), (-1, 1, -1, -1)]
    options = {"unused_parameters": "zero", "clip_norm": clip_norm}
    mine, solo = (trained(one, steps, **options) for one in (plan, "solo"))
    assert worst(mine, solo) <= 1e-12
    assert not torch.equal(solo["0.branch.weight"], trained("solo", steps[:1], **options)["0.branch.weight"])


@pytest.mark.parametrize("plan", PLANS)
def test_a_parameter_that_only_some_microbatches_use_is_trained_as_under_solo(plan):
    """Where it got no gradient on some replicas, that is said once; a lone replica has some in every step."""
    steps = [(1, -1, -1, -1), (-1, -1, -1, 1), (-1, 1, -1), (1, 1, 1, 1)]
    solo = trained("solo", steps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert worst(trained(plan, steps), solo) <= 1e-12
    texts = [str(one.message).partition(" on rank")[0] for one in told]
    assert texts == ["0.branch.weight, 0.branch.bias got no gradient"] * (plan != "pipeline(2)")


def test_a_rank_without_samples_is_not_told_to_miss_gradients():
    assert trained("data(4)", [(1, 1)]).keys() == trained("solo", [(1, 1)]).keys()


@pytest.mark.parametrize("plan", ["solo", *PLANS, *ASP])
def test_a_later_step_that_does_not_use_a_parameter_is_refused_alike_by_every_plan_and_applied_by_none(plan):
    with moody_team(plan) as one:
        one.step(0, fed((1, 1, 1, 1), 0))
        before = held(one)
        with pytest.raises(DataError) as caught:
            one.step(1, fed((-1, -1, -1, -1), 1))
        assert str(caught.value) == TEXT
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(held(one), before, strict=True))


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=1)", "server(2)", "asp(2)"])
def test_a_step_without_samples_changes_nothing(plan):
    with moody_team(plan) as one:
        one.step(0, fed((1, 1, 1, 1), 0))
        before = held(one)
        one.step(1, SlicedBatch((torch.zeros(0, WIDTH).double(),) * 2, ((0, 0),) * 4))
        one.step(2, SlicedBatch((torch.zeros(0, WIDTH).double(),) * 2, ((0, 0),) * 4))
        after = held(one)
    if plan != "asp(2)":  # a worker gets the weights that the other has changed meanwhile
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))
    assert torch.equal(after[-1], before[-1])


def test_a_parameter_is_unreached_where_every_rank_that_computes_with_it_says_so():
    ballots = [
        make_step_report({}, {}, 0.0, ("a", "shared 'one'")),
        make_step_report({}, {}, 0.0, ("shared 'one'",)),
        make_step_report({}, {}, 0.0),
    ]
    told = [decode_report(encode_report(ballot), ballot.missing_grads) for ballot in ballots]
    assert told == ballots
    assert find_unused_params(told, {"a": (0, 2), "shared 'one'": (0, 1), "b": (2,)}) == ("shared 'one'",)
