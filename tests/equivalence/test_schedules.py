"""Every order of a pipeline trains the same: chunks, parts of backwards, ties across stages, dropout, clipping."""

import pytest
import torch
from torch import nn

from counterpoint.jobs.job import sequence_loss
from counterpoint.testing import parity
from counterpoint.testing.parity_models import ParityModel, TrainConfig
from tests.covering import each_value_once
from tests.equivalence.single_process import SingleProcessBaseline
from tests.program.verify.random_plans import TESTED_SCHEDULES

TESTED_ELSEWHERE = {("gpipe", 1), ("one_f_one_b", 1)}
SCHEDULES = [
    f"schedule={name}" + (f", chunks_per_stage={chunks}" if chunks > 1 else "")
    for name, chunks in sorted(TESTED_SCHEDULES)
    if chunks < 3 and (name, chunks) not in TESTED_ELSEWHERE
]
AROUND = ["data(2)", "zero(2, level=1)", "zero(2, level=2)"]
CLIPPED = TrainConfig(clip_norm=0.3)


def words():
    """Return a model of ten blocks that draws random numbers and begins and ends with one table."""
    torch.manual_seed(3)
    middle = [layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Dropout(0.1))]
    model = nn.Sequential(nn.Embedding(11, 6), *middle, nn.Linear(6, 11, bias=False))
    model[-1].weight = model[0].weight
    return model.double()


def subject():
    draw = torch.Generator().manual_seed(5)
    batches = [torch.randint(0, 11, (length, 6), generator=draw) for length in (12, 12, 7, 3)]
    return ParityModel("words", words, tuple((tokens[:, :-1], tokens[:, 1:]) for tokens in batches), sequence_loss)


WORDS = SingleProcessBaseline(subject())
alone, difference, trained = WORDS.baseline, WORDS.difference, WORDS.train


@pytest.mark.long(quick=["schedule=interleaved, chunks_per_stage=2-zero(2, level=1)"])
@pytest.mark.parametrize(("schedule", "around"), each_value_once(SCHEDULES, AROUND), ids=str)
def test_every_schedule_trains_the_same_with_replicas_around_it(schedule, around):
    assert difference(trained(f"pipeline(2, {schedule}) * {around}")) <= parity.TOLERANCE


@pytest.mark.long(quick=["pipeline(2, schedule=interleaved, chunks_per_stage=5)"])
@pytest.mark.parametrize(
    "strategy",
    [
        *(f"pipeline(4, {schedule})" for schedule in SCHEDULES),
        "pipeline(2, schedule=interleaved, chunks_per_stage=5)",
        "pipeline(3, schedule=interleaved, chunks_per_stage=3)",
        "pipeline(2, schedule=zero_bubble, replicas=(2,1))",
        "pipeline(2, schedule=zero_bubble) + overlap",
        "pipeline(2, schedule=interleaved, chunks_per_stage=2) * data(2) + overlap",
    ],
)
def test_deep_and_uneven_pipelines_train_the_same(strategy):
    assert difference(trained(strategy)) <= parity.TOLERANCE


@pytest.mark.long(quick=["schedule=interleaved, chunks_per_stage=2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clipping_by_the_norm_over_all_chunks_trains_the_same(schedule):
    assert difference(trained(f"pipeline(2, {schedule}) * zero(2, level=2)", CLIPPED), CLIPPED) <= parity.TOLERANCE
    assert parity.relative_difference(alone().params["0.weight"], alone(CLIPPED).params["0.weight"]) > 1e-3


@pytest.mark.long(quick=["pipeline(2, schedule=gpipe, chunks_per_stage=2) * data(2)"])
@pytest.mark.parametrize(
    "strategy",
    [
        *(f"pipeline(2{schedule}) * {around}" for schedule in (", schedule=gpipe", "") for around in AROUND[:2]),
        *(f"pipeline(2, {schedule}) * data(2)" for schedule in SCHEDULES),
        "pipeline(3, schedule=gpipe, replicas=(2,1,1))",
    ],
)
def test_clipping_by_the_norm_over_all_stages_trains_the_same_whatever_is_around(strategy):
    """Weights that the first and the last stage share count once."""
    assert difference(trained(strategy, CLIPPED), CLIPPED) <= parity.TOLERANCE


@pytest.mark.long(quick=["schedule=zero_bubble, chunks_per_stage=2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_microbatches_than_stages_train_the_same(schedule):
    two = TrainConfig(num_microbatches=2)
    assert difference(trained(f"pipeline(4, {schedule})", two), two) <= parity.TOLERANCE
