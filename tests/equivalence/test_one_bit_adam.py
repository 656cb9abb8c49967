"""1-bit Adam under ``data(n, compress=onebit, compress_from=m)``: the numbers of a sequential loop, and what it refuses."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.optim.one_bit_adam import OneBitAdam
from counterpoint.plan.plan import Plan
from tests.process.forked_ranks import run_forked
from tests.references import one_bit_adam
from tests.training.trainers import build_seeded, equal_bits, max_difference

WIDTH, NUM_STEPS, FREEZE_STEP = 6, 7, 3
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
BUILD = partial(
    build_seeded,
    lambda: nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 9), nn.Tanh(), nn.Linear(9, 3)),
)
"""Parameters of 1800 and 2700 elements have several chunks, which ranks share; others are smaller than one."""
PLAIN_LATE_EARLY = ("", ", compress=int8, compress_from=7", ", compress=int8, compress_from=5")
PLAN = "data({}, compress=onebit, compress_from=3)"


def one_bit(params):
    return OneBitAdam(params, freeze_step=FREEZE_STEP, **OPTIONS)


def batches(num_steps=NUM_STEPS):
    draw = torch.Generator().manual_seed(4)
    return [
        (torch.randn(12, WIDTH, generator=draw).double(), torch.randn(12, 3, generator=draw).double())
        for _ in range(num_steps)
    ]


def train(plan, optimizer=one_bit, loss=F.mse_loss, steps=None, model=None, **options):
    model = BUILD() if model is None else model
    with cp.parallelize(model, optimizer(model.parameters()), loss, strategy=plan, **options) as step:
        losses = [float(step(*batch)) for batch in steps or batches()]
        step.export_weights()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def check(num_workers, losses, weights):
    model = BUILD()
    expected = one_bit_adam.train(
        model, F.mse_loss, batches(), num_workers=num_workers, freeze_step=FREEZE_STEP, **OPTIONS
    )
    assert losses == pytest.approx(expected, rel=1e-12)
    assert max_difference(weights, {key: value.detach() for key, value in model.state_dict().items()}) <= 1e-12


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_weights_are_those_of_the_algorithm(num_workers):
    check(num_workers, *train(PLAN.format(num_workers)))


def test_one_rank_has_frozen_squares_and_sends_nothing():
    losses, weights = train("solo")
    model = BUILD()
    optimizer = one_bit(model.parameters())
    for number, (inputs, targets) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == pytest.approx(losses[number], rel=1e-12)
    assert max_difference(weights, {key: value.detach() for key, value in model.state_dict().items()}) <= 1e-12


def test_microbatches_and_pairs_of_replicas_are_parts_of_a_worker():
    """A worker's gradient is exact, whoever computes it."""
    check(2, *train(Plan.parse(PLAN.format(2), num_microbatches=3)))
    check(2, *train("data(2) * " + PLAN.format(2)))


@pytest.mark.parametrize("num_before", [2, 3, 5])
def test_a_resumed_run_continues_bit_for_bit(num_before, tmp_path):
    """Before, at and after the first step that sends momenta."""
    plan, whole = PLAN.format(2), train(PLAN.format(2))[1]
    model, other = BUILD(), BUILD()
    with cp.parallelize(model, one_bit(model.parameters()), F.mse_loss, strategy=plan) as step:
        for batch in batches()[:num_before]:
            step(*batch)
        step.save(tmp_path)
    with cp.parallelize(other, one_bit(other.parameters()), F.mse_loss, strategy=plan) as step:
        step.load(tmp_path)
        for batch in batches()[num_before:]:
            step(*batch)
        step.export_weights()
    assert equal_bits(dict(other.state_dict()), whole)


def test_another_number_of_ranks_drops_what_was_not_sent(tmp_path):
    """They are residuals of its ranks; weights, momentum and squares are those that were saved."""
    model, other = BUILD(), BUILD()
    with cp.parallelize(model, one_bit(model.parameters()), F.mse_loss, strategy=PLAN.format(2)) as step:
        for batch in batches()[:5]:
            step(*batch)
        step.export_weights()
        step.save(tmp_path)
    with cp.parallelize(other, one_bit(other.parameters()), F.mse_loss, strategy=PLAN.format(3)) as step:
        step.load(tmp_path)
        with pytest.warns(RuntimeWarning, match="whose ranks had error-feedback residuals"):
            loss = step(*batches()[5])
    inputs, targets = batches()[5]
    assert loss == pytest.approx(float(F.mse_loss(model(inputs), targets).detach()), rel=1e-12)


def train_as_rank(plan):
    return train(plan)


@pytest.mark.process
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_compute_the_same_bits(num_ranks):
    plan = PLAN.format(num_ranks)
    losses, weights = train(plan)
    for result in run_forked(train_as_rank, ranks=num_ranks, args=[plan]):
        assert isinstance(result, list | tuple), result
        assert result[0] == losses
        assert equal_bits(result[1], weights)


REFUSED = [
    ({"optimizer": partial(optim.Adam, lr=1e-3)}, r"exchanges the momentum of 1-bit Adam, which Adam is not; give"),
    (
        {"optimizer": partial(OneBitAdam, lr=1e-3, freeze_step=2)},
        "OneBitAdam has freeze_step=2, but .* exchanges momenta from step 3 on; give both the same number",
    ),
    ({"clip_norm": 1.0}, "which clip_norm does not go with"),
    ({"nonfinite": "skip"}, "which nonfinite='skip' does not go with"),
    ({"precision": "fp32(reduce=bf16)"}, "precision with reduce"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_changes_gradients_after_their_sum_is_refused(options, message):
    with pytest.raises(cp.PlanError, match=message):
        train(PLAN.format(2), **options)


def test_ranks_with_a_part_of_the_momentum_are_refused():
    for level in (1, 2, 3):
        with pytest.raises(cp.PlanError, match="but onebit needs whole gradients; drop the codec"):
            train(f"zero(2, level={level}) * " + PLAN.format(2))


def test_any_codec_may_begin_later():
    """Until it does, the numbers are those without it."""
    adam = partial(optim.Adam, lr=1e-3)
    plain, late, early = (train(f"data(2{text})", adam)[1] for text in PLAIN_LATE_EARLY)
    assert equal_bits(plain, late)
    assert max_difference(plain, early) > 1e-6


def weighted(outputs, targets):
    return cp.WeightedMean(((outputs - targets) ** 2).sum(), targets.new_tensor(5.0 * len(targets)))


def test_a_mean_by_weights_is_refused_in_the_first_step():
    with pytest.raises(
        cp.DataError, match=r"gradients are multiplied with .* but ranks with compress=onebit sum momenta"
    ):
        train(PLAN.format(2), loss=weighted)
