"""Own training loops with batches="per_rank": whatever each rank brings, a gradient is that of all samples together."""

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from tests.mistakes import mistake_scripts
from tests.mistakes.documented import documented_messages
from tests.mistakes.test_models import collect_answers
from tests.training.trainers import max_difference, mlp, params_of

pytestmark = [pytest.mark.process, pytest.mark.serial]  # two seconds, where nothing else runs
SIZES, ENDS, EMPTY = "Batches of different sizes", "A rank that runs out of batches", "An empty batch on a rank"
WARNED = [
    (mistake_scripts.sizes_that_differ, SIZES, [(4, 4, 2), (4, 4, 4)]),
    (mistake_scripts.sizes_that_differ_as_meant, None, [(4, 4, 2)]),
    (mistake_scripts.a_rank_that_runs_out, ENDS, [(4, 4, 4), (4, 0, 0), (3, 0, 0)]),
    (mistake_scripts.an_empty_batch, EMPTY, [(4, 4, 4), (4, 0, 3)]),
    (mistake_scripts.one_batch_for_all_stages, None, [(12,), (5,)]),
]
REFUSED = [
    (mistake_scripts.sizes_that_may_not_differ, SIZES, 1),
    (mistake_scripts.a_rank_that_may_not_run_out, ENDS, 1),
    (mistake_scripts.a_first_batch_without_samples, EMPTY, 1),
    (mistake_scripts.own_batches_of_a_pipeline, "One batch for a pipeline, or one for each of its ranks", 0),
    (mistake_scripts.rates_that_differ, "Learning rates that differ", 0),
]


def by_one(steps):
    """Return the losses and parameters of one process on the samples of all ranks."""
    model, losses = mlp(), []
    optimizer = mistake_scripts.SGD(model.parameters())
    for sizes in steps:
        inputs, targets = (torch.cat(parts) for parts in zip(*mistake_scripts.parts_of(sizes), strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, params_of(model)


@pytest.mark.parametrize(("script", "title", "steps"), WARNED, ids=lambda value: getattr(value, "__name__", ""))
def test_uneven_batches_train_as_their_union_and_are_warned_of_once(script, title, steps):
    answers, seconds, caught_warnings = collect_answers(script)
    losses, params = by_one(steps)
    for mine, values in answers:
        assert mine[: len(losses)] == pytest.approx(losses[: len(mine)], rel=1e-12)
        assert (
            max_difference({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}, params)
            <= 1e-12
        )
    assert caught_warnings == [documented_messages(title)[:1] if title else [], [], []]
    assert max(seconds) < 2


@pytest.mark.parametrize(("script", "title", "place"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_batches_that_may_not_be_are_refused_equally_on_all_ranks(script, title, place):
    answers, seconds, _ = collect_answers(script)
    assert answers == [documented_messages(title)[place]] * mistake_scripts.NUM_RANKS
    assert max(seconds) < 2


def test_ranks_that_bring_the_same_samples_are_warned_of_once():
    _, _, caught_warnings = collect_answers(mistake_scripts.the_same_samples)
    assert caught_warnings == [documented_messages("The same samples on every rank"), [], []]


def test_a_mean_over_ranks_counts_every_sample_alike():
    answers, _, _ = collect_answers(mistake_scripts.a_mean_over_uneven_parts)
    assert answers == [(3 * 1.0 + 1 * 2.0) / 4] * mistake_scripts.NUM_RANKS


def test_batches_that_should_be_one_and_have_different_sizes_are_refused():
    answers, _, _ = collect_answers(mistake_scripts.sizes_of_one_batch_that_differ)
    assert answers == [documented_messages(SIZES)[2]] * mistake_scripts.NUM_RANKS


def test_one_process_with_all_ranks_passes_the_whole_batch_in_either_case():
    """So the same script runs under python."""
    inputs, targets = (torch.cat(parts) for parts in zip(*mistake_scripts.parts_of((4, 4, 4)), strict=True))
    with mistake_scripts.step_of(mlp(), batches="per_rank") as step:
        step(inputs, targets)
        step.finish()
        assert step.mean(0.5, 7) == 0.5
    assert max_difference(params_of(step.local_ranks.model), by_one([(4, 4, 4)])[1]) <= 1e-12


@pytest.mark.parametrize("given", [{"batches": "mine"}, {"uneven": True}])
def test_impossible_values_of_batches_are_refused(given):
    with pytest.raises(
        cp.PlanError, match=r"is not possible; batches is 'global' or 'per_rank', and uneven is about the"
    ):
        mistake_scripts.step_of(mlp(), **given)
