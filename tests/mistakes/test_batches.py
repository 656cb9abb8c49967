"""Loops of one's own on batches of one's own: whatever each rank brings, a gradient is that of all samples together."""

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from tests.mistakes import mistake_scripts as scenes
from tests.mistakes.documented import documented_messages
from tests.mistakes.test_models import heard
from tests.training.trainers import max_difference, mlp, params_of

pytestmark = [pytest.mark.process, pytest.mark.serial]  # two seconds, where nothing else runs
SIZES, ENDS, EMPTY = "Batches of different sizes", "A rank that runs out of batches", "An empty batch on a rank"
TOLD = [
    (scenes.sizes_that_differ, SIZES, [(4, 4, 2), (4, 4, 4)]),
    (scenes.sizes_that_differ_as_meant, None, [(4, 4, 2)]),
    (scenes.a_rank_that_runs_out, ENDS, [(4, 4, 4), (4, 0, 0), (3, 0, 0)]),
    (scenes.an_empty_batch, EMPTY, [(4, 4, 4), (4, 0, 3)]),
    (scenes.one_batch_for_all_stages, None, [(12,), (5,)]),
]
REFUSED = [
    (scenes.sizes_that_may_not_differ, SIZES, 1),
    (scenes.a_rank_that_may_not_run_out, ENDS, 1),
    (scenes.a_first_batch_without_samples, EMPTY, 1),
    (scenes.own_batches_of_a_pipeline, "One batch for a pipeline, or one for each of its ranks", 0),
    (scenes.rates_that_differ, "Learning rates that differ", 0),
]


def by_one(steps):
    """What one process comes to on the samples of all ranks: its losses and parameters."""
    model, losses = mlp(), []
    optimizer = scenes.SGD(model.parameters())
    for sizes in steps:
        inputs, targets = (torch.cat(parts) for parts in zip(*scenes.parts_of(sizes), strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, params_of(model)


@pytest.mark.parametrize(("scene", "title", "steps"), TOLD, ids=lambda value: getattr(value, "__name__", ""))
def test_uneven_batches_train_as_their_union_and_are_told_once(scene, title, steps):
    answers, seconds, notices = heard(scene)
    losses, params = by_one(steps)
    for mine, values in answers:
        assert mine[: len(losses)] == pytest.approx(losses[: len(mine)], rel=1e-12)
        assert (
            max_difference({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}, params)
            <= 1e-12
        )
    assert notices == [documented_messages(title)[:1] if title else [], [], []]
    assert max(seconds) < 2


@pytest.mark.parametrize(("scene", "title", "place"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_batches_that_may_not_be_are_refused_alike_on_all_ranks(scene, title, place):
    answers, seconds, _ = heard(scene)
    assert answers == [documented_messages(title)[place]] * scenes.NUM_RANKS
    assert max(seconds) < 2


def test_ranks_that_bring_the_same_samples_are_told_once():
    _, _, notices = heard(scenes.the_same_samples)
    assert notices == [documented_messages("The same samples on every rank"), [], []]


def test_a_mean_over_ranks_counts_every_sample_alike():
    answers, _, _ = heard(scenes.a_mean_over_uneven_parts)
    assert answers == [(3 * 1.0 + 1 * 2.0) / 4] * scenes.NUM_RANKS


def test_batches_that_should_be_one_and_have_different_sizes_are_refused():
    answers, _, _ = heard(scenes.sizes_of_one_batch_that_differ)
    assert answers[1] == documented_messages(SIZES)[2]
    assert all(answer.startswith("DataError: rank ") for answer in answers)


def test_one_process_with_all_ranks_passes_the_whole_batch_in_either_case():
    """So that a script goes on under python."""
    inputs, targets = (torch.cat(parts) for parts in zip(*scenes.parts_of((4, 4, 4)), strict=True))
    with scenes.step_of(mlp(), batches="per_rank") as step:
        step(inputs, targets)
        step.finish()
        assert step.mean(0.5, 7) == 0.5
    assert max_difference(params_of(step.local_ranks.model), by_one([(4, 4, 4)])[1]) <= 1e-12


@pytest.mark.parametrize("given", [{"batches": "mine"}, {"uneven": True}])
def test_words_for_batches_that_make_no_sense_are_refused(given):
    with pytest.raises(
        cp.PlanError, match=r"makes no sense; batches is 'global' or 'per_rank', and uneven is about the"
    ):
        scenes.step_of(mlp(), **given)
