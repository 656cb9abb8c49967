"""Fits of a pipeline that never flushes: batches under way, and what happens where a run measures, saves or ends."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.testing.parity import TOLERANCE, relative_difference
from counterpoint.training.batches import in_flight
from counterpoint.training.batches.per_rank import require_synchronous_steps
from tests.equivalence import async_pipeline_cases as streamed
from tests.training.trainers import (
    ADAMW,
    StopAt,
    dataset,
    equal_bits,
    fit,
    make_trainer,
    max_difference,
    mlp,
    params_of,
    state_of,
)

PLAN = cp.Plan.parse("pipedream(3)")


def test_a_custom_loop_equals_the_sequential_loop_that_flushes_as_it_does():
    case = streamed.Case("stashing", (1, 1, 1), (6,) * 8, optimizer=streamed.ADAMW, flushes=(4,))
    model, run = case.build(), []
    step = cp.parallelize(model, ADAMW, F.mse_loss, strategy=case.plan)
    with step:
        for at, batch in enumerate(case.batches()):
            run.append(step(*batch))
            run += step.flush() if at == 3 else []
        run += step.flush()
    losses = [loss for loss in run if loss == loss]
    assert streamed.max_error(case, (params_of(model), losses)) <= TOLERANCE


def test_a_custom_loop_gets_the_loss_of_a_batch_when_it_has_come_through():
    batch = torch.ones(4, 6).double(), torch.zeros(4, dtype=torch.long)
    with cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy=PLAN) as step:
        result = [step(*batch) for _ in range(4)]
        assert [loss == loss for loss in result] == [False, False, True, True]
        assert len(step.flush()) == 2
        assert step.flush() == []


@pytest.mark.parametrize("only", [0, 2, 4])
def test_a_schedule_that_is_stepped_when_a_batch_has_come_through_gives_each_batch_its_own_rate(only):
    """At a rate of 0 for all batches but one the weights are what that one makes of the first ones."""
    random, model, solo = torch.Generator().manual_seed(1), mlp(), mlp()
    result = [torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(5)]
    targets, sgd = torch.zeros(4, dtype=torch.long), partial(optim.SGD, lr=0.1)
    step = cp.parallelize(model, sgd, F.cross_entropy, strategy=PLAN)
    scheduler = optim.lr_scheduler.LambdaLR(step.optimizer, lambda number: float(number == only))
    with step:
        for inputs in result:
            if not math.isnan(step(inputs, targets)):
                scheduler.step()
        assert len(step.flush(after=scheduler.step)) == 2
    F.cross_entropy(solo(result[only]), targets).backward()
    sgd(solo.parameters()).step()
    assert max_difference(params_of(model), params_of(solo)) <= TOLERANCE


def test_every_batch_has_its_step_with_its_loss_and_its_samples_whenever_a_run_flushes():
    runs = [
        fit(PLAN, epochs=2, progress="off", fit_options={"eval_dataset": dataset(7), "evaluate_every": every})[1]
        for every in (None, 3)
    ]
    for history in runs:
        assert [step.num_samples for step in history.steps] == [12, 12, 12, 10] * 2
        assert [step.step for step in history.steps] == list(range(8))
    assert [event.step for event in runs[1].evaluations] == [3, 4, 6, 8]
    assert runs[0].losses[:3] == runs[1].losses[:3]


def test_fewer_batches_than_stages_are_trained_on():
    state, history = fit(cp.Plan.parse("pipedream(3)"), data=dataset(12), progress="off")
    solo, expected = fit(cp.Plan.parse("solo"), data=dataset(12), progress="off")
    assert len(history.losses) == 1
    assert history.losses == pytest.approx(expected.losses)
    assert max(relative_difference(state[name], solo[name]) for name in solo) <= TOLERANCE


@pytest.mark.long(quick=["pipedream(2, replicas=(2,1))"])
@pytest.mark.parametrize("strategy", ["pipedream(3, vertical_sync=on)", "pipedream(2, replicas=(2,1))"])
def test_a_run_that_was_saved_continues_bit_for_bit(strategy, tmp_path):
    """Where it saves it flushes: the run that continues and the one that never stopped do so alike.

    A stage that updates twice in a step has saved its optimizer's state twice.
    """
    plan = cp.Plan.parse(strategy).with_microbatches_for(12)
    states = []
    for folder, resume, steps in [("a", None, 8), ("b", None, 3), ("b", tmp_path / "b", 8)]:
        options = {"max_steps": steps, "checkpoint_dir": tmp_path / folder, "save_every": 3, "resume": resume}
        states.append(fit(plan, epochs=2, progress="off", fit_options=options)[0])
    assert equal_bits(states[0], states[2])


def test_layers_may_be_sharded_inside_of_a_stage():
    """With two stages and vertical sync all weights are one update old, wherever the model is split."""
    synced = "pipedream(2, vertical_sync=on)"
    sliced, whole = (fit(cp.Plan.parse(text), progress="off")[0] for text in (f"tensor(2) * {synced}", synced))
    assert max_difference(sliced, whole) <= TOLERANCE


def test_a_checkpoint_continues_under_another_plan(tmp_path):
    options = {"max_steps": 3, "checkpoint_dir": tmp_path}
    state, _ = fit(PLAN, progress="off", fit_options=options)
    with make_trainer("data(2)", progress="off") as one:
        one.fit(dataset(), batch_size=12, max_steps=3, resume=tmp_path)
        assert equal_bits(state_of(one.model), state)


def test_every_stage_steps_the_schedule_with_its_own_updates():
    schedule = partial(optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    history = fit(PLAN, epochs=2, progress="off", lr_scheduler=schedule)[1]
    assert [step.options["lr"] for step in history.steps] == [1e-2 / 2 ** ((at + 1) // 2) for at in range(8)]


def test_a_loss_that_is_not_finite_ends_the_run_with_the_weights_before_its_update():
    data = dataset()
    data.tensors[0][:] = torch.nan
    with make_trainer(PLAN, progress="off") as one:
        before = params_of(one.model)
        with pytest.raises(
            cp.DataError,
            match=r"step 0 cannot be applied: the loss of microbatch 0 of batch 0 is nan.* clip_by='stage'",
        ):
            one.fit(data, batch_size=12)
    assert equal_bits(params_of(one.model), before)


@pytest.mark.parametrize(
    ("rule", "replicas"), [("stashing", (1, 1, 1)), ("stashing", (2, 1)), ("double_buffer", (1, 1))]
)
def test_every_stage_leaves_out_the_updates_of_a_batch_whose_loss_is_not_finite(rule, replicas):
    case = streamed.Case(rule, replicas, (6,) * 6, spoilt=2)
    result, losses = streamed.train(case, nonfinite="skip")
    expected, _ = streamed.train_reference(case)
    assert losses[2] != losses[2]
    assert max(relative_difference(result[name], value) for name, value in expected.items()) <= TOLERANCE


@pytest.mark.long(quick=["vertical_sync"])
@pytest.mark.parametrize("rule", ["stashing", "vertical_sync", "double_buffer"])
def test_sums_between_replicas_of_a_stage_may_be_started_and_awaited_but_none_begins_in_a_backward(rule):
    case = streamed.Case(rule, (2, 1), (6,) * 6, per_body=2)
    result = []
    for passes in ((), ("overlap",)):
        step = cp.parallelize(case.build(), ADAMW, F.mse_loss, strategy=replace(case.plan, passes=passes))
        with step:
            losses = [step(*batch) for batch in case.batches()] + step.flush()
            assert not any(rank.interpreter.program.overlap for rank in step.local_ranks.ranks.values())
        result.append((params_of(step.local_ranks.model), [loss for loss in losses if loss == loss]))
    assert equal_bits(result[0][0], result[1][0])
    assert result[0][1] == result[1][1]


def test_replicas_of_a_stage_that_come_to_differ_are_found_by_the_commits_of_their_stage():
    def change():
        next(iter(one.local_ranks.ranks[1].interpreter.store.flat_params())).weights[0] += 1

    with make_trainer("pipedream(2, replicas=(2,1))", progress="off") as one:
        one.callbacks.append(Ask(change))
        with pytest.raises(
            cp.DataError, match=r"^replicas differ in step 1, first in .*, whose value on rank 1 is not that"
        ):
            one.fit(dataset(), batch_size=12)


def test_replicas_of_a_stage_do_not_normalize_together():
    def normed():
        return nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6), nn.Linear(6, 3)).double()

    assert len(fit("pipedream(2, balance=(2,1))", normed(), progress="off")[1].losses) == 4
    with pytest.raises(
        cp.PlanError, match=r"^1 is a SyncBatchNorm, which replicas normalize together, but the replicas"
    ):
        fit("pipedream(2, replicas=(2,1), balance=(2,1))", normed(), progress="off")


def test_batches_of_each_ranks_own_are_refused_where_all_stages_work_on_every_batch():
    require_synchronous_steps(cp.Plan.parse("pipeline(2) * data(2)"))
    with pytest.raises(
        cp.PlanError, match=r"^with batches='per_rank' each rank .* under pipeline\(2, schedule=pipedream\) all"
    ):
        require_synchronous_steps(cp.Plan.parse("pipedream(2)"))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (PLAN, {"clip_norm": 1.0}, r"clip_norm=1.0 is a norm over all stages, .*; give clip_by='stage' to clip each"),
        (PLAN, {"clip_by": "stage"}, r"^clip_by='stage' needs clip_norm, .*; give clip_norm=1.0$"),
        ("pipeline(2)", {"clip_norm": 1.0, "clip_by": "stage"}, r"the norm of the whole model is known; omit clip_by"),
        ("pipeline(2)", {"clip_norm": 1.0, "clip_by": "rank"}, r"^clip_by='rank' is not one of model, stage$"),
    ],
)
def test_clipping_by_another_norm_than_the_stages_know_is_refused(strategy, options, message):
    with pytest.raises(cp.PlanError, match=message):
        fit(strategy, progress="off", **options)


def test_versions_that_need_more_memory_than_is_free_are_named_in_bytes_before_the_run(monkeypatch):
    monkeypatch.setattr(in_flight, "available_bytes", lambda: 1000)
    message = re.escape("up to 2 on a rank, take 1472 bytes on this host, of which 1000 are free")
    with pytest.raises(cp.PlanError, match=message):
        fit(PLAN, progress="off")


@pytest.mark.parametrize(
    "strategy", ["pipedream(3)", "pipedream(2, vertical_sync=on)", "pipedream(2, replicas=(1,2))", "pipedream_2bw(2)"]
)
def test_older_versions_take_the_bytes_that_are_named(strategy, monkeypatch):
    def take():
        stores = [rank.interpreter.store for rank in one.local_ranks.ranks.values()]
        kept = [made for store in stores if store.weight_versions for made in store.weight_versions.versions[1:]]
        result.append(sum(tensor.nbytes for made in kept for tensor in made.flat_weights + made.unflattened))

    result: list[int] = []
    with make_trainer(strategy, progress="off") as one:
        one.callbacks.append(Ask(take))
        one.fit(dataset(), batch_size=12, max_steps=1)
    monkeypatch.setattr(in_flight, "available_bytes", lambda: result[0] - 1)
    with pytest.raises(cp.PlanError, match=f"take {result[0]} bytes on this host, of which {result[0] - 1} are free"):
        fit(strategy, progress="off")


class Ask(cp.Callback):
    """Does something after the first step."""

    def __init__(self, do):
        self.do = do

    def on_step(self, event):
        self.do()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda one: one.evaluate(dataset(7)), r"evaluate\(\) was called with 2 batches in flight.*evaluate_every="),
        (lambda one: one.save("never"), r"save\(\) was called with 2 batches in flight.*save_every="),
    ],
)
def test_what_needs_all_stages_is_refused_with_batches_in_flight_with_the_way_to_have_it(ask, message):
    with make_trainer(PLAN, progress="off") as one:
        one.callbacks.append(Ask(lambda: ask(one)))
        with pytest.raises(cp.PlanError, match=message):
            one.fit(dataset(), batch_size=12)


def test_a_run_that_was_interrupted_with_batches_in_flight_exports_what_it_learned():
    with make_trainer(PLAN, progress="off", callbacks=[StopAt(1)]) as one:
        before = params_of(one.model)
        with pytest.raises(KeyboardInterrupt):
            one.fit(dataset(), batch_size=12)
        assert not equal_bits(params_of(one.model), before)
        assert len(one.fit(dataset(), batch_size=12).losses) == 4
