"""Optimizers of a user's own class: what their steps do besides updating each parameter is exact or refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp

BATCHES = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Own(optim.Optimizer):
    """Calls :meth:`update` for each parameter with a gradient."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def begin(self, group):
        """Prepare the updates of a group."""

    def update(self, param, group):
        param.sub_(param.grad, alpha=group["lr"])


class CountsInOptions(Own):
    """Has a step count and a sum in its groups, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, count=0, weight_sum=0.0)

    def begin(self, group):
        group["count"] += 1
        group["weight_sum"] += group["lr"] / group["count"]

    def update(self, param, group):
        param.sub_(param.grad, alpha=group["lr"] / group["count"] / group["weight_sum"])


class DividesByNorm(Own):
    """Divides by the norm of all gradients, as Prodigy compares all parameters."""

    def begin(self, group):
        self.norm = torch.stack([param.grad.norm() for param in group["params"]]).norm()

    def update(self, param, group):
        param.sub_(param.grad / self.norm, alpha=group["lr"])


class Noisy(Own):
    def update(self, param, group):
        param.sub_(param.grad + 0.01 * torch.randn_like(param), alpha=group["lr"])


class CountsInAttribute(Own):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.count = 0

    def begin(self, group):
        self.count += 1

    def update(self, param, group):
        param.sub_(param.grad, alpha=group["lr"] / self.count)


class CountsInState(Own):
    def begin(self, group):
        state: Any = self.state  # by a key that is not a parameter
        state["all"]["count"] = state["all"].get("count", 0) + 1


class KeepsTensorInOptions(Own):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, total=torch.zeros(()))

    def begin(self, group):
        group["total"] += 1


class Lookahead(optim.Optimizer):
    """Moves slow weights towards those of another optimizer, every second step."""

    def __init__(self, base):
        self.base, self.count = base, 0
        super().__init__(base.param_groups, {})
        self.slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        params = [param for group in self.param_groups for param in group["params"]]
        for param, slow in zip(params, self.slow, strict=True) if self.count % 2 == 0 else ():
            param.copy_(slow.lerp_(param, 0.5))


def build_net():
    torch.manual_seed(0)
    return Net().double()


def make_batches():
    torch.manual_seed(1)
    return [(torch.randn(12, 6).double(), torch.randn(12, 4).double()) for _ in range(BATCHES)]


def train_plain(optimizer_of):
    model = build_net()
    optimizer = optimizer_of(model.parameters())
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model, optimizer


def train(optimizer_of, plan, between=lambda model, number: None, *, factory=False):
    model = build_net()
    optimizer = optimizer_of if factory else optimizer_of(model.parameters())
    with cp.parallelize(model, optimizer, F.mse_loss, strategy=plan) as step:
        for number, (inputs, targets) in enumerate(make_batches()):
            between(model, number)
            step(inputs, targets)
    return model, step.optimizer


def max_difference(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("plan", ["solo", "data(2)"])
@pytest.mark.parametrize("optimizer", [CountsInOptions, DividesByNorm, CountsInAttribute])
def test_steps_that_compare_parameters_or_count_are_those_of_a_plain_loop_on_whole_models(optimizer, plan):
    """Ranks got the options of the user's optimizer in each step, in which steps were not counted."""
    expected, found = train_plain(optimizer), train(optimizer, plan)
    assert max_difference(found[0], expected[0]) < 1e-12
    options = [{key: group[key] for key in group if key != "params"} for group in found[1].param_groups]
    assert options == [{key: group[key] for key in group if key != "params"} for group in expected[1].param_groups]


@pytest.mark.parametrize(
    ("optimizer", "what", "plan"),
    [
        (CountsInOptions, "changes its options count, weight_sum", "data(2, sync_every=2)"),
        (CountsInOptions, "changes its options count, weight_sum", "zero3(2)"),
        (DividesByNorm, "computes the update of a parameter from others, too", "pipeline(2)"),
        (DividesByNorm, "computes the update of a parameter from others, too", "zero3(2)"),
        (Noisy, "draws random numbers", "zero3(2)"),
    ],
)
def test_steps_that_are_more_than_updates_of_parameters_are_refused_where_ranks_update_parts(optimizer, what, plan):
    text = rf"^{optimizer.__name__}\.step {what}, but under .* a rank updates a part .*; use a plan whose ranks update"
    with pytest.raises(cp.PlanError, match=text):
        train(optimizer, plan)


@pytest.mark.parametrize("plan", ["solo", "zero3(2)"])
@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        (CountsInState, "state of all, which is not a parameter"),
        (KeepsTensorInOptions, "tensors that it changes in the options total"),
    ],
)
def test_state_that_belongs_to_no_parameter_is_refused(optimizer, kept, plan):
    with pytest.raises(cp.PlanError, match=rf"^{optimizer.__name__} keeps {kept}, but .*; keep it in state\[param\]"):
        train(optimizer, plan)


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)"])
def test_attributes_that_steps_change_are_not_lost_silently_when_ranks_are_built_again(plan):
    """The optimizers that ranks built after a change of the trained parameters counted from zero."""

    def freeze(model, number):
        model.first.requires_grad_(number != 2)

    with pytest.raises(cp.DataError, match=r"^CountsInAttribute\.step changes its attributes count, but ranks have to"):
        train(CountsInAttribute, plan, freeze)


def test_an_optimizer_around_another_one_is_refused_but_not_a_factory_that_makes_both():
    """Its class was called with groups in place of the other optimizer: an ``AttributeError``."""

    def factory(params):
        return Lookahead(optim.Adam(params, lr=0.01))

    with pytest.raises(cp.PlanError, match=r"^Lookahead has another optimizer in its attribute base \(Adam\), which"):
        train(factory, "zero3(2)")
    expected, _ = train_plain(factory)
    for plan in ("solo", "data(2)", "zero3(2)", "pipeline(2)"):
        assert max_difference(train(factory, plan, factory=True)[0], expected) < 1e-12


def test_a_step_that_was_put_on_an_optimizer_is_refused_but_not_that_of_a_scheduler():
    """Ranks updated with the step of its class."""
    model = build_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    cp.parallelize(model, optimizer, F.mse_loss).close()
    vars(optimizer)["step"] = lambda closure=None: None
    with pytest.raises(cp.PlanError, match=r"^the method step of this SGD was replaced by .*lambda.*write a subclass"):
        cp.parallelize(model, optimizer, F.mse_loss)


def test_arguments_of_one_of_several_optimizers_are_not_lost():
    """It was rebuilt without the arguments that it keeps neither as options nor as attributes."""

    class Hidden(Own):
        def __init__(self, params, sign=1):
            super().__init__(params, 0.1 * sign)

    model = build_net()
    optimizers = [Hidden(model.head.parameters(), sign=-1), optim.SGD(model.first.parameters(), lr=0.1)]
    optimizers.append(optim.SGD(model.second.parameters(), lr=0.1))
    with pytest.raises(cp.PlanError, match=r"^Hidden keeps its sign neither in its defaults nor as an attribute"):
        cp.parallelize(model, optimizers, F.mse_loss, strategy="data(2)")
