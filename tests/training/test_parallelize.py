"""A step for an own loop: any inputs, any batch, the user's scheduler, and the same numbers under every strategy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.covering import each_value_once
from tests.training.trainers import (
    ADAMW,
    STRATEGIES,
    build_seeded,
    equal_bits,
    list_rank_threads,
    make_generator,
    max_difference,
    mlp,
    params_of,
)

UNSLICED = [name for name in STRATEGIES if name != "tensor(2)"]


class Pair(nn.Module):
    """Takes two inputs, by place or by name."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, extra):
        return self.head(torch.tanh(self.left(x) + self.right(extra)))


def batches(lengths=(12, 12, 7, 3)):
    random = make_generator(4)
    for length in lengths:
        x, extra = torch.randn(length, 6, generator=random), torch.randn(length, 4, generator=random)
        yield x.double(), extra.double(), torch.randint(0, 3, (length,), generator=random)


def by_hand(model, form):
    optimizer = ADAMW(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for x, extra, targets in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**form(x, extra)) if isinstance(form(x, extra), dict) else model(*form(x, extra)),
                               targets)  # fmt: skip
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


FORMS = {"a tuple": lambda x, extra: (x, extra), "a dict": lambda x, extra: {"extra": extra, "x": x}}


@pytest.mark.long(quick=["zero(2, level=1)-a tuple"])
@pytest.mark.parametrize(("strategy", "name"), each_value_once(["solo", *UNSLICED], [*FORMS]), ids=str)
def test_a_custom_loop_is_the_same_under_every_strategy(strategy, name):
    """Its batches are uneven and smaller than the number of microbatches, its scheduler sits on the optimizer."""
    mine, theirs = build_seeded(Pair), build_seeded(Pair)
    form = FORMS[name]
    expected = by_hand(theirs, form)
    step = cp.parallelize(mine, ADAMW, F.cross_entropy, strategy=strategy, num_microbatches=2)
    scheduler = optim.lr_scheduler.StepLR(step.optimizer, 1, 0.5)
    losses = []
    with step:
        for x, extra, targets in batches():
            losses.append(step(form(x, extra), targets))
            scheduler.step()
    assert losses == pytest.approx(expected, rel=1e-12)
    assert max_difference(params_of(mine), params_of(theirs)) <= 1e-12
    assert list_rank_threads() == []


class Named(nn.Module):
    """Gives a dict, and its loss takes one."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        logits = self.body(x)
        return {"logits": logits, "size": logits.pow(2).mean(-1)}


def both(outputs, targets):
    return F.cross_entropy(outputs["logits"], targets["label"]) + (targets["weight"] * outputs["size"]).mean()


@pytest.mark.long(quick=["tensor(2)"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "data(4)"])
def test_outputs_and_targets_may_be_dicts(strategy):
    result = {}
    for name in (strategy, "solo"):
        model = build_seeded(Named)
        with cp.parallelize(model, ADAMW, both, strategy=name) as step:
            for x, extra, targets in batches((12, 8)):
                step(x, {"label": targets, "weight": extra[:, 0]})
        result[name] = params_of(model)
    assert max_difference(result[strategy], result["solo"]) <= 1e-12


def test_an_optimizer_of_the_users_is_the_one_whose_options_count():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy="zero(2, level=2)") as step:
        (x, _, targets), *_ = batches()
        step(x, targets)
        assert step.optimizer is optimizer
        assert equal_bits(params_of(step.export_weights()), params_of(mlp()))
        optimizer.param_groups[0]["lr"] = 0.5
        step(x, targets)
    assert not equal_bits(params_of(model), params_of(mlp()))


def test_weights_can_be_looked_at_in_between():
    seen: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name in ("solo", "zero(2, level=3)"):
        model = mlp()
        with cp.parallelize(model, ADAMW, F.cross_entropy, strategy=name) as step:
            for x, _, targets in batches((12, 12)):
                step(x, targets)
                seen.setdefault(name, []).append(params_of(step.export_weights()))
    for mine, theirs in zip(*seen.values(), strict=True):
        assert max_difference(mine, theirs) <= 1e-12


def test_a_batch_that_does_not_divide_is_refused_before_the_first_step():
    model = mlp()
    (x, _, targets), *_ = batches((7,))
    with (
        pytest.raises(
            cp.PlanError,
            match=r"^a batch of 7 samples cannot be split into the 2 equal microbatches of data.*; call the step with 6 or "
            r"8 samples in all, or give another num_microbatches$",
        ),
        cp.parallelize(model, ADAMW, F.cross_entropy, strategy="data(2)") as step,
    ):
        step(x, targets)
    assert equal_bits(params_of(model), params_of(mlp()))
    assert list_rank_threads() == []


def test_an_error_in_the_loop_leaves_no_threads():
    with pytest.raises(ZeroDivisionError), cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="data(2)"):
        raise ZeroDivisionError
    assert list_rank_threads() == []


def test_wrong_names_of_inputs_show_what_forward_takes():
    (x, extra, targets), *_ = batches((12,))
    with (
        pytest.raises(cp.PlanError, match=r"^Pair.forward\(x, extra\) cannot be called with 0 positional and 2 named"),
        cp.parallelize(build_seeded(Pair), ADAMW, F.cross_entropy, strategy="data(2)") as step,
    ):
        step({"x": x, "other": extra}, targets)


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
@pytest.mark.parametrize(("inputs", "targets"), [(12, 24), (24, 23)])
def test_inputs_and_targets_of_different_lengths_are_refused(strategy, inputs, targets):
    step = cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy=strategy)
    x, y = torch.randn(inputs, 6).double(), torch.zeros(targets, dtype=torch.long)
    with pytest.raises(cp.DataError, match=f"^the inputs have {inputs} samples, the targets {targets}; samples lie"):
        step(x, y)
    step.close()


@pytest.mark.long(quick=["zero(2, level=3)", "server(2)", "solo"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_weights_that_are_changed_between_steps_are_taken_to_all_ranks(strategy):
    """Ranks other than the first went on with what they had."""
    (x, _, y), *_ = batches()
    model, theirs = mlp(), mlp()
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy=strategy) as step:
        step(x, y)
        step.export_weights()
        model.load_state_dict(theirs.state_dict())
        step.import_weights()
        assert step(x, y) == pytest.approx(float(F.cross_entropy(theirs(x), y).detach()), rel=1e-12)


@pytest.mark.long(quick=["zero(2, level=2)", "pipeline(2)", "tensor(2)"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_are_changed_silently_are_refused_where_ranks_train_copies(strategy):
    (x, _, y), *_ = batches()
    model = mlp()
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy=strategy) as step:
        step(x, y)
        step(x, y)
        with torch.no_grad():
            model[2].weight.zero_()
        with pytest.raises(cp.DataError, match=r"^2.weight of the model changed between two steps, but under "):
            step(x, y)
