"""The user's optimizer as ranks rebuild it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.optim.low_bit_adam import Bf16Adam
from counterpoint.optim.one_bit_adam import OneBitAdam
from counterpoint.runtime.optimizer_spec import ELEMENTWISE_OPTIMIZERS, OptimizerSpec, squared_norm


def params():
    return {"weight": nn.Parameter(torch.ones(2, 2)), "bias": nn.Parameter(torch.zeros(2))}


def grouped(named_params):
    return optim.AdamW(
        [{"params": [named_params["bias"]], "weight_decay": 0.0}, {"params": [named_params["weight"]], "lr": 0.5}]
    )


def test_groups_are_found_by_parameter_name():
    named_params = params()
    optimizer_spec = OptimizerSpec(grouped(named_params), named_params)
    assert optimizer_spec.group_index == {"bias": 0, "weight": 1}
    assert optimizer_spec.options(1)["lr"] == 0.5
    assert "params" not in optimizer_spec.options(1)


def test_an_optimizer_over_other_tensors_takes_the_options_of_their_groups():
    named_params = params()
    optimizer_spec = OptimizerSpec(grouped(named_params), named_params)
    built = optimizer_spec.build([(1, torch.zeros(4)), (0, torch.zeros(1)), (1, torch.zeros(3))])
    assert type(built) is optim.AdamW
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in built.param_groups] == [
        (0.5, 0.01, 2),
        (0.001, 0.0, 1),
    ]


def test_a_schedulers_change_of_the_template_reaches_every_optimizer_built_from_it():
    named_params = params()
    optimizer_spec = OptimizerSpec(grouped(named_params), named_params)
    built = optimizer_spec.build([(1, torch.zeros(4)), (0, torch.zeros(1))])
    optim.lr_scheduler.LambdaLR(optimizer_spec.optimizer, lambda _: 0.1)
    optimizer_spec.sync_options(built)
    assert [group["lr"] for group in built.param_groups] == [0.05, 0.0001]


def test_a_factory_gets_the_trainable_parameters_only():
    named_params = params()
    named_params["bias"].requires_grad_(False)
    assert OptimizerSpec(partial(optim.SGD, lr=0.1), named_params).group_index == {"weight": 0}


def test_only_known_elementwise_optimizers_may_update_merged_parameters():
    """A user's class need not be elementwise, even if its base class is."""

    class ExtraArgument(optim.SGD):
        pass

    assert OptimizerSpec(partial(optim.AdamW), params()).is_elementwise
    assert not OptimizerSpec(partial(ExtraArgument, lr=0.1), params()).is_elementwise
    assert not OptimizerSpec(partial(optim.Adafactor), params()).is_elementwise


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE_OPTIMIZERS, key=str), ids=str)
def test_every_optimizer_listed_as_elementwise_is(kind):
    """Two parameters updated as one tensor, or one as two, have the same bits as if updated separately."""
    draw = torch.Generator().manual_seed(0)
    values, grads = (torch.randn(3, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    merged = [nn.Parameter(values[0].clone())]
    split_params = [nn.Parameter(values[0][:3].clone()), nn.Parameter(values[0][3:].clone())]
    options: dict[str, Any] = {"betas": (0.9, 0.95)} if issubclass(kind, Bf16Adam) else {}
    options |= {"freeze_step": 2} if issubclass(kind, OneBitAdam) else {}
    one, two = kind(merged, lr=0.1, **options), kind(split_params, lr=0.1, **options)
    for grad in grads:
        merged[0].grad, split_params[0].grad, split_params[1].grad = grad.clone(), grad[:3].clone(), grad[3:].clone()
        one.step()
        two.step()
    assert torch.allclose(merged[0], torch.cat([*split_params]), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda named_params: optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
            "^the optimizer holds 1 tensor that the model does",
        ),
        (
            lambda named_params: optim.SGD([named_params["bias"]], lr=0.1),
            "^the optimizer does not hold weight; give it all trainable",
        ),
    ],
)
def test_an_optimizer_of_other_parameters_is_an_error(make, text):
    named_params = params()
    with pytest.raises(PlanError, match=text):
        OptimizerSpec(make(named_params), named_params)


def test_the_norm_is_added_up_without_overflow_and_over_sparse_gradients():
    dense = torch.tensor([3.0, 4.0])
    assert squared_norm([dense, dense.to_sparse()]) == 50.0
    assert squared_norm([torch.tensor([3 + 4j], dtype=torch.complex128)]) == 25.0
    assert squared_norm([torch.full((4,), 300.0, dtype=torch.float16)]) == pytest.approx(360_000)


class ExtraArgument(optim.SGD):
    """Keeps an argument that is not in its defaults."""

    def __init__(self, params, lr=0.1, *, factor=2):
        super().__init__(params, lr=lr)
        self.factor = factor


class HiddenArgument(optim.SGD):
    def __init__(self, params, lr=0.1, *, factor=2):
        super().__init__(params, lr=lr)
        self._times = factor


def with_one_lr(given):
    return HiddenArgument([{"params": [one for one in given if one.requires_grad], "lr": 0.5}], factor=20)


@pytest.mark.parametrize("factory", [partial(HiddenArgument, factor=20), with_one_lr])
def test_the_ranks_optimizers_are_built_by_the_users_factory(factory):
    """They were built with the defaults, so that the factor was lost even in a single process."""
    built = OptimizerSpec(factory, params()).build([(0, nn.Parameter(torch.zeros(4), requires_grad=False))])
    assert vars(built)["_times"] == 20
    assert not built.param_groups[0]["params"][0].requires_grad


def test_groups_given_to_a_factory_keep_their_options():
    named_params = params()
    optimizer_spec = OptimizerSpec(lambda given: HiddenArgument(split(list(given)), factor=20), named_params)
    built = optimizer_spec.build([(1, torch.zeros(4)), (0, torch.zeros(1))])
    assert vars(built)["_times"] == 20
    assert [group["lr"] for group in built.param_groups] == [0.5, 0.1]


def split(given):
    """Return groups as they are, or a group for each tensor with a learning rate of its own."""
    rates = (0.1, 0.5)
    return [
        one if isinstance(one, dict) else {"params": [one], "lr": lr} for one, lr in zip(given, rates, strict=False)
    ]


def test_an_optimizer_object_is_rebuilt_with_the_arguments_that_it_exposes():
    named_params = params()
    assert (
        OptimizerSpec(ExtraArgument(named_params.values(), factor=20), named_params)
        .build([(0, torch.zeros(4))])
        .__dict__["factor"]
        == 20
    )


def with_extra_attribute(optimizer):
    optimizer.nesterovian = 3
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda named_params: HiddenArgument(named_params),
            "^HiddenArgument keeps its factor neither in its defaults nor .* pass a factory that",
        ),
        (
            lambda named_params: with_extra_attribute(ExtraArgument(named_params)),
            "^ExtraArgument has nesterovian=3, but one rebuilt for a rank has None; pass a factory",
        ),
    ],
)
def test_an_optimizer_that_ranks_cannot_rebuild_is_an_error(make, text):
    named_params = params()
    with pytest.raises(PlanError, match=text):
        OptimizerSpec(make(list(named_params.values())), named_params)


@pytest.mark.parametrize(
    ("given", "text"), [("adam", "argument is 'adam'"), (lambda _: None, "factory returned a NoneType")]
)
def test_a_factory_of_something_else_is_an_error(given, text):
    with pytest.raises(PlanError, match=f"^the optimizer {text}; pass a torch optimizer .* or a factory such"):
        OptimizerSpec(given, params())


@pytest.mark.parametrize("kind", [partial(optim.SGD, momentum=0.9), optim.Adagrad], ids=["SGD", "Adagrad"])
def test_state_of_an_optimizer_that_has_stepped_is_taken_once(kind):
    named_params = params()
    used = kind(named_params.values(), lr=0.1)
    for param in named_params.values():
        param.grad = torch.ones_like(param)
    used.step()
    expected = {name: dict(used.state[param]) for name, param in named_params.items()}
    optimizer_spec = OptimizerSpec(used, named_params)
    was_new = optimizer_spec.has_new_state
    assert optimizer_spec.take_state() == expected
    assert (was_new, optimizer_spec.has_new_state, len(used.state)) == (True, False, 0)


def test_state_of_frozen_parameters_stays_with_the_template():
    named_params = params()
    used = optim.Adam(named_params.values())
    for param in named_params.values():
        param.grad = torch.ones_like(param)
    used.step()
    named_params["bias"].requires_grad_(False)
    optimizer_spec = OptimizerSpec(used, named_params)
    state = optimizer_spec.take_state()
    assert state.keys() == {"weight"}
    optimizer_spec.put_state(state)
    assert [used.state[param]["step"].item() for param in named_params.values()] == [1, 1]


def test_parameters_with_different_step_counts_may_not_be_merged():
    named_params = params()
    used = optim.Adam(named_params.values())
    named_params["weight"].grad = torch.ones(2, 2)
    used.step()
    optimizer_spec = OptimizerSpec(used, named_params)
    assert not optimizer_spec.has_mergeable_state()
    assert OptimizerSpec(optim.Adam(named_params.values()), named_params).has_mergeable_state()
    merged = optimizer_spec.merges_params
    optimizer_spec.update_apart()
    assert (merged, optimizer_spec.merges_params) == (True, False)
