"""Optimizer states of 8 bits and in bf16 are the same bits under every plan, and in a checkpoint that another loads."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.optim.low_bit_adam import Adam8bit, AdamW8bit, AdamWBf16
from counterpoint.testing import parity
from counterpoint.testing.parity_models import TrainConfig, make_parity_model, plan_for
from tests.training.trainers import equal_bits, make_trainer, params_of

MAKERS: dict[str, Any] = {
    "8bit": partial(AdamW8bit, lr=1e-2, min_8bit_size=512),
    "bf16": partial(AdamWBf16, lr=1e-2, betas=(0.9, 0.95)),
}
PLANS = [("data(2)", 2), ("zero(2)", 2), ("zero(2, level=2)", 2), ("zero(2, level=3)", 2), ("zero(4)", 1),
         ("zero(4, level=3)", 1), ("server(2)", 2), ("tree(2)", 2)]  # fmt: skip
IN, OUT = 131, 64  # 8384 elements: 32 blocks that begin within rows, and a part of one


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, OUT, bias=False))


def product(outputs, targets):
    """A loss whose gradients are sums of small integers over a power of two: exact in any order."""
    return (outputs * targets).mean()


def small_integers(seed, num_samples=8):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-2, 3, (num_samples, size), generator=draw).float() for size in (IN, OUT))


def train(plan, num_microbatches, name, *, num_steps=4, **options):
    """Return the weights and the entries of the optimizer's state."""
    one = model()
    with cp.parallelize(
        one, MAKERS[name], product, strategy=plan, num_microbatches=num_microbatches, **options
    ) as step:
        for number in range(num_steps):
            step(*small_integers(number))
        (state,) = step.full_optimizer_state()["state"].values()
    return params_of(one), state


@cache
def solo(name):
    return train("solo", 4, name)


@pytest.mark.parametrize("name", MAKERS)
def test_one_rank_trains_as_a_plain_loop(name):
    one = model()
    optimizer = MAKERS[name](one.parameters())
    for number in range(4):
        inputs, targets = small_integers(number)
        optimizer.zero_grad()
        product(one(inputs), targets).backward()
        optimizer.step()
    weights, state = solo(name)
    assert equal_bits(weights, params_of(one))
    assert equal_bits(state, optimizer.state[one[0].weight])


@pytest.mark.long(quick=["False-tree(2)-2-bf16", "True-zero(4, level=3)-1-8bit", "True-server(2)-2-8bit"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS)
@pytest.mark.parametrize("share", [True, False])
def test_any_number_of_ranks_has_the_same_weights_and_the_same_state(plan, num_microbatches, name, share):
    options = {} if share else {"share_params_on_host": False}
    weights, state = train(plan, num_microbatches, name, **options)
    assert equal_bits(weights, solo(name)[0])
    assert equal_bits(state, solo(name)[1])


@pytest.mark.long(quick=["bf16(rounding=stochastic)-zero(2, level=3)"])
@pytest.mark.parametrize("plan", ["zero(2)", "zero(2, level=3)", "data(2)"])
@pytest.mark.parametrize("precision", [None, "bf16(rounding=stochastic)"])
def test_weights_in_bf16_have_the_same_bits_on_two_ranks(plan, precision):
    results = []
    for strategy, num_microbatches in (("solo", 4), (plan, 2)):
        one = model().to(torch.bfloat16)
        options = {"strategy": strategy, "num_microbatches": num_microbatches, "precision": precision}
        with cp.parallelize(one, MAKERS["8bit"], product, **options) as step:
            for number in range(4):
                step(*(values.to(torch.bfloat16) for values in small_integers(number)))
        results.append(params_of(one))
    assert equal_bits(*results)


def test_each_rank_keeps_the_codes_of_its_own_shard_only():
    with cp.parallelize(model(), MAKERS["8bit"], product, strategy="zero(4)", num_microbatches=1) as step:
        step(*small_integers(0))
        sizes = [
            [len(state[key]) for key in ("exp_avg_codes", "exp_avg_scales")]
            for rank in step.local_ranks.ranks.values()
            for optimizer, _ in rank.interpreter.store.optimizers.values()
            if optimizer is not None
            for state in optimizer.state.values()
        ]
    assert sizes == [[2560, 10], [2048, 8], [2048, 8], [1728, 7]]


def fit(plan, max_steps, name, folder=None, resume=None):
    """Return the weights after some steps of a trainer."""
    data = torch.utils.data.TensorDataset(*small_integers(0, num_samples=32))
    with make_trainer(plan, model(), loss=product, optimizer=MAKERS[name]) as trainer:
        trainer.fit(data, batch_size=8, max_steps=max_steps, epochs=2, checkpoint_dir=folder, resume=resume)
        return params_of(trainer.model)


@pytest.mark.long(quick=["zero(4, level=3)-data(2)-bf16"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("first", "second"), [("solo", "zero(4)"), ("zero(4, level=3)", "data(2)"), ("zero(2)", "solo")]
)
def test_a_run_continues_under_another_plan_with_the_same_bits(first, second, name, tmp_path):
    fit(first, 3, name, tmp_path)
    assert equal_bits(fit(second, 6, name, tmp_path, tmp_path), fit("solo", 6, name))


@pytest.mark.long(quick=["zero(2)-bf16"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("plan", ["zero(2)", "data(2)"])
def test_a_state_that_is_loaded_between_steps_goes_to_the_ranks(plan, name):
    weights, state = solo(name)
    one = model()
    optimizer = MAKERS[name](one.parameters())
    with cp.parallelize(one, optimizer, product, strategy=plan, num_microbatches=2, share_params_on_host=False) as step:
        for number in range(2):
            step(*small_integers(number))
        optimizer.load_state_dict(optimizer.state_dict())
        for number in range(2, 4):
            step(*small_integers(number))
        assert equal_bits(optimizer.state_dict()["state"][0], state)
    assert equal_bits(params_of(one), weights)


@pytest.mark.long(quick=["tensor(2)"])
@pytest.mark.parametrize("strategy", ["pipeline(2)", "tensor(2)", "pipeline(2) * zero(2, level=2)", "data(2)"])
def test_bf16_is_elementwise_so_that_plans_may_slice_parameters(strategy):
    recipe = TrainConfig(MAKERS["bf16"])
    reference = parity.train(make_parity_model("mlp"), plan_for("solo", 4), recipe)
    run = parity.train(make_parity_model("mlp"), plan_for(strategy, 4), recipe)
    assert max(parity.relative_difference(run.params[name], reference.params[name]) for name in run.params) <= 1e-12


@pytest.mark.long(quick=["pipeline(2) * zero(2, level=2)", "zero(2) + overlap"])
@pytest.mark.parametrize("strategy", ["pipeline(2)", "pipeline(2) * zero(2, level=2)", "zero(2) + overlap"])
def test_8_bits_equal_solo_where_parameters_stay_whole_or_are_cut_between_blocks(strategy):
    recipe = TrainConfig(partial(Adam8bit, lr=1e-2, min_8bit_size=512))
    reference = parity.train(make_parity_model("mlp"), plan_for("solo", 4), recipe)
    run = parity.train(make_parity_model("mlp"), plan_for(strategy, 4), recipe)
    assert max(parity.relative_difference(run.params[name], reference.params[name]) for name in run.params) <= 1e-12


def test_slices_of_parameters_have_other_blocks_and_are_refused():
    text = r"^AdamW8bit may need whole tensors, but under tensor\(2\) a rank has only a shard of .* or data, zero or"
    with pytest.raises(PlanError, match=text):
        parity.train(make_parity_model("mlp"), plan_for("tensor(2)", 4), TrainConfig(MAKERS["8bit"]))


@pytest.mark.parametrize("plan", ["data(2, sync_every=2)", "easgd(2)"])
def test_replicas_with_states_of_their_own_are_refused_for_codes_have_no_mean(plan):
    with pytest.raises(
        PlanError, match=r"AdamW8bit keeps codes of 8 bits, which have no mean over replicas, but under"
    ):
        cp.parallelize(model(), MAKERS["8bit"], product, strategy=plan)(*small_integers(0))


def train_in_processes(plan):
    weights, state = train(plan, 2, "8bit")
    return {**weights, **state}


@pytest.mark.process
@pytest.mark.long
def test_two_processes_have_the_same_weights_and_the_same_state():
    weights, state = solo("8bit")
    for result in cp.launch(train_in_processes, ranks=2, args=["zero(2, level=3)"]):
        assert equal_bits(result, {**weights, **state})
