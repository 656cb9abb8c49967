"""What Trainer.fit promises: a strategy is a word, and the numbers are those of the loop one would write by hand."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.data.sampler import Sampler
from counterpoint.program.text import format_instruction
from tests.covering import each_value_once
from tests.training.trainers import (
    ADAMW,
    STRATEGIES,
    batch_norm_mlp,
    build_seeded,
    dataset,
    equal_bits,
    fit,
    list_rank_threads,
    make_generator,
    make_trainer,
    max_difference,
    mlp,
    params_of,
    state_of,
)

UNSLICED = [name for name in STRATEGIES if name != "tensor(2)"]
MORE = ["data(4)", "pipeline(2) * data(2)", "pipeline(2, replicas=(2,1))", "zero(4, level=3)", "tensor(2) * data(2)"]


def by_hand(model, data, *, epochs=1, optimizer=ADAMW, clip_norm=None, clip_value=None, schedule=None):
    """Train on whole global batches, as anybody would; return the losses and the norms of the gradients."""
    stepping = optimizer(model.parameters()) if callable(optimizer) else optimizer
    scheduler = schedule(stepping) if schedule else None
    sampler, losses, norms = Sampler(len(data), 12), [], []
    for epoch in range(epochs):
        for index in range(sampler.num_batches):
            *inputs, targets = (field[sampler.batch(epoch, index)] for field in data.tensors)
            stepping.zero_grad()
            loss = F.cross_entropy(model(*inputs), targets)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))))
            nn.utils.clip_grad_value_(model.parameters(), clip_value or float("inf"))
            stepping.step()
            losses.append(float(loss.detach()))
            if scheduler is not None:
                scheduler.step()
    return losses, norms


@pytest.mark.long(quick=["pipeline(2, replicas=(2,1))-46"])
@pytest.mark.parametrize(("strategy", "num_samples"), each_value_once(["solo", *STRATEGIES, *MORE], [46, 39]), ids=str)
def test_the_gradient_is_the_mean_over_the_whole_batch(strategy, num_samples):
    """The last batch of 46 samples is uneven; that of 39 has an empty microbatch."""
    model, data = mlp(), dataset(num_samples)
    losses, _ = by_hand(model, data, epochs=2)
    result, history = fit(strategy, data=data, epochs=2)
    assert max_difference(result, params_of(model)) <= 1e-12
    assert history.losses == pytest.approx(losses, rel=1e-12)
    assert sum(step.num_samples for step in history.steps) == 2 * num_samples


@pytest.mark.parametrize("num_microbatches", [1, 3, 12])
def test_accumulated_microbatches_equal_one_large_batch(num_microbatches):
    model = mlp()
    by_hand(model, dataset())
    result, _ = fit(cp.Plan((), num_microbatches))
    assert max_difference(result, params_of(model)) <= 1e-12


@pytest.mark.long(quick=["pipeline(2, replicas=(2,1))-0.05"])
@pytest.mark.parametrize(
    ("strategy", "clip_norm"), each_value_once(["solo", *STRATEGIES, *MORE], [0.05, 100.0]), ids=str
)
def test_clipping_is_that_of_torch(strategy, clip_norm):
    model = mlp()
    _, norms = by_hand(model, dataset(), clip_norm=clip_norm)
    result, history = fit(strategy, clip_norm=clip_norm)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-12)
    assert max_difference(result, params_of(model)) <= 1e-12


@pytest.mark.long(quick=["zero(2, level=2)-0.5", "zero(2, level=3)-None", "pipeline(2)-0.5", "server(2)-0.5"])
@pytest.mark.parametrize(
    ("strategy", "clip_norm"),
    each_value_once(["solo", *STRATEGIES, "zero(2, level=3) * data(2)"], [None, 0.5]),
    ids=str,
)
def test_clipping_every_number_is_that_of_torch_and_comes_after_the_norm(strategy, clip_norm):
    given = {"clip_norm": clip_norm, "clip_value": 0.01, "optimizer": partial(optim.SGD, lr=0.5)}
    model, unclipped = mlp(), mlp()
    by_hand(model, dataset(), **given)
    by_hand(unclipped, dataset(), **{**given, "clip_value": None})
    assert max_difference(fit(strategy, **given)[0], params_of(model)) <= 1e-12
    assert max_difference(params_of(unclipped), params_of(model)) > 1e-3


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_groups_of_parameters_keep_their_own_options(strategy):
    """The usual two groups: weights decay, biases do not, and theirs is another learning rate."""

    def grouped(model):
        weights = [param for param in model.parameters() if param.dim() > 1]
        biases = [param for param in model.parameters() if param.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}]
        return optim.AdamW(groups, lr=0.01)

    mine, theirs = mlp(), mlp()
    cosine = partial(optim.lr_scheduler.CosineAnnealingLR, T_max=8)
    by_hand(theirs, dataset(), optimizer=grouped(theirs), schedule=cosine, epochs=2)
    result, history = fit(strategy, mine, optimizer=grouped(mine), lr_scheduler=cosine, epochs=2)
    assert max_difference(result, params_of(theirs)) <= 1e-12
    assert history.steps[0].options["weight_decay"] == 0.5


def frozen_in_the_middle():
    model = mlp()
    model[2].requires_grad_(False)
    return model


@pytest.mark.long(quick=["zero(2, level=3)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_frozen_parameters_stay_and_the_others_train(strategy):
    model = frozen_in_the_middle()
    by_hand(model, dataset())
    result, _ = fit(strategy, frozen_in_the_middle())
    assert max_difference(result, params_of(model)) <= 1e-12
    assert torch.equal(result["2.weight"], mlp()[2].weight)
    assert not torch.equal(result["0.weight"], mlp()[0].weight)


class Lars(optim.Optimizer):
    """Steps as long as the tensor's own norm says, so that a tensor may neither be joined with others nor cut."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moved = self.state[param].setdefault("moved", torch.zeros_like(param))
                    length = group["lr"] * (param.norm() + 1e-3) / (param.grad.norm() + 1e-9)
                    param.sub_(moved.mul_(group["momentum"]).add_(param.grad * length))


def without_biases():
    return build_seeded(
        lambda: nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6, bias=False), nn.Tanh())))
    )


WHOLE_TENSORS = {
    "lars": Lars,
    "adafactor": partial(optim.Adafactor, lr=0.05),
    "muon": partial(optim.Muon, lr=0.05),
}


@pytest.mark.long(quick=["zero(4, level=3)-muon"])
@pytest.mark.parametrize(
    ("strategy", "name"),
    each_value_once(["solo", *UNSLICED, cp.Plan.parse("zero(3, level=1)"), "zero(4, level=3)"], [*WHOLE_TENSORS]),
    ids=str,
)
def test_an_optimizer_that_looks_at_whole_tensors_sees_whole_tensors(strategy, name):
    optimizer = WHOLE_TENSORS[name]
    model = without_biases()
    by_hand(model, dataset(), optimizer=optimizer)
    result, _ = fit(strategy, without_biases(), optimizer=optimizer)
    assert (
        max_difference(result, params_of(model)) <= 1e-10
    )  # Muon computes in bfloat16, which may round once otherwise


class TwoPrecisions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(6, 8), nn.Parameter(torch.tensor(0.5)), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.float())).double() * self.scale)


def two_precisions():
    model = build_seeded(TwoPrecisions)
    model.first.float()
    return model


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("strategy", UNSLICED)
def test_parameters_may_be_of_several_dtypes(strategy):
    """The float32 half is equal up to its own rounding, and a parameter may have no dims."""
    mine, theirs = (fit(name, two_precisions())[0] for name in (strategy, "solo"))
    assert {name: value.dtype for name, value in mine.items()} == {n: v.dtype for n, v in theirs.items()}
    assert max_difference(mine, theirs) <= 1e-5
    assert mine["scale"].shape == ()


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipeline(2) * data(2)"])
def test_what_is_drawn_depends_on_the_seed_and_not_on_the_plan(strategy):
    names = params_of(batch_norm_mlp())
    (mine, history), (theirs, expected) = fit(strategy, batch_norm_mlp(), seed=5), fit("solo", batch_norm_mlp(), seed=5)
    assert max_difference(mine, theirs, names) <= 1e-12
    assert history.losses == pytest.approx(expected.losses, rel=1e-12)
    assert fit(strategy, batch_norm_mlp(), seed=6)[1].losses[0] != pytest.approx(expected.losses[0], rel=1e-6)


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_the_users_random_numbers_continue_as_if_nothing_was_trained(strategy):
    torch.manual_seed(77)
    expected = torch.rand(3)
    torch.manual_seed(77)
    fit(strategy, batch_norm_mlp(), fit_options={"eval_dataset": dataset(9)})
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.long(quick=["zero(2, level=1)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_two_calls_of_fit_train_as_one_longer_one(strategy):
    with make_trainer(strategy) as one:
        first = one.fit(dataset(), batch_size=12)
        second = one.fit(dataset(), batch_size=12)
        result = state_of(one.model)
    whole, history = fit(strategy, epochs=2)
    assert first.losses + second.losses == pytest.approx(history.losses, rel=1e-12)
    assert max_difference(result, whole) <= 1e-12


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_a_trainer_that_was_closed_continues_with_the_optimizers_state(strategy):
    """The steps counted on, but the momentum was gone."""
    with make_trainer(strategy) as one, make_trainer(strategy) as other:
        one.fit(dataset(), batch_size=12)
        one.close()
        one.fit(dataset(), batch_size=12)
        for _ in range(2):
            other.fit(dataset(), batch_size=12)
        assert equal_bits(state_of(one.model), state_of(other.model))


def test_the_modes_of_modules_are_as_the_user_set_them():
    for strategy in ["solo", "data(2)", "pipeline(2)"]:
        model = batch_norm_mlp()
        model[3].eval()
        fit(strategy, model, fit_options={"eval_dataset": dataset(9)})
        assert [module.training for module in model] == [True, True, True, False, True, True, True], strategy


def test_a_bare_name_trains_alone_where_no_launcher_gave_ranks():
    with cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, strategy="zero3") as one:
        one.fit(dataset(), batch_size=12)
        assert str(one.plan) == "solo"
        assert equal_bits(state_of(one.model), fit(cp.Plan())[0])


def test_a_pipeline_takes_as_many_microbatches_as_it_can_use():
    with cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, strategy="pipeline(2)") as one:
        one.fit(dataset(), batch_size=12)
        assert one.plan.num_microbatches == 6
        assert one.compiled is not None
        assert "F0.5" in cp.format_program(one.compiled.program)


def test_steps_tell_their_number_epoch_samples_and_rate():
    step = partial(optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    _, history = fit("data(2)", epochs=2, lr_scheduler=step)
    recorded = [(step.step, step.epoch, step.num_samples, step.options["lr"]) for step in history.steps]
    assert recorded == [(at, at // 4, 10 if at % 4 == 3 else 12, 0.01 * 0.5 ** (at + 1)) for at in range(8)]
    assert all(step.seconds > 0 for step in history.steps)


def test_a_measured_step_says_what_every_rank_did():
    traces = []

    class Listener(cp.Callback):
        def on_trace(self, event):
            traces.append(event)

    with make_trainer("pipeline(2)", callbacks=[Listener()]) as one:
        one.fit(dataset(), batch_size=12)
        compiled = one.compiled
    assert len(traces) == 1
    recorded = [" ".join(event.text for event in traces[0].trace.events if event.rank == rank) for rank in (0, 1)]
    assert recorded == [
        " ".join(map(format_instruction, rank_program.body)) for rank_program in compiled.program.rank_programs
    ]


@pytest.mark.long
def test_integers_and_several_inputs_reach_the_model():
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 3)

        def forward(self, tokens, x):
            return self.head(self.table(tokens) + x)

    tokens = torch.randint(0, 10, (46,), generator=make_generator())
    data = TensorDataset(tokens, *dataset().tensors)
    model = build_seeded(Looked)
    by_hand(model, data)
    for strategy in ["data(2)", "zero(2, level=3)", "pipeline(2)"]:
        assert max_difference(fit(strategy, build_seeded(Looked), data)[0], params_of(model)) <= 1e-12, strategy


@pytest.mark.long
def test_a_closed_trainer_leaves_no_threads():
    fit("zero(4, level=3)")
    assert list_rank_threads() == []


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)"])
def test_epochs_of_one_fit_each_give_the_bits_of_one_fit_of_all(strategy):
    """So a loop may stop early: the schedule and the order of samples continue, and an evaluation changes nothing."""
    schedule = partial(optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
    whole, parts = batch_norm_mlp(), batch_norm_mlp()
    with make_trainer(strategy, whole, lr_scheduler=schedule, batch_norm="deferred") as trainer:
        expected = trainer.fit(dataset(), batch_size=12, epochs=3).losses
    with make_trainer(strategy, parts, lr_scheduler=schedule, batch_norm="deferred") as trainer:
        found = []
        for _ in range(3):
            found += trainer.fit(dataset(), batch_size=12).losses
            trainer.evaluate(dataset())
    assert found == expected
    assert equal_bits(state_of(parts), state_of(whole))
