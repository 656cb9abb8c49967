"""Gradients that are read after a step: those of a plain loop, or an error that says how to get them."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.runtime.full_state import gather_grad_norms, gather_grads
from counterpoint.training.between_steps.stale_weights import StaleGrads, StaleWeights
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, make_generator, max_difference, params_of

PLANS = ["solo", "data(2)", "zero1(2)", "zero2(2)", "zero3(2)", "pipeline(2)", "tensor(2)", "server(2)", "tree(2)"]
SGD = partial(optim.SGD, lr=0.5, momentum=0.9)


def net():
    model = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    model[2].bias.requires_grad_(False)
    return model


def batches(num=3):
    random = make_generator()
    return [
        (torch.randn(8, 4, generator=random, dtype=torch.float64), torch.randint(3, (8,), generator=random))
        for _ in range(num)
    ]


def grads_of(model):
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def plain_grads(clip_norm=None):
    model, found = net(), []
    optimizer = SGD(model.parameters())
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)
        optimizer.step()
        found.append((grads_of(model), float(norm)))
    return found


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    assert max_difference(found, expected) < 1e-12


@pytest.mark.long(quick=["zero3(2)-{}", "server(2)-{'share_params_on_host': False}"])
@pytest.mark.parametrize(
    ("plan", "options"),
    each_value_once(PLANS, [{}, {"clip_norm": 0.05}, {"num_microbatches": 2}, {"share_params_on_host": False}]),
    ids=str,
)
def test_gradients_after_each_step_are_those_of_a_plain_loop(plan, options):
    model = net()
    expected = plain_grads(options.get("clip_norm"))
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy=plan, **options) as step:
        for batch, (grads, norm) in zip(batches(), expected, strict=True):
            step(*batch)
            assert step.grad_norm == pytest.approx(norm, rel=1e-12)
            norms = {name: float(grad.norm()) for name, grad in grads.items()}
            assert step.grad_norms() == pytest.approx(norms, rel=1e-12)
            require_equal(step.gradients(), grads)
            require_equal(grads_of(model), grads)


@pytest.mark.long(quick=["zero2(2)", "zero3(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_may_be_read_after_the_weights(plan):
    model = net()
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy=plan) as step:
        for batch, (grads, _) in zip(batches(), plain_grads(), strict=True):
            step(*batch)
            if plan != "solo":  # which asks for gradients only to drop them
                step.optimizer.zero_grad()
            assert all(bool(param.isfinite().all()) for param in model.parameters())
            require_equal(grads_of(model), grads)


def test_gradients_of_large_matrices_in_shared_memory_are_whole():
    def build():
        return build_seeded(lambda: nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 3)))

    expected, model, (inputs, targets) = build(), build(), batches()[0]
    F.cross_entropy(expected(inputs), targets).backward()
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy="data(2)") as step:
        step(inputs, targets)
        require_equal(step.gradients(), grads_of(expected))
        assert bool(model[0].weight.isfinite().all())
        require_equal(grads_of(model), grads_of(expected))


def test_gradients_of_tables_are_whole():
    def build():
        return build_seeded(lambda: nn.Sequential(nn.EmbeddingBag(200, 4, mode="sum", sparse=True), nn.Linear(4, 3)))

    random = make_generator()
    batch = torch.randint(20, (8, 3), generator=random), torch.randint(3, (8,), generator=random)
    expected = build()
    F.cross_entropy(expected(batch[0]), batch[1]).backward()
    apart: dict[str, Any] = {"share_params_on_host": False}
    for plan, options in (("solo", {}), ("data(2)", apart), ("data(2)", {}), ("zero1(2)", apart), ("zero3(2)", apart)):
        model = build()
        with cp.parallelize(model, partial(optim.SGD, lr=0.1), F.cross_entropy, strategy=plan, **options) as step:
            step(*batch)
            if options or plan == "solo":
                require_equal(step.gradients(), {name: grad.to_dense() for name, grad in grads_of(expected).items()})
            else:
                with pytest.raises(cp.DataError, match=r"share_params_on_host=False to keep them$"):
                    step.gradients()


def call_on_rank(gather, ranks, fabric):
    return gather(ranks.shard_map(), [ranks.ranks[fabric.rank]], fabric)


def test_gradients_that_ranks_of_other_processes_have_are_gathered_by_all_of_them():
    model, (grads, _) = net(), plain_grads()[0]
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy="zero3(2)") as step:
        step(*batches()[0])
        ranks = step.local_ranks
        for gather, expected in (
            (gather_grads, grads),
            (gather_grad_norms, {name: float(grad.norm()) for name, grad in grads.items()}),
        ):
            found = ranks.world.run(partial(call_on_rank, gather, ranks))
            for values in found:
                assert values.keys() == expected.keys()
                for name, value in values.items():
                    torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[name]))


def test_a_gradient_that_other_processes_have_is_refused():
    layer = nn.Linear(2, 2)
    grads = StaleGrads(dict(layer.named_parameters()), "zero3(2)", dict, is_single_process=False)
    stale = StaleWeights({}, "zero3(2)", None, grads)
    stale.mark()
    text = r"^the grad of weight is read after a step, but under zero3\(2\) .* call step\.gradients\(\), .* clip_norm"
    with pytest.raises(cp.DataError, match=text):
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    layer.zero_grad()
    layer.double()
    copied = copy.deepcopy(layer)
    assert type(copied.weight) is nn.Parameter
    assert copied.weight.grad is None
    stale.unmark()
    assert layer.weight.grad is None


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)"])
def test_a_gradient_that_is_clipped_after_its_step_is_an_error(plan):
    model = net()
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy=plan) as step:
        step(*batches()[0])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(
            cp.DataError, match=r"^the grad of 0\.weight was changed after the step, .* clip_norm=\.\.\."
        ):
            step(*batches()[1])
        step(*batches()[1])


@pytest.mark.parametrize("plan", ["server(2, consistency=asp)", "data(2, staleness=1)", "easgd(2)"])
def test_plans_without_a_gradient_of_a_step_say_so(plan):
    model = net()
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy=plan) as step:
        step(*batches()[0])
        for read in (lambda: model[0].weight.grad, step.gradients, step.grad_norms, lambda: step.grad_norm):
            with pytest.raises(cp.DataError, match=r"^there is no gradient of the last step: under .*full_weights"):
                read()


def test_there_is_no_gradient_before_a_step():
    model = net()
    step = cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy="data(2)")
    with step, pytest.raises(cp.DataError, match=r"^there is no gradient of a step: none was taken"):
        step.gradients()


def test_gradients_of_code_between_steps_do_not_enter_the_next_one():
    """As after zero_grad(), which a plain loop calls before each backward."""
    expected, model = net(), net()
    optimizer = SGD(expected.parameters())
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(expected(inputs), targets).backward()
        optimizer.step()
    with cp.parallelize(model, SGD(model.parameters()), F.cross_entropy, strategy="solo") as step:
        for batch in batches():
            step(*batch)
            model(batch[0]).sum().backward()
    require_equal(params_of(model), params_of(expected))


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs * self.temperature, targets)


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
def test_parameters_of_the_loss_have_gradients_too(plan):
    (model, loss), (expected, expected_loss), (inputs, targets) = (net(), Tempered()), (net(), Tempered()), batches()[0]
    expected_loss(expected(inputs), targets).backward()
    with cp.parallelize(model, SGD([*model.parameters(), *loss.parameters()]), loss, strategy=plan) as step:
        step(inputs, targets)
        torch.testing.assert_close(loss.temperature.grad, expected_loss.temperature.grad, rtol=1e-12, atol=0.0)
