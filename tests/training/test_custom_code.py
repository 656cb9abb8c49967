"""What the user's own code does inside a step: hooks, named tuples, errors of the model; and steps after the end."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from tests.training.trainers import (
    STRATEGIES,
    build_seeded,
    dataset,
    equal_bits,
    list_rank_threads,
    mlp,
    params_of,
    state_of,
)

SGD = partial(optim.SGD, lr=0.1)


def step_of(model, strategy, **options):
    return cp.parallelize(model, SGD, F.cross_entropy, strategy=strategy, **options)


@pytest.mark.long(quick=["server(2)-register_post_accumulate_grad_hook", "tensor(2)-register_hook"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_hooks_are_refused_where_they_would_not_be_called(strategy, register):
    model = mlp()
    getattr(model[0].weight, register)(lambda _: None)
    with (
        pytest.raises(
            cp.PlanError, match=r"^0.weight has a gradient hook, which under .* or train in a single process$"
        ),
        step_of(model, strategy) as step,
    ):
        step(*dataset(12).tensors)
    assert list_rank_threads() == []


@pytest.mark.long(
    quick=[
        "data(2)-register_hook",
        "zero(2, level=1)-register_post_accumulate_grad_hook",
        "zero(2, level=2)-register_hook",
        "tensor(2)-register_hook",
    ]
)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_hooks_that_are_registered_between_steps_are_refused_too(strategy, register):
    """They were not called, without a word."""
    with step_of(mlp(), strategy) as step:
        step(*dataset(12).tensors)
        hook = getattr(step.local_ranks.model[0].weight, register)(lambda _: None)
        for _ in range(2):
            with pytest.raises(cp.PlanError, match=r"^0.weight has a gradient hook, which under"):
                step(*dataset(12).tensors)
        hook.remove()
        step(*dataset(12).tensors)


def test_gradient_hooks_on_microbatches_are_warned_of_once_or_refused():
    with step_of(mlp(), "solo", num_microbatches=2) as step:
        step(*dataset(12).tensors)
        model = step.local_ranks.model
        model[0].weight.register_hook(torch.zeros_like)
        before = model[0].weight.detach().clone()
        with pytest.warns(
            UserWarning, match="0.weight has a gradient hook, which is called for each of 2 microbatches"
        ):
            step(*dataset(12).tensors)
        step(*dataset(12).tensors)
        assert torch.equal(model[0].weight, before)


def test_hooks_after_accumulation_of_microbatches_are_refused():
    model = mlp()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    with (
        step_of(model, "solo", num_microbatches=2) as step,
        pytest.raises(cp.PlanError, match=r"^0.weight has a hook that runs after its gradient .* num_microbatches=1"),
    ):
        step(*dataset(12).tensors)


@pytest.mark.parametrize(
    "hook",
    [
        lambda grad: grad.clamp(-1e-3, 1e-3),
        lambda grad: grad.clamp_(-1e7, 1e7),
        torch.sign,
        lambda grad: grad / (grad.norm() + 1e-9),
        lambda grad: grad + 0.01,
        lambda grad: grad + torch.randn_like(grad),
    ],
    ids=["clamp", "in place", "sign", "norm", "added", "noise"],
)
def test_gradient_hooks_that_are_not_linear_are_refused_on_microbatches(hook):
    """They were called for the gradients of parts, with a warning only."""
    model = mlp()
    model[0].weight.register_hook(hook)
    with (
        step_of(model, "solo", num_microbatches=2) as step,
        pytest.raises(cp.PlanError, match=r"^0.weight has a gradient hook that is not linear, .* num_microbatches=1"),
    ):
        step(*dataset(12).tensors)


@pytest.mark.filterwarnings("ignore:0.weight has a gradient hook")
def test_what_a_gradient_hook_keeps_is_that_of_its_microbatches():
    """Hooks are called before the first step, to see whether they are linear."""
    model, grads, total = mlp(), [], torch.zeros_like(mlp()[0].weight)

    def keep(grad):
        grads.append(grad.clone())
        total.add_(grad)

    model[0].weight.register_hook(keep)
    with step_of(model, "solo", num_microbatches=2) as step:
        step(*dataset(12).tensors)
    assert len(grads) == 2
    assert torch.equal(total, sum(grads))


def test_gradient_hooks_are_called_under_solo():
    model = mlp()
    model[0].weight.register_hook(torch.zeros_like)
    with step_of(model, "solo") as step:
        step(*dataset(12).tensors)
    assert torch.equal(model[0].weight, mlp()[0].weight)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, y):
        return self.first(x) + self.second(y)


Two = namedtuple("Two", ["x", "y"])


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_inputs_may_be_a_named_tuple(strategy):
    x, targets = dataset(12).tensors
    result = []
    for form in (tuple, Two._make):
        with step_of(build_seeded(Sum), strategy) as step:
            step(form((x, x * 2)), targets)
        result.append(params_of(step.local_ranks.model))
    assert equal_bits(*result)


class Fussy(nn.Module):
    """Cannot do with the last batch of 11 samples in batches of 4."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if len(x) == 1:
            raise KeyError("alone")
        return self.layer(x)


def fit_uneven(model, strategy, **goals):
    x, targets = dataset(11).tensors
    options: dict[str, Any] = {"num_microbatches": 1 + ("data" not in strategy), "batch_norm": "deferred"}
    trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=SGD, strategy=strategy, **options)
    trainer.fit(TensorDataset(x, targets), batch_size=4, **goals)


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_an_error_of_the_models_forward_says_which_samples_and_blocks_it_had(strategy):
    with pytest.raises(
        cp.DataError, match=r"^Fussy computes on the batch of 3 samples, but not on microbatch 1"
    ) as lone:
        fit_uneven(build_seeded(Fussy), strategy)
    mistake = lone.value.__cause__
    assert isinstance(mistake, KeyError)
    assert mistake.__notes__[0] == (
        "raised by the model's forward: block 0 of 1 on microbatch 1 of step 2, which has 1 of the batch's 3 samples, "
        "with inputs of the shapes (1, 6); it was raised in Fussy()"
    )


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_batch_norm_on_a_lone_sample_of_the_last_batch_is_refused_before_the_first_step(strategy):
    model = build_seeded(normed)
    with pytest.raises(cp.DataError) as refusal:
        fit_uneven(model, strategy)
    assert str(refusal.value) == (
        "batch norm got one value per channel and cannot train on it: the last batch of an epoch has 3 samples, and "
        "microbatch 1 of it has only 1; give batches whose every microbatch has 2 samples or more, the last batch "
        "included (another batch_size, fewer microbatches, or drop the last samples), or use a norm without batch "
        "statistics, such as LayerNorm or GroupNorm"
    )
    assert equal_bits(state_of(model), state_of(build_seeded(normed)))
    fit_uneven(model, strategy, max_steps=2)


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_batch_norm_on_a_lone_sample_in_a_loop_says_which_microbatch_it_is(strategy):
    x, targets = dataset(11).tensors
    options: dict[str, Any] = {"num_microbatches": 1 + ("data" not in strategy), "batch_norm": "deferred"}
    step = step_of(build_seeded(normed), strategy, **options)
    step(x[:8], targets[:8])
    with pytest.raises(cp.DataError, match=r"microbatch 1 on rank \d has 1 of the 3 samples of the batch"), step:
        step(x[8:], targets[8:])


def test_autocast_around_a_step_reaches_all_ranks():
    """Only the caller's thread had it, and so no rank of several."""
    result = []
    for strategy in ("solo", "data(2)"):
        with step_of(mlp().float(), strategy) as step, torch.autocast("cpu", dtype=torch.bfloat16):
            step.local_ranks.model[0].register_forward_hook(lambda _, __, output: result.append(output.dtype))
            step(dataset(12).tensors[0].float(), dataset(12).tensors[1])
    assert set(result) == {torch.bfloat16}


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_step_after_close_is_refused_at_once(strategy):
    """It waited for ever for ranks that had ended."""
    batch = dataset(12).tensors
    step = step_of(mlp(), strategy)
    step(*batch)
    step.close()
    step.close()
    with pytest.raises(cp.PlanError, match=r"^step 1 was called after close\(\); close when"):
        step(*batch)


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
def test_a_first_layer_may_change_its_input_in_place(strategy):
    """Microbatches of a batch are in one memory, but each has a version counter of its own."""

    def build():
        return build_seeded(
            lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 8), nn.ReLU(True), nn.Linear(8, 3))
        )

    inputs, targets = dataset().tensors
    expected, model = build(), build()
    F.cross_entropy(expected(inputs[:8].clone()), targets[:8]).backward()
    with step_of(model, strategy) as step:
        step(inputs[:8].clone(), targets[:8])
        grads = step.gradients()
    for name, param in expected.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["data(2)", "zero(2, level=3)"])
def test_a_script_is_refused_where_ranks_would_copy_it(strategy):
    inputs, targets = dataset().tensors
    step = step_of(torch.jit.script(mlp()), strategy)
    with pytest.raises(
        cp.PlanError, match=r"^RecursiveScriptModule is a TorchScript module, .* which TorchScript does"
    ):
        step(inputs[:8], targets[:8])


def test_a_step_in_inference_mode_is_refused():
    inputs, targets = dataset().tensors
    with step_of(mlp(), "data(2)") as step:
        for _ in range(2):
            with (
                torch.inference_mode(),
                pytest.raises(cp.DataError, match=r"^a training step was called inside torch\.inference_mode\(\)"),
            ):
                step(inputs[:8], targets[:8])
            step(inputs[:8], targets[:8])


class Force(nn.Module):
    """The negative gradient of an energy: a backward inside the forward, and another one through it."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0][:, :3]


@dataclass
class Output:
    logits: Any
    hidden: dict[str, Any]
    name: str = "output"


class ReturnsDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return Output(self.second(hidden), {"first": hidden})


def loss_of(output, targets):
    if not isinstance(output, Output):
        return F.cross_entropy(output, targets)
    return F.cross_entropy(output.logits, targets) + output.hidden["first"].pow(2).mean()


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.long(quick=["Force-data(2)", "ReturnsDataclass-pipeline(2)"])
@pytest.mark.parametrize(
    ("build", "strategy"),
    [
        *((Force, strategy) for strategy in ("solo", "data(2)", "zero(2, level=3)")),
        *((ReturnsDataclass, strategy) for strategy in ("solo", "data(2)", "zero(2, level=3)", "pipeline(2)")),
    ],
)
def test_a_forward_may_differentiate_and_may_return_a_dataclass(build, strategy):
    inputs, targets = dataset().tensors
    expected, model = build_seeded(build), build_seeded(build)
    loss_of(expected(inputs[:8]), targets[:8]).backward()
    with cp.parallelize(model, SGD, loss_of, strategy=strategy) as step:
        step(inputs[:8], targets[:8])
        grads = step.gradients()
    for name, param in expected.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)


def test_a_forward_that_differentiates_cannot_be_split():
    inputs, targets = dataset().tensors
    step = step_of(build_seeded(Force), "pipeline(2)")
    with pytest.raises(
        cp.PlanError, match=r"^Force differentiates in its forward .* a strategy that keeps the model whole"
    ):
        step(inputs[:8], targets[:8])


class Alias(nn.Module):
    """Reads the memory of a parameter as another tensor, in an attribute, in a list or as a buffer."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        values = self.first.weight.detach()
        if kind == "buffer":
            self.register_buffer("seen", values)
        else:
            self.seen = values if kind == "attribute" else [values, 1]

    def forward(self, x):
        seen: Any = self.seen[0] if isinstance(self.seen, list) else self.seen
        return self.second(torch.tanh(self.first(x))) + seen.sum()


@pytest.mark.parametrize("strategy", ["data(2)", "zero3(2)", "pipeline(2)"])
@pytest.mark.parametrize("kind", ["buffer", "attribute", "list"])
def test_a_tensor_in_the_memory_of_a_parameter_is_refused(kind, strategy):
    """Ranks moved the parameter, so that the tensor kept its first values; nothing was said."""
    text = r"^(seen is not a parameter, but has the memory of first\.weight, |the forward of Alias reads first\.weight from)"
    with pytest.raises(cp.PlanError, match=text), step_of(Alias(kind), strategy) as step:
        step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))


class FromList(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.weights = [self.first.weight]

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.weights[0].sum()


def test_a_parameter_that_a_forward_reads_from_a_list_is_no_constant_of_a_trace():
    """Its gradient there was lost, and its value that of the first step."""
    with (
        pytest.raises(cp.PlanError, match=r"^the forward of FromList reads first\.weight from .* nn\.ParameterList"),
        step_of(FromList(), "pipeline(2)") as step,
    ):
        step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))


def test_parameters_without_values_are_refused_where_the_model_is_traced_before_its_first_forward():
    """It was an error of torch's about an uninitialized parameter."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    text = r"^0\.weight has no values before the first forward .*; run the model once on a batch before"
    with pytest.raises(cp.PlanError, match=text), step_of(model, "tensor(2)") as step:
        step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))


def test_an_attribute_that_the_forward_replaces_may_begin_in_the_memory_of_a_parameter():
    """As the weight of ``torch.nn.utils.spectral_norm`` does, which each forward computes anew."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    nn.utils.spectral_norm(model[0])
    with step_of(model, "zero3(2)") as step:
        assert step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)) > 0
