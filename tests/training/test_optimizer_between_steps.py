"""The optimizer as plain torch code uses it: what it holds, what changes between steps, its state in and out."""

import copy
import warnings
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.runtime.full_state import gather_optimizer_state
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, make_generator, max_difference, state_of

PLANS = ["solo", "data(2)", "zero1(2)", "zero3(2)", "pipeline(2)", "tensor(2)", "server(2, consistency=bsp)"]
KEEPS_GROUPS = [plan for plan in PLANS if not plan.startswith("server")]
ADAMW = partial(optim.AdamW, lr=0.05, weight_decay=0.1)
OPTIMIZERS: dict[str, Any] = {
    "AdamW": ADAMW,
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "NAdam": partial(optim.NAdam, lr=0.05),
    "Adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
}


class Net(nn.Module):
    """A body, and a head that may be frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def net():
    return build_seeded(Net)


def batches(num, first=0):
    random = make_generator()
    made = [
        (torch.randn(8, 4, generator=random, dtype=torch.float64), torch.randint(3, (8,), generator=random))
        for _ in range(first + num)
    ]
    return made[first:]


def no_change(_number, _model, _optimizer):
    pass


def train_plain(model, optimizer, data, change=no_change):
    for number, (inputs, targets) in enumerate(data):
        change(number, model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return optimizer.state_dict()


def train(plan, model, optimizer, data, change=no_change, **options):
    """Train under a plan and return the optimizer's state before the ranks end."""
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, **options) as step:
        for number, batch in enumerate(data):
            change(number, model, step.optimizer)
            step(*batch)
        return step.optimizer.state_dict()


def require_equal_states(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            assert found["state"][index][key].dtype == value.dtype
            torch.testing.assert_close(found["state"][index][key], value, rtol=1e-12, atol=1e-14)


def compare(plan, make_optimizer, change=no_change, num=6, prepare=lambda model: None):
    """Compare weights and optimizer state after some steps with those of a plain loop."""
    model, expected = net(), net()
    prepare(model)
    prepare(expected)
    expected_state = train_plain(expected, make_optimizer(expected), batches(num), change)
    found_state = train(plan, model, make_optimizer(model), batches(num), change)
    assert max_difference(state_of(model), state_of(expected)) < 1e-12
    require_equal_states(found_state, expected_state)


@pytest.mark.long(quick=["SGD-data(2)", "SGD-server(2, consistency=bsp)", "RMSprop-pipeline(2)"])
@pytest.mark.parametrize(("name", "plan"), each_value_once([*OPTIMIZERS], PLANS))
def test_the_state_of_the_optimizer_is_that_of_a_plain_loop(name, plan):
    compare(plan, lambda model: OPTIMIZERS[name](model.parameters()), num=3)


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
def test_the_state_of_an_optimizer_that_needs_whole_tensors_is_that_of_a_plain_loop(plan):
    compare(plan, lambda model: optim.Adafactor(model.parameters(), lr=0.01), num=3)


@pytest.mark.long(quick=["AdamW-server(2, consistency=bsp)", "Adagrad-zero1(2)"])
@pytest.mark.parametrize(("name", "plan"), each_value_once(["AdamW", "SGD", "Adagrad"], PLANS))
def test_a_run_may_begin_and_end_in_plain_torch(name, plan):
    """Two steps of a plain loop, two under the plan, and two of a plain loop are six of a plain loop."""
    make_optimizer = OPTIMIZERS[name]
    expected, model = net(), net()
    expected_state = train_plain(expected, make_optimizer(expected.parameters()), batches(6))
    optimizer = make_optimizer(model.parameters())
    train_plain(model, optimizer, batches(2))
    loaded = make_optimizer(model.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved = train(plan, model, loaded, batches(2, 2))
    last = make_optimizer(model.parameters())
    last.load_state_dict(saved)
    require_equal_states(train_plain(model, last, batches(2, 4)), expected_state)
    assert max_difference(state_of(model), state_of(expected)) < 1e-12


@pytest.mark.long(quick=["zero1(2)", "tensor(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_one_optimizer_goes_through_plain_loops_and_plans(plan):
    expected, model = net(), net()
    expected_state = train_plain(expected, ADAMW(expected.parameters()), batches(6))
    optimizer = ADAMW(model.parameters())
    train_plain(model, optimizer, batches(1))
    train(plan, model, optimizer, batches(2, 1))
    train_plain(model, optimizer, batches(1, 3))
    train(plan, model, optimizer, batches(2, 4))
    require_equal_states(optimizer.state_dict(), expected_state)
    assert max_difference(state_of(model), state_of(expected)) < 1e-12


@pytest.mark.parametrize("plan", ["solo", "zero3(2)", "pipeline(2)"])
def test_a_trainers_optimizer_has_its_state_during_and_after_the_run(plan):
    expected, model, seen = net(), net(), []
    data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(4), strict=True)))

    class Read(cp.Callback):
        def on_step(self, event):
            seen.append(trainer.optimizer.state_dict())

    loader = torch.utils.data.DataLoader(data, batch_size=8)
    expected_state = train_plain(expected, ADAMW(expected.parameters()), loader)
    trainer = cp.Trainer(
        model, loss=F.cross_entropy, optimizer=ADAMW, strategy=plan, callbacks=[Read()], progress="off"
    )
    trainer.fit(loader, epochs=1)
    require_equal_states(trainer.full_optimizer_state(), expected_state)
    trainer.close()
    require_equal_states(trainer.optimizer.state_dict(), expected_state)
    require_equal_states(seen[-1], expected_state)
    assert [state["state"][0]["step"].item() for state in seen] == [1, 2, 3, 4]


def test_state_that_is_on_ranks_of_other_processes_is_gathered_by_all_of_them():
    model = net()
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy="zero3(2)") as step:
        step(*batches(1)[0])
        ranks = step.local_ranks
        found = ranks.world.run(
            lambda fabric: gather_optimizer_state(ranks.shard_map(), [ranks.ranks[fabric.rank]], fabric)
        )
        expected = step.full_optimizer_state()["state"]
    for states in found:
        for (name, _), (index, state) in zip(model.named_parameters(), expected.items(), strict=True):
            assert states[name].keys() == state.keys(), index
            assert all(torch.equal(states[name][key], value) for key, value in state.items())


@pytest.mark.long(quick=["zero1(2)", "tensor(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_state_that_is_loaded_between_two_steps_is_used(plan):
    model = net()
    saved = copy.deepcopy(train_plain(model, ADAMW(model.parameters()), batches(3, 2)))

    def load(number, _, optimizer):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(saved))

    compare(plan, lambda model: ADAMW(model.parameters()), load, num=4)


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)"])
def test_loaded_state_of_another_shape_than_its_parameter_is_not_shared_by_ranks(plan):
    def load(number, _, optimizer):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    compare(plan, lambda model: optim.Adafactor(model.parameters(), lr=0.05), load, num=4)


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_frozen_parameters_may_be_in_the_optimizer(plan):
    def freeze(model):
        model.second.requires_grad_(False)

    compare(plan, lambda model: ADAMW(model.parameters()), prepare=freeze, num=3)


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("plan", KEEPS_GROUPS)
def test_parameters_may_be_frozen_and_thawed_between_steps(plan):
    def toggle(number, model, _):
        if number in {2, 4}:
            model.second.requires_grad_(number == 4)
            model.zero_grad()

    compare(plan, lambda model: ADAMW(model.parameters()), toggle)


@pytest.mark.long(quick=["tensor(2)", "solo"])
@pytest.mark.parametrize("plan", KEEPS_GROUPS)
def test_a_group_may_be_added_between_steps(plan):
    def add(number, model, optimizer):
        if number == 2:
            model.head.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02, "weight_decay": 0.0})

    def make_optimizer(model):
        return ADAMW([param for name, param in model.named_parameters() if not name.startswith("head")])

    compare(plan, make_optimizer, add, prepare=lambda model: model.head.requires_grad_(False))


def halve_moments(number, _, optimizer):
    for state in optimizer.state.values() if number else ():
        state["exp_avg"].mul_(0.5)


def halve_moments_unseen(number, _, optimizer):
    for state in optimizer.state.values() if number else ():
        state["exp_avg"].data.mul_(0.5)


def replace_moments(number, model, optimizer):
    if number == 2:
        optimizer.state[model.first.weight] |= {"exp_avg": torch.ones_like(model.first.weight)}


def forget_one_parameter(number, model, optimizer):
    if number == 2:
        del optimizer.state[model.first.weight]


def forget_all(number, _, optimizer):
    if number == 2:
        optimizer.state.clear()


def forget_all_by_a_new_mapping(number, _, optimizer):
    if number == 2:
        optimizer.state = defaultdict(dict)


@pytest.mark.long(quick=["forget_all_by_a_new_mapping-zero1(2)", "forget_all-tensor(2)"])
@pytest.mark.parametrize("plan", KEEPS_GROUPS)
@pytest.mark.parametrize(
    "change",
    [
        halve_moments,
        halve_moments_unseen,
        replace_moments,
        forget_one_parameter,
        forget_all,
        forget_all_by_a_new_mapping,
    ],
)
def test_a_change_of_the_optimizers_own_state_is_that_of_a_plain_loop(change, plan):
    compare(plan, lambda model: ADAMW(model.parameters()), change, num=4)


@pytest.mark.long(quick=["server(2, consistency=bsp)", "solo"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_optimizers_own_state_is_read_as_in_a_plain_loop(plan):
    model, expected = net(), net()
    adam, plain = ADAMW(model.parameters()), ADAMW(expected.parameters())
    with cp.parallelize(model, adam, F.cross_entropy, strategy=plan) as step:
        for batch in batches(3):
            step(*batch)
            train_plain(expected, plain, [batch])
            assert len(adam.state) == len(plain.state)
            assert model.head.bias in adam.state
            found, right = adam.state[model.head.bias], plain.state[expected.head.bias]
            assert_equal_values({0: found}, {0: right})
            assert_equal_values({0: copy.deepcopy(adam).state_dict()["state"][0]}, {0: plain.state_dict()["state"][0]})
    assert type(adam.state) is defaultdict
    require_equal_states(train_plain(model, adam, batches(1, 3)), train_plain(expected, plain, batches(1, 3)))


def test_state_that_is_only_read_stays_with_the_ranks():
    model = net()
    adam = ADAMW(model.parameters())
    with cp.parallelize(model, adam, F.cross_entropy, strategy="data(2, sync_every=2)") as step:
        for batch in batches(3):
            step(*batch)
            own = [rank.interpreter.store.optimizers for rank in step.local_ranks.ranks.values()]
            before = [id(optimizer) for optimizers in own for optimizer, _ in optimizers.values()]
            assert float(adam.state[model.head.bias]["step"]) == step.number
            assert step.local_ranks.optimizer_exchange is not None
            step.local_ranks.optimizer_exchange.find_changes()
            assert not step.local_ranks.optimizer_spec.has_new_state
            assert not step.local_ranks.optimizer_spec.is_state_loaded()
            assert before == [id(optimizer) for optimizers in own for optimizer, _ in optimizers.values()]


def test_the_state_of_one_of_several_optimizers_may_be_replaced():
    model, expected = net(), net()
    of_model, of_expected = sgd_and_adagrad(model), sgd_and_adagrad(expected)
    with cp.parallelize(model, list(of_model), F.cross_entropy, strategy="zero3(2)") as step:
        for batch in batches(2):
            step(*batch)
        assert model.first.bias in of_model[0].state
        of_model[0].state = defaultdict(dict)
        step(*batches(1, 2)[0])
    train_with_both(expected, of_expected, batches(2))
    of_expected[0].state = defaultdict(dict)
    train_with_both(expected, of_expected, batches(1, 2))
    assert max_difference(state_of(model), state_of(expected)) < 1e-12


@pytest.mark.parametrize("plan", ["easgd(2)", "data(2, staleness=1)"])
def test_groups_are_fixed_where_ranks_have_more_state_than_the_optimizers(plan):
    model = net()
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy=plan) as step:
        data = batches(2)
        step(*data[0])
        model.second.requires_grad_(False)
        with pytest.raises(
            cp.DataError, match=r"^second.weight and 1 other parameter were frozen between .* close\(\)"
        ):
            step(*data[1])
        model.second.requires_grad_(True)
        step(*data[1])


@pytest.mark.parametrize("plan", ["solo", "zero3(2)"])
def test_hooks_after_a_step_run_after_each_step_that_is_applied(plan):
    def count(make_step):
        seen = []
        model = net()
        optimizer = ADAMW(model.parameters())
        optimizer.register_step_post_hook(
            lambda given, args, kwargs: seen.append(float(model.head.weight.detach().sum()))
        )
        make_step(model, optimizer)
        return seen

    expected = count(lambda model, optimizer: train_plain(model, optimizer, batches(3)))
    assert count(lambda model, optimizer: train(plan, model, optimizer, batches(3))) == pytest.approx(expected, 1e-12)


def test_hooks_before_a_step_are_refused_whenever_they_are_registered():
    model = net()
    optimizer = ADAMW(model.parameters())
    text = r"^AdamW has a hook of register_step_pre_hook, .* or use register_step_post_hook"
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy="data(2)") as step:
        step(*batches(1)[0])
        handle = optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(cp.PlanError, match=text):
            step(*batches(1)[0])
        with pytest.raises(cp.PlanError, match=text):
            cp.parallelize(model, optimizer, F.cross_entropy)
        handle.remove()
        step(*batches(1)[0])


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)", "tensor(2)"])
def test_a_step_of_the_optimizer_between_steps_is_refused_and_is_possible_after_them(plan):
    """Under solo the gradients were applied a second time; elsewhere it changed nothing."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings(), cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan) as step:
        warnings.simplefilter("error")
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            step(inputs, targets)
            with pytest.raises(cp.DataError, match=r"SGD.step\(\) was called between two steps.*remove optimizer.step"):
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    before = model.head.bias.detach().clone()
    F.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    optimizer.step()
    assert not torch.equal(before, model.head.bias)


@pytest.mark.parametrize("plan", ["solo", "data(2)"])
def test_gradients_dropped_between_steps_change_nothing(plan):
    trained = []
    for drops in (False, True):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan) as step:
            for inputs, targets in batches(2):
                if drops:
                    optimizer.zero_grad()
                    model.zero_grad()
                step(inputs, targets)
        trained.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]))
    assert torch.equal(*trained)


def test_a_parameter_that_the_optimizer_holds_twice_is_refused():
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ADAMW([*model.parameters(), model.head.bias])
    with pytest.raises(cp.PlanError, match=r"^the optimizer holds head\.bias twice, .* each parameter once$"):
        cp.parallelize(model, optimizer, F.cross_entropy)


class NeedsClosure(optim.Optimizer):
    """Asserts on its closure only when it steps, as implementations of SAM do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        assert closure is not None, "it needs a closure"


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)"])
def test_an_optimizer_that_asks_for_a_closure_in_its_step_is_refused_then(plan):
    model = net()
    step = cp.parallelize(model, NeedsClosure(model.parameters()), F.cross_entropy, strategy=plan)
    text = r"^NeedsClosure\.step without a closure failed \(it needs a closure\), but .* steps with gradients alone"
    with pytest.raises(cp.PlanError, match=text):
        step(*batches(1)[0])
    step.close()


def test_state_of_parameters_that_were_trained_for_different_times_needs_no_option():
    """Their step counts differ, so that they cannot be updated as one tensor."""
    expected, model = net(), net()

    def optimizer_after_some_steps(model):
        model.head.requires_grad_(False)
        optimizer = ADAMW(model.parameters())
        train_plain(model, optimizer, batches(2))
        model.head.requires_grad_(True)
        return optimizer

    expected_state = train_plain(expected, optimizer_after_some_steps(expected), batches(2, 2))
    found = train("zero3(2)", model, optimizer_after_some_steps(model), batches(2, 2))
    require_equal_states(found, expected_state)
    assert max_difference(state_of(model), state_of(expected)) < 1e-12


def sgd_and_adagrad(model):
    body = [*model.first.parameters(), *model.second.parameters()]
    return optim.SGD(body, lr=0.1, momentum=0.9), optim.Adagrad(model.head.parameters(), lr=0.05)


def train_with_both(model, optimizers, data):
    for inputs, targets in data:
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
def test_several_optimizers_each_have_the_state_of_their_part(plan):
    expected, model = net(), net()
    of_expected, of_model = sgd_and_adagrad(expected), sgd_and_adagrad(model)
    train_with_both(expected, of_expected, batches(6))
    train_with_both(model, of_model, batches(2))
    with cp.parallelize(model, list(of_model), F.cross_entropy, strategy=plan) as step:
        for batch in batches(2, 2):
            step(*batch)
            assert [len(optimizer.state_dict()["state"]) for optimizer in of_model] == [4, 2]
    train_with_both(model, of_model, batches(2, 4))
    assert max_difference(state_of(model), state_of(expected)) < 1e-12
    for found, right in zip(of_model, of_expected, strict=True):
        assert_equal_values(found.state_dict()["state"], right.state_dict()["state"])


def assert_equal_values(found, expected):
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        for key, value in state.items():
            torch.testing.assert_close(found[index][key], value, rtol=1e-12, atol=1e-14)
