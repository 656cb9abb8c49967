"""Stages that save independently while batches are in flight, and runs that continue from what all have saved."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.checkpoint import Checkpoint
from counterpoint.testing.parity import TOLERANCE, relative_difference
from tests.equivalence import async_pipeline_cases as streamed
from tests.equivalence.fit_cases import Fitted
from tests.training.trainers import StopAt, batch_norm_mlp, dataset, equal_bits, fit, make_trainer, params_of

PLAN = cp.Plan.parse("pipedream(3)")


CASES = [
    Fitted("stashing", (1, 1, 1), (6,) * 10, optimizer=streamed.ADAMW),
    Fitted("vertical_sync", (2, 1), (6,) * 10),
    Fitted("double_buffer", (1, 2), (8,) * 10, per_body=4, optimizer=streamed.ADAMW),
]


@pytest.mark.long(quick=["vertical_sync"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_run_that_stops_with_batches_in_flight_continues_as_if_it_had_flushed_where_all_stages_had_saved(
    case, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        case.fit(tmp_path, callbacks=[StopAt(7)])
    assert Checkpoint.open(tmp_path).step == 6
    result = case.fit(tmp_path, resume=tmp_path)
    expected, _ = streamed.train_reference(replace(case, flushes=(6,)))
    assert max(relative_difference(result[name], value) for name, value in expected.items()) <= TOLERANCE


@pytest.mark.long(quick=["stashing"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_stages_that_save_independently_train_as_without_saving(case, tmp_path):
    expected, _ = streamed.train_reference(case)
    result = case.fit(tmp_path)
    assert max(relative_difference(result[name], value) for name, value in expected.items()) <= TOLERANCE


@pytest.mark.long(quick=["pipeline(3)"])
@pytest.mark.parametrize("other", ["solo", "data(2)", "pipedream(2)", "pipeline(3)"])
def test_another_plan_or_number_of_stages_continues_from_the_same_weights_and_states(other, tmp_path):
    """What all stages have saved has no weights of older versions in it, and nothing that is under way."""
    case = CASES[0]
    with pytest.raises(KeyboardInterrupt):
        case.fit(tmp_path, callbacks=[StopAt(7)])
    expected, _ = streamed.train_reference(replace(case, last=6))
    with make_trainer(cp.Plan.parse(other), case.build(), loss=F.mse_loss, optimizer=streamed.OPTIMIZERS[case.optimizer],
                 progress="off") as one:  # fmt: skip
        one.fit(case.data(), batch_size=6, max_steps=6, resume=tmp_path)
        result = params_of(one.model)
    assert max(relative_difference(result[name], value) for name, value in expected.items()) <= TOLERANCE


def test_only_as_many_checkpoints_stay_as_are_wanted_and_listeners_hear_of_each_that_is_complete(tmp_path):
    saved_steps: list[int] = []
    options = {"checkpoint_dir": tmp_path, "save_every": 2, "checkpoint_mode": "per_stage", "keep_last": 2}
    fit(PLAN, epochs=2, progress="off", callbacks=[CheckpointRecorder(saved_steps)], fit_options=options)
    assert saved_steps == [2, 4, 6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]


class CheckpointRecorder(cp.Callback):
    """Notes of which steps there are checkpoints."""

    def __init__(self, saved_steps):
        self.saved_steps = saved_steps

    def on_checkpoint(self, event):
        assert event.path.is_dir()
        self.saved_steps.append(event.step)


def test_a_run_ends_with_a_checkpoint_of_its_last_step(tmp_path):
    state, _ = fit(
        PLAN, progress="off", fit_options={"checkpoint_dir": tmp_path, "save_every": 3, "checkpoint_mode": "per_stage"}
    )
    assert Checkpoint.open(tmp_path).step == 4
    with make_trainer("solo", progress="off") as one:
        one.fit(dataset(), batch_size=12, max_steps=4, resume=tmp_path)
        assert equal_bits(params_of(one.model), state)


def test_running_statistics_are_those_of_the_stages_that_have_them_the_mean_over_their_replicas(tmp_path):
    plan = cp.Plan.parse("pipedream(2, replicas=(2,1))").with_microbatches_for(12)
    kept: dict[str, Any] = {}
    with make_trainer(plan, batch_norm_mlp(), progress="off", callbacks=[Statistics(kept)]) as one:
        kept["team"] = lambda: one.local_ranks
        one.fit(
            dataset(), batch_size=12, max_steps=3, checkpoint_dir=tmp_path, save_every=2, checkpoint_mode="per_stage"
        )
    folder = tmp_path / "step-00000002"
    with make_trainer("solo", batch_norm_mlp(), progress="off") as one:
        one.fit(dataset(), batch_size=12, max_steps=2, resume=folder)
        assert torch.equal(one.model[1].running_mean, kept["mean"])


class Statistics(cp.Callback):
    """Records the mean of what the replicas' norms have counted, behind the second step."""

    def __init__(self, kept):
        self.kept = kept

    def on_step(self, event):
        if event.step == 1:
            stores = [self.kept["team"]().ranks[rank].interpreter.store for rank in (0, 1)]
            self.kept["mean"] = sum(store.buffers["1.running_mean"] for store in stores) / 2


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            "pipeline(2)",
            {"checkpoint_mode": "per_stage", "save_every": 2},
            "but pipeline.2. flushes after every step, so all",
        ),
        (
            "pipedream(2)",
            {"checkpoint_mode": "per_stage"},
            "needs a period; give save_every=STEPS and checkpoint_dir=FOLD",
        ),
        (
            "pipedream(2)",
            {"checkpoint_mode": "rank", "save_every": 2},
            "there is no checkpoint_mode='rank'; give synchronous or per_stage",
        ),
    ],
)
def test_saves_that_make_no_sense_are_refused_before_the_first_step(strategy, options, message, tmp_path):
    with pytest.raises(cp.PlanError, match=message):
        fit(strategy, progress="off", fit_options={"checkpoint_dir": tmp_path, **options})
