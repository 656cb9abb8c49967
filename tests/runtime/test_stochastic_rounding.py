"""Weights in bf16 that are rounded stochastically: without bias, and in the same way on any number of ranks."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.optim.low_bit_adam import AdamWBf16
from counterpoint.runtime.stochastic_rounding import ROW, element_words, round_stochastically
from tests.training.trainers import equal_bits, make_trainer, params_of

CPU = torch.device("cpu")
BF16 = "bf16(rounding=stochastic)"
DRAWS = 10_000


def model(width=8):
    torch.manual_seed(0)
    return nn.Linear(width, 4, bias=False).to(torch.bfloat16)


def product(outputs, targets):
    """A loss whose gradients are sums of small integers, which bf16 holds exactly in any order."""
    return (outputs * targets).mean()


def small_integers(seed, num_samples=8, width=8):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-2, 3, (num_samples, size), generator=draw).to(torch.bfloat16) for size in (width, 4))


def train(plan, num_microbatches, *, num_steps=5, precision=BF16, optimizer=optim.AdamW, **options):
    one = model()
    with cp.parallelize(
        one,
        lambda params: optimizer(params, lr=1e-3),
        product,
        strategy=plan,
        num_microbatches=num_microbatches,
        precision=precision,
        **options,
    ) as step:
        for number in range(num_steps):
            step(*small_integers(number))
    return params_of(one)


@pytest.mark.parametrize("value", [1 + 2**-9, -3.3, 1e-39, 65_000.7])
def test_the_mean_of_many_roundings_is_the_value(value):
    values = torch.full((DRAWS,), value)
    rounded = round_stochastically(values, element_words(1, 0, DRAWS, CPU)).double()
    spread = rounded.max() - rounded.min()
    assert len(rounded.unique()) == 2
    assert rounded.min() < values[0] < rounded.max()
    assert abs(rounded.mean() - values[0].double()) <= 5 * spread / 2 / DRAWS**0.5


@pytest.mark.parametrize("value", [0.0, -1.0, 0.5, float("inf"), float("-inf"), 2.0**-133])
def test_what_bf16_holds_stays(value):
    rounded = round_stochastically(torch.full((100,), value), element_words(1, 0, 100, CPU))
    assert rounded.tolist() == [value] * 100


def test_nan_stays_nan():
    rounded = round_stochastically(torch.full((100,), float("nan")), element_words(1, 0, 100, CPU))
    assert rounded.isnan().all()


@pytest.mark.parametrize(
    ("first", "stop"), [(0, 1), (5, ROW), (ROW - 1, ROW + 1), (ROW, 3 * ROW), (2 * ROW + 7, 2 * ROW + 8)]
)
def test_the_random_numbers_of_an_element_do_not_depend_on_the_range(first, stop):
    whole = element_words(7, 0, 3 * ROW, CPU)
    assert torch.equal(element_words(7, first, stop, CPU), whole[first:stop])


@pytest.mark.long(quick=["False-zero(2, level=3)-2"])
@pytest.mark.parametrize(
    ("plan", "num_microbatches"),
    [
        ("data(2)", 2),
        ("data(4)", 1),
        ("zero(2)", 2),
        ("zero(4, level=2)", 1),
        ("zero(2, level=3)", 2),
        ("zero(4, level=3)", 1),
    ],
)
@pytest.mark.parametrize("share", [True, False])
def test_any_number_of_ranks_rounds_in_the_same_way(plan, num_microbatches, share):
    options = {} if share else {"share_params_on_host": False}
    assert equal_bits(train(plan, num_microbatches, **options), train("solo", 4))


def test_rounding_differs_from_that_to_the_nearest_and_by_the_seed():
    results = [train("solo", 1), train("solo", 1, seed=1), train("solo", 1, precision="bf16")]
    assert not any(equal_bits(results[a], results[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(("precision", "expected"), [(BF16, 0.9), ("bf16", 1.0)])
def test_updates_below_the_distance_of_two_weights_add_up(precision, expected):
    one = nn.Linear(256, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(one.weight)
    x, y = torch.ones(4, 256, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16)
    with cp.parallelize(one, lambda params: optim.SGD(params, lr=1e-3), product, precision=precision) as step:
        for _ in range(100):
            step(x, y)
    assert one.weight.double().mean().item() == pytest.approx(expected, abs=2e-3)


def fit(plan, max_steps, folder=None, resume=None):
    """Return the weights after some steps of a trainer."""
    data = torch.utils.data.TensorDataset(*small_integers(0, num_samples=32))
    with make_trainer(plan, model(), loss=product, precision=BF16) as trainer:
        trainer.fit(data, batch_size=8, max_steps=max_steps, epochs=2, checkpoint_dir=folder, resume=resume)
        return params_of(trainer.model)


@pytest.mark.long(quick=["data(2)-zero(2, level=3)"])
@pytest.mark.parametrize(("first", "second"), [("solo", "solo"), ("data(2)", "zero(2, level=3)"), ("zero(2)", "solo")])
def test_a_run_that_continues_rounds_as_one_that_was_not_stopped(first, second, tmp_path):
    fit(first, 3, tmp_path)
    assert equal_bits(fit(second, 6, tmp_path, tmp_path), fit("solo", 6))


def state_dtypes(plan, precision, folder, optimizer):
    """Continue a checkpoint for a step; return the dtypes of the optimizer's state with a number for each element."""
    one, data = model(), small_integers(0)
    with cp.parallelize(one, optimizer, product, strategy=plan, precision=precision) as step:
        if folder.exists():
            step.load(folder)
        step(*data)
        (state,) = step.full_optimizer_state()["state"].values()
        step.save(folder)
    return {value.dtype for value in state.values() if isinstance(value, torch.Tensor) and value.dim() == 2}


@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.Adafactor, partial(AdamWBf16, lr=1e-3, betas=(0.9, 0.95))])
@pytest.mark.parametrize("plans", [("data(2)", "zero(2, level=3)"), ("zero(2)", "solo")])
def test_a_run_that_continues_with_another_rounding_has_the_state_of_its_own(optimizer, plans, tmp_path):
    """It was an error of torch in the first step: "expected dtype float for `end` but got dtype c10::BFloat16"."""
    wide = torch.bfloat16 if isinstance(optimizer, partial) else torch.float32
    for plan, precision, dtype in zip(plans * 2, (BF16, None) * 2, (wide, torch.bfloat16) * 2, strict=True):
        assert state_dtypes(plan, precision, tmp_path / "saved", optimizer) == {dtype}


def test_other_parameters_are_updated_as_always():
    mixed = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16), nn.LayerNorm(8), nn.Linear(8, 4).to(torch.bfloat16))
    with cp.parallelize(mixed, optim.AdamW, product, strategy="data(2)", precision=BF16) as step:
        step(*small_integers(0))
        step(*small_integers(1))
    assert {param.dtype for param in mixed.parameters()} == {torch.bfloat16, torch.float32}
    assert not torch.isclose(params_of(mixed)["1.weight"], torch.ones(8)).any()


def test_weights_that_are_not_in_bf16_are_refused():
    with pytest.raises(PlanError, match=r"rounds weights in bf16, but the model's are float32, which need no rounding"):
        cp.parallelize(nn.Linear(8, 4), optim.AdamW, product, precision=BF16)(*small_integers(0))


@pytest.mark.parametrize("plan", ["server(2, consistency=asp)", "data(2, sync_every=2)", "data(2, staleness=1)"])
def test_plans_that_apply_gradients_of_several_steps_are_refused(plan):
    with pytest.raises(PlanError, match="rounds by the number of the step, but under"):
        cp.parallelize(model(), optim.AdamW, product, strategy=plan, precision=BF16)(*small_integers(0))


@pytest.mark.parametrize(
    ("text", "error"),
    [("fp16(rounding=stochastic)", "is for weights in bf16"), ("bf16(rounding=up)", "is not nearest or stochastic")],
)
def test_a_rounding_that_there_is_not_is_refused(text, error):
    with pytest.raises(PlanError, match=error):
        cp.parallelize(model(), optim.AdamW, product, precision=text)
