"""Held-out data is measured by the plan's own ranks: the same numbers everywhere, and no trace in the training."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.training.metrics import merge_metrics
from tests.covering import each_value_once
from tests.training.trainers import (
    STRATEGIES,
    batch_norm_mlp,
    build_seeded,
    dataset,
    equal_bits,
    fit,
    make_trainer,
    mlp,
    params_of,
    state_of,
)

ALL = ["solo", *STRATEGIES, "data(4)", "pipeline(2) * data(2)", "zero(4, level=3)", "server(2, consistency=asp)",
       "interleaved(2)", "zero_bubble(2, chunks_per_stage=2)"]  # fmt: skip


def measure(outputs, targets):
    right = (outputs.argmax(-1) == targets).sum()
    loss = F.cross_entropy(outputs, targets, reduction="sum")
    return {"accuracy": cp.MeanMetric(float(right), len(targets)), "loss": cp.MeanMetric(float(loss), len(targets))}


def by_hand(model, data):
    """Measure all samples at once."""
    model.eval()
    with torch.no_grad():
        metric_values = measure(model(data.tensors[0]), data.tensors[1])
    return {name: metric_value.mean for name, metric_value in metric_values.items()}


@pytest.mark.long(quick=["zero(2, level=2)-24"])
@pytest.mark.parametrize(("strategy", "num_samples"), each_value_once(ALL, [24, 31, 3]), ids=str)
def test_every_strategy_measures_what_the_model_alone_would(strategy, num_samples):
    """The last batch of 24 samples is full, that of 31 uneven; 3 samples are fewer than microbatches."""
    held_out = dataset(num_samples)
    with make_trainer(strategy, batch_norm_mlp()) as one:
        history = one.fit(dataset(), batch_size=12, eval_dataset=held_out, metrics=measure)
        again = one.evaluate(held_out, metrics=measure, batch_size=8)
        expected = by_hand(one.model, held_out)
    assert history.evaluations[-1].metrics == pytest.approx(expected, rel=1e-12)
    assert again == pytest.approx(expected, rel=1e-12)


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_measuring_in_between_leaves_no_trace_in_the_training(strategy):
    often = {"eval_dataset": dataset(9), "evaluate_every": 1}
    measured, history = fit(strategy, batch_norm_mlp(), epochs=2, fit_options=often)
    alone, expected = fit(strategy, batch_norm_mlp(), epochs=2)
    assert [event.step for event in history.evaluations] == list(range(1, 9))
    assert history.losses == expected.losses
    assert equal_bits(*({name: state[name] for name in params_of(batch_norm_mlp())} for state in (measured, alone)))


def test_every_epoch_and_the_end_are_measured_once():
    _, history = fit("data(2)", epochs=3, fit_options={"eval_dataset": dataset(9), "max_steps": 10})
    assert [event.step for event in history.evaluations] == [4, 8, 10]


def test_the_loss_is_measured_where_nothing_else_is_said():
    held_out = dataset(31)
    with make_trainer("pipeline(2)") as one:
        result = one.evaluate(held_out)
    assert result == pytest.approx({"loss": by_hand(mlp(), held_out)["loss"]}, rel=1e-12)


@pytest.mark.long
def test_a_model_can_be_measured_before_it_is_trained_and_is_not_changed():
    for strategy in ["solo", *STRATEGIES]:
        model = batch_norm_mlp()
        with make_trainer(strategy, model) as one:
            before = one.evaluate(dataset(9), metrics=measure)
            assert equal_bits(state_of(model), state_of(batch_norm_mlp())), strategy
        assert before == pytest.approx(by_hand(batch_norm_mlp(), dataset(9)), rel=1e-12)


def test_batches_with_other_metrics_are_refused():
    def moody(outputs, targets):
        return {"few" if len(targets) < 3 else "many": cp.MeanMetric(0.0, len(targets))}

    with (
        make_trainer("data(2)") as one,
        pytest.raises(cp.DataError, match=r"^one batch has the metrics \['many'\], anot"),
    ):
        one.evaluate(dataset(10), metrics=moody, batch_size=12)


def test_metrics_are_means_over_samples_not_over_batches():
    added = merge_metrics([{"a": cp.MeanMetric(3.0, 4)}, {"a": cp.MeanMetric(1.0, 1)}])
    assert added["a"].mean == 0.8
    assert math.isnan(cp.MeanMetric().mean)


def test_statistics_of_replicas_are_one_before_they_are_measured():
    """Each replica has seen half the batches; all must answer with the mean of what they saw."""
    held_out = dataset(8)
    with make_trainer("data(2)", batch_norm_mlp()) as one:
        one.fit(dataset(), batch_size=12)
        local_ranks = one.local_ranks
        one.evaluate(held_out)
        buffers = [rank.interpreter.store.buffers["1.running_mean"] for rank in local_ranks.ranks.values()]
        assert torch.equal(*buffers)
        assert torch.equal(buffers[0], one.model[1].running_mean)
    assert not torch.equal(buffers[0], build_seeded(lambda: torch.nn.BatchNorm1d(8)).running_mean)


@pytest.mark.long(quick=["pipeline(2)", "server(2)1"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES, "server(2)"])
def test_weights_that_were_changed_after_training_are_those_that_are_measured(strategy, tmp_path):
    best, held_out = batch_norm_mlp(), dataset(24)
    with make_trainer(strategy, batch_norm_mlp()) as one:
        one.fit(dataset(), batch_size=12)
        one.model.load_state_dict(best.state_dict())
        assert one.evaluate(held_out, metrics=measure) == pytest.approx(by_hand(best, held_out), rel=1e-12)
        one.save(tmp_path)
    result, _ = fit("solo", batch_norm_mlp(), fit_options={"resume": tmp_path})
    assert equal_bits(result, state_of(best))


class Measuring(cp.Callback):
    """Measures in the middle of a run, when the model's own weights are those of its beginning."""

    trainer: cp.Trainer

    def __init__(self):
        self.result = []

    def on_step(self, event):
        self.result.append(self.trainer.evaluate(dataset(24)))


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_measuring_in_a_callback_measures_the_newest_weights_and_keeps_them(strategy):
    listener = Measuring()
    with make_trainer(strategy, batch_norm_mlp(), callbacks=[listener]) as one:
        listener.trainer = one
        history = one.fit(dataset(), batch_size=12)
        assert one.evaluate(dataset(24)) == pytest.approx(listener.result[-1], rel=1e-12)
    assert history.losses == fit(strategy, batch_norm_mlp())[1].losses
    assert len({result["loss"] for result in listener.result}) == len(history.losses)


ENDLESS = ["pipedream(3)", "pipedream(2, replicas=(2,1))", "pipedream(3, vertical_sync=on)", "pipedream_2bw(3)"]
DEEPER = ["gpipe(3)", "gpipe(3, chunks_per_stage=2)", "interleaved(3)", "zero_bubble(3)", "zero_bubble(3, chunks_per_stage=2)",
          "tensor(2) * zero_bubble(2) * zero(2, level=2)"]  # fmt: skip


def deep():
    """Seven blocks with dropout, two of which may be sharded."""
    return build_seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Dropout(0.3), *mlp()))


@pytest.mark.long(quick=["pipedream(3)"])
@pytest.mark.parametrize("strategy", [*DEEPER, *ENDLESS])
def test_every_order_measures_what_the_model_alone_would_as_often_unchanged_asked(strategy):
    """An async pipeline flushes for it."""
    held_out, how = dataset(31), {"eval_dataset": dataset(31), "evaluate_every": 2, "metrics": measure}
    plan = cp.Plan.parse(strategy).with_microbatches_for(12)
    with make_trainer(plan, deep(), progress="off") as one:
        history = one.fit(dataset(), batch_size=12, **how)
        expected = by_hand(one.model, held_out)
    assert [event.step for event in history.evaluations] == [2, 4]
    assert history.evaluations[-1].metrics == pytest.approx(expected, rel=1e-12)


class OwnLoss(nn.Module):
    """Computes the mean over the tokens that count itself, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x, labels):
        logits = self.second(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
def test_a_mean_over_tokens_that_the_model_computes_is_measured_over_all_of_them(strategy):
    """It was weighted by samples."""
    torch.manual_seed(0)
    x, labels = torch.randn(8, 5, 3, dtype=torch.float64), torch.randint(4, (8, 5))
    labels[torch.arange(5) > torch.arange(8)[:, None] % 5] = -100
    model = OwnLoss()
    with torch.no_grad():
        expected = float(model(x, labels)["loss"])
    batches = [{"x": x[:6], "labels": labels[:6]}, {"x": x[6:], "labels": labels[6:]}]
    with cp.Trainer(
        model,
        loss=lambda output, _: output["loss"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        strategy=strategy,
        num_microbatches=2,
        progress="off",
    ) as one:
        assert one.evaluate(batches)["loss"] == pytest.approx(expected, rel=1e-12)


class Changing(cp.Callback):
    """Changes the model after the step that is evaluated."""

    def __init__(self, model, change):
        self.model, self.change = model, change

    def on_step(self, event):
        self.change(self.model)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.temperature = mlp(), 1.0
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.layers(x) * self.scale * self.temperature


def replace_head(model):
    model.layers[-1] = nn.Linear(8, 3).double()


def change_attribute(model):
    model.temperature = 2.0


def change_weight(model):
    with torch.no_grad():
        model.layers[0].weight.mul_(2)


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replace_head, "layers.4 of the model was replaced between two steps"),
        (change_attribute, "temperature of the model was changed from 1.0 to 2.0 between two steps"),
        (change_weight, "layers.0.weight of the model changed between two steps"),
    ],
)
def test_what_ranks_cannot_take_over_is_refused_in_an_evaluation(change, text, strategy):
    """The ranks measured the model as it was before the change."""
    listener = Changing(Scaled(), change)
    with make_trainer(strategy, listener.model, callbacks=[listener]) as one:
        if strategy == "solo" and change is not replace_head:  # it runs the model itself
            one.fit(dataset(), batch_size=12, max_steps=1, eval_dataset=dataset(12))
            return
        with pytest.raises(cp.DataError, match=text):
            one.fit(dataset(), batch_size=12, max_steps=1, eval_dataset=dataset(12))


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
def test_a_buffer_that_was_changed_after_the_step_is_measured(strategy):
    listener = Changing(Scaled(), lambda model: model.scale.mul_(2))
    with make_trainer(strategy, listener.model, callbacks=[listener]) as one:
        history = one.fit(dataset(), batch_size=12, max_steps=1, eval_dataset=dataset(12), metrics=measure)
    assert history.evaluations[-1].metrics == pytest.approx(by_hand(listener.model, dataset(12)), rel=1e-12)
