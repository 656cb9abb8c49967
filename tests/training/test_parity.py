"""What `cp.parity` reports: which plans train a user's model as a plain loop does, and what differs where they do not."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def build(*middle, seed=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(num_steps=3, num_samples=16):
    random = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(num_samples, 6, generator=random, dtype=torch.float64),
            torch.randint(0, 3, (num_samples,), generator=random),
        )
        for _ in range(num_steps)
    ]


def report(model, *, loss=F.cross_entropy, optimizer=SGD, **options):
    return cp.parity(model, optimizer, loss, options.pop("batches", batches()), **options)


def result_of(parity, strategy):
    return next(plan for plan in parity.plans if plan.strategy == strategy)


def test_plans_equal_the_plain_loop_in_losses_weights_and_optimizer_state():
    parity = report(build(), optimizer=partial(torch.optim.AdamW, lr=1e-2), clip_norm=0.5, clip_value=0.1)
    assert parity.all_equal
    assert len(parity.compared) == 6
    assert all(plan.differences.keys() == {"losses", "weights", "optimizer"} for plan in parity.compared)
    assert all(plan.worst < 1e-13 for plan in parity.compared)


def test_an_optimizer_that_exists_keeps_its_parameters_and_no_state():
    model = build()
    before, optimizer = copy.deepcopy(model.state_dict()), SGD(model.parameters())
    assert report(model, optimizer=optimizer, strategies=["zero3(2)"]).all_equal
    assert not optimizer.state
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {id(param) for param in model.parameters()} == {id(param) for param in optimizer.param_groups[0]["params"]}


class Warming(nn.Module):
    """Computes with a count in an object."""

    def __init__(self):
        super().__init__()
        self.net, self.state = build(), SimpleNamespace(calls=0)

    def forward(self, x):
        self.state.calls += 1
        return self.net(x) * self.state.calls


def test_each_plan_begins_with_the_objects_of_a_model_as_they_were():
    """A plan had gone on from the count that the plain loop before it had left."""
    model = Warming()
    assert report(model, strategies=["data(2)", "zero1(2)"]).all_equal
    assert model.state.calls == 0


def test_batch_norm_is_named_and_synchronizing_it_makes_replicas_equal():
    parity = report(build(nn.BatchNorm1d(8)), strategies=["solo", "data(2)"])
    assert [parity.is_equal(plan) for plan in parity.plans] == [True, False]
    assert result_of(parity, "data(2)").causes[0].startswith("batch norm (1): each microbatch is normalized by its own")
    assert "buffers" in result_of(parity, "data(2)").differences
    assert report(build(nn.BatchNorm1d(8)), strategies=["data(2)"], batch_norm="sync").all_equal


def test_a_bias_before_a_batch_norm_is_not_compared_since_its_gradient_is_rounding():
    parity = report(build(nn.BatchNorm1d(8)), optimizer=partial(torch.optim.Adam, lr=0.1), strategies=["solo"])
    assert (parity.not_compared, parity.all_equal) == (("0.bias",), True)
    assert "not compared: elements of 0.bias whose gradient is zero but for rounding" in str(parity)


def test_a_model_that_draws_random_numbers_is_compared_with_one_rank():
    parity = report(build(nn.Dropout(0.5)), strategies=["solo", "tensor(2)"])
    assert parity.reference == "one rank"
    assert parity.all_equal


def test_dropout_is_the_same_under_every_plan():
    assert report(build(nn.Dropout(0.5)), strategies=["data(2)", "pipeline(2)", "zero3(2)"]).all_equal


class Multinomial(nn.Module):
    """Draws by a function whose numbers are not keyed by sample."""

    def forward(self, x):
        return x * (1 + torch.multinomial(torch.ones(len(x), 4), 1))


def test_random_numbers_that_are_not_keyed_by_sample_are_named():
    parity = report(build(Multinomial()), strategies=["data(2)"])
    assert not parity.all_equal
    cause = result_of(parity, "data(2)").causes[0]
    assert cause.startswith(
        "the random numbers of module '1' (Multinomial) come from torch's multinomial, which are not"
    )


def test_means_over_tokens_are_equal():
    batch = batches(1)[0]
    batch[1][:7] = -100
    assert report(build(), batches=[batch], strategies=["data(4)", "pipeline(2)"]).all_equal


@pytest.mark.parametrize(
    ("strategy", "cause"),
    [
        ("asp(2)", "the plan changes the results on purpose"),
        ("data(2, sync_every=2)", "the plan changes the results on purpose"),
        ("data(2, compress=fp16)", "gradients are compressed by fp16, which rounds them"),
        ("zero(2, level=3, quantized_weights=int8)", "gathered weights are compressed by int8, which rounds them"),
    ],
)
def test_what_a_plan_changes_on_purpose_is_said(strategy, cause):
    parity = report(build(), strategies=[strategy])
    assert not parity.all_equal
    assert parity.plans[0].causes[0].startswith(cause)
    assert f"{strategy}: {cause}" in str(parity)


def test_an_asynchronous_pipeline_is_compared_after_its_last_batch():
    plan = report(build(), strategies=["pipedream(2)"]).plans[0]
    assert 0 < plan.differences["losses"].value < 0.1
    assert plan.causes[0].startswith("the plan changes the results on purpose")


def test_a_plan_that_cannot_train_the_model_is_listed_with_the_reason():
    parity = report(build(), strategies=["pipeline(9)", "data(2)"])
    assert parity.all_equal
    assert "pipeline(9) cannot train this model: PlanError: " in str(parity)


def test_float32_may_be_compared_in_float64():
    model = build().float()
    single = [(inputs.float(), targets) for inputs, targets in batches()]
    rounded = report(model, batches=single, strategies=["pipeline(2)"])
    exact = report(model, batches=single, strategies=["pipeline(2)"], dtype=torch.float64)
    assert (rounded.tolerance, exact.tolerance) == (1e-4, 1e-12)
    assert rounded.all_equal
    assert exact.all_equal
    assert all(param.dtype == torch.float32 for param in model.parameters())


CALLS: list[int] = []


class Counting(nn.Module):
    """Its output depends on how often it was called: one of the ways to train something else under another plan."""

    def __init__(self):
        super().__init__()
        self.body = build()

    def forward(self, inputs):
        CALLS.append(len(inputs))
        return self.body(inputs) * len(CALLS)


class HalfPrecise(nn.Sequential):
    """Computes a norm and its loss in float32, as models of transformers do."""

    def forward(self, x):
        hidden = self[0](x).to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self[1](torch.softmax(hidden.to(x.dtype), -1, dtype=torch.float32).to(x.dtype)).float()


@pytest.mark.long
def test_in_float64_nothing_is_computed_in_float32():
    torch.manual_seed(0)
    model = HalfPrecise(nn.Linear(6, 8), nn.Linear(8, 3))
    parity = report(model, dtype=torch.float64, strategies=["solo", "data(2)", "zero3(2)", "pipeline(2)"])
    assert parity.all_equal
    assert all(plan.worst < 1e-13 for plan in parity.compared)
    assert next(model.parameters()).dtype == torch.float32
    assert torch.ones(1).double().float().dtype == torch.float32


def test_what_nothing_explains_is_said_to_depend_on_microbatches():
    model = Counting()
    parity = report(model, strategies=["data(2)"])
    assert not parity.all_equal
    assert "may depend on which samples are in a microbatch, on how often they are called" in str(parity)


def test_a_loss_that_reads_the_model_sees_the_model_that_is_trained():
    model = build()

    def penalized(outputs, targets):
        return F.cross_entropy(outputs, targets) + 0.1 * model[0].weight.square().sum()

    parity = report(model, loss=penalized, strategies=["solo", "zero3(2)"])
    assert parity.is_equal(parity.plans[0])
    assert parity.plans[1].refusal.startswith("DataError: the loss reads 0.weight of the model, but under zero(2")


@pytest.mark.long
def test_own_strategies_may_be_given_as_objects():
    parity = report(build(), strategies=[cp.Pipeline(2), (cp.Pipeline(2), cp.Data(2)), cp.Plan((cp.Zero(2, 3),))])
    assert parity.all_equal
    assert [plan.num_ranks for plan in parity.plans] == [2, 4, 2]


def test_no_batches_are_refused():
    with pytest.raises(cp.PlanError, match="there are no batches to train on; give some"):
        report(build(), batches=[])


PRECISE_PLANS = ["solo", "data(2)", "zero3(2)", "pipeline(2)"]


@pytest.mark.long(quick=["fp32(reduce=bf16)-a plain PyTorch loop"])
@pytest.mark.parametrize(
    ("precision", "reference"),
    [
        ("bf16", "a plain PyTorch loop"),
        ("bf16(norms=compute, output=compute)", "a plain PyTorch loop"),
        ("fp16", "one rank"),
        ("fp32(reduce=bf16)", "a plain PyTorch loop"),
        ("fp32(reduce=fp16)", "one rank"),
    ],
)
def test_the_reference_computes_in_the_precision_of_the_run(precision, reference):
    model = build(nn.LayerNorm(8, dtype=torch.float64))
    before = copy.deepcopy(model.state_dict())
    parity = report(model, strategies=PRECISE_PLANS, precision=precision)
    assert parity.all_equal, str(parity)
    assert (parity.reference, parity.tolerance) == (reference, 0.05)
    assert result_of(parity, "solo").worst < 1e-12
    assert result_of(parity, "data(2)").worst > 1e-6  # rounding of narrow sums
    assert f"in float64, computed in {precision}" in str(parity)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_reference_has_the_autocast_of_the_run():
    single = [(inputs.float(), targets) for inputs, targets in batches()]
    parity = report(build().float(), batches=single, strategies=PRECISE_PLANS, precision="bf16(autocast=true)")
    assert parity.all_equal, str(parity)
    assert result_of(parity, "solo").worst < 1e-6
    assert result_of(parity, "data(2)").worst > 1e-5


def test_a_plan_with_another_precision_than_the_run_is_named():
    plan = replace(cp.Plan.parse("data(2)"), precision=cp.Precision("bf16"))
    parity = report(build(), strategies=[plan])
    assert not parity.all_equal
    assert "the plan computes in bf16, which the reference does not; give precision='bf16' to all" in str(parity)
