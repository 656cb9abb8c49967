"""ZeRO with block-wise quantized gathers of weights (qwZ) and reductions of gradients (qgZ), against a plain loop."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import counterpoint as cp
from counterpoint.data.sampler import split_batch
from counterpoint.plan.plan import Plan
from counterpoint.strategies.zero import Zero
from tests.process.forked_ranks import run_forked
from tests.references import quantized_zero
from tests.training.trainers import build_seeded, equal_bits, max_difference

ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
WIDTH, NUM_SAMPLES = 6, (8, 5, 8)
BUILD = partial(
    build_seeded,
    lambda: nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 9), nn.Tanh(), nn.Linear(9, 3)),
)
"""Parameters of 1800 and 2700 elements have several chunks, which two ranks share; others are smaller than one."""
BOTH = "quantized_weights=int8, quantized_gradients=int4"
PLANS = {
    f"zero(2, level=3, {BOTH})": [[(0, 1), (2, 3)]],
    "zero(2, level=3, quantized_weights=int4)": [[(0, 1), (2, 3)]],
    "zero(2, level=3, quantized_gradients=int8)": [[(0, 1), (2, 3)]],
    f"zero(2, level=3, reshard_after_forward=off, {BOTH})": [[(0, 1), (2, 3)]],
    f"zero(4, level=3, {BOTH})": [[(0,), (1,), (2,), (3,)]],
    f"zero(2, level=3, {BOTH}) * data(2)": [[(0,), (1,)], [(2,), (3,)]],
    "zero(2, level=2, quantized_gradients=int4)": [[(0, 1), (2, 3)]],
    "zero(2, level=1, quantized_gradients=int4)": [[(0, 1), (2, 3)]],
}
"""Plans with four microbatches, and those of each rank of each group that reduces."""


def batches():
    draw = torch.Generator().manual_seed(4)
    shapes = [(length, WIDTH, 3) for length in NUM_SAMPLES]
    return [
        (torch.randn(length, inputs, generator=draw).double(), torch.randn(length, outputs, generator=draw).double())
        for length, inputs, outputs in shapes
    ]


def train(plan, passes=(), **options):
    """Return the losses of a step of each batch, and the weights after them."""
    model, parsed = BUILD(), Plan.parse(plan)
    parsed = replace(Plan.parse(plan, num_microbatches=4 // parsed.num_ranks), passes=passes)
    with cp.parallelize(model, ADAMW(model.parameters()), F.mse_loss, strategy=parsed, **options) as step:
        losses = [float(step(inputs, targets)) for inputs, targets in batches()]
        step.export_weights()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


@cache
def reference(plan):
    model = BUILD()
    zero = Plan.parse(plan).strategies[0]
    assert isinstance(zero, Zero)
    micros = [
        [(inputs[start:stop], targets[start:stop]) for start, stop in split_batch(len(inputs), 4)]
        for inputs, targets in batches()
    ]
    losses = quantized_zero.train(
        model, ADAMW(model.parameters()), F.mse_loss, micros, weights=zero.quantized_weights,
        gradients=zero.quantized_gradients, groups=PLANS[plan], once=zero.level == 1,
    )  # fmt: skip
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def check(plan, losses, weights):
    expected_losses, expected = reference(plan)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max_difference(weights, expected) <= 1e-12


@pytest.mark.parametrize("passes", [(), ("overlap", "prefetch")], ids=["blocking", "prefetch"])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_those_of_a_loop_that_rounds_what_each_rank_sends(plan, passes):
    check(plan, *train(plan, passes))


def test_what_is_rounded_is_not_what_an_exact_run_computes():
    exact = train("zero(2, level=3)")[1]
    for plan in PLANS:
        assert max_difference(reference(plan)[1], exact) > 1e-6


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_evaluation_reads_what_training_reads(precision):
    """The loss before the first step is that of the step; the exact weights of the model have another one."""
    inputs, targets = (tensor.float() for tensor in batches()[0])
    data, plan = DataLoader(TensorDataset(inputs, targets), batch_size=8), Plan.parse(f"zero(2, level=3, {BOTH})")
    options = {"loss": F.mse_loss, "optimizer": ADAMW, "strategy": plan, "precision": precision}
    with cp.Trainer(BUILD().float(), **options) as trainer:
        evaluated = trainer.evaluate(data)["loss"]
        trained = trainer.fit(data).steps[0].loss
    exact = float(F.mse_loss(BUILD().float()(inputs), targets).detach())
    assert evaluated == pytest.approx(trained, rel=1e-6)
    assert exact == pytest.approx(trained, rel=3e-2)
    assert abs(exact - trained) > 1e-5 * exact


def test_checkpoints_have_exact_weights_and_continue_bit_for_bit(tmp_path):
    plan = f"zero(2, level=3, {BOTH})"
    whole = train(plan)[1]
    model, saved = BUILD(), Plan.parse(plan, num_microbatches=2)
    with cp.parallelize(model, ADAMW(model.parameters()), F.mse_loss, strategy=saved) as step:
        for inputs, targets in batches()[:2]:
            step(inputs, targets)
        step.export_weights()
        step.save(tmp_path)
    other = BUILD()
    with cp.parallelize(other, ADAMW(other.parameters()), F.mse_loss, strategy=saved) as step:
        step.load(tmp_path)
        assert equal_bits(dict(other.state_dict()), dict(model.state_dict()))
        step(*batches()[2])
        step.export_weights()
    assert equal_bits(dict(other.state_dict()), whole)


@pytest.mark.parametrize("passes", [("offload:params=disk",), ("overlap", "prefetch", "recompute")])
def test_passes_do_not_change_what_is_rounded(passes, tmp_path):
    plan = f"zero(2, level=3, {BOTH})"
    check(plan, *train(plan, passes, offload_folder=tmp_path))


def test_a_parameter_without_a_gradient_may_be_skipped():
    plan = f"zero(2, level=3, {BOTH})"
    check(plan, *train(plan, unused_parameters="skip"))


def test_gradients_are_not_quantized_and_cast_as_well():
    """Weights may be gathered in a codec while gradients are summed in bf16."""
    with pytest.raises(cp.PlanError, match=r"reduces them with int4; give one of the two"):
        train(f"zero(2, level=3, {BOTH})", precision="fp32(reduce=bf16)")
    train("zero(2, level=3, quantized_weights=int8)", precision="fp32(reduce=bf16)")


def test_a_gradient_that_is_not_finite_skips_the_step():
    model, (inputs, targets) = BUILD(), batches()[0]
    plan = Plan.parse(f"zero(2, level=3, {BOTH})")
    with cp.parallelize(model, ADAMW(model.parameters()), F.mse_loss, strategy=plan, nonfinite="skip") as step:
        step(inputs, targets * torch.inf)
        step.export_weights()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in BUILD().state_dict().items())


def train_as_rank(plans):
    return [train(plan, ("overlap", "prefetch")) for plan in plans]


@pytest.mark.process
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_compute_the_same_bits_as_ranks_of_one_process(num_ranks):
    plans = [plan for plan in PLANS if Plan.parse(plan).num_ranks == num_ranks]
    for results in run_forked(train_as_rank, ranks=num_ranks, args=[plans]):
        assert len(results) == len(plans), results
        for plan, (losses, weights) in zip(plans, results, strict=True):
            expected_losses, expected = train(plan)
            assert losses == expected_losses
            assert all(torch.equal(weights[name], value) for name, value in expected.items())
