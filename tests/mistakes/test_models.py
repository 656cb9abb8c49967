"""Models that differ between ranks, or hold what cannot be trained: named on all ranks, before the first step."""

import contextlib

import pytest

from counterpoint.training.agreement.rank_facts import first_difference
from tests.mistakes import mistake_scripts
from tests.mistakes.documented import documented_messages
from tests.mistakes.rank_processes import run_on_ranks
from tests.training.trainers import batch_norm_mlp, dataset, equal_bits, mlp, params_of

pytestmark = [pytest.mark.process, pytest.mark.serial]  # two seconds, where nothing else runs
ANOTHER = "Another dtype, device or model on a rank"
REFUSED = [
    (mistake_scripts.weights_that_share_memory, "Weights that share memory", 0),
    (mistake_scripts.a_model_in_evaluation_mode_on_one_rank, "Training and evaluation mode", 0),
    (mistake_scripts.a_module_in_evaluation_mode_on_one_rank, "Training and evaluation mode", 1),
    (mistake_scripts.another_dtype, ANOTHER, 0),
    (mistake_scripts.another_device, ANOTHER, 1),
    (mistake_scripts.another_width, ANOTHER, 2),
    (mistake_scripts.another_dropout, ANOTHER, 3),
    (mistake_scripts.another_plan, ANOTHER, 4),
    (mistake_scripts.other_first_weights_that_are_refused, "Different initial weights", 1),
    (mistake_scripts.another_rate, "Another optimizer on a rank", 0),
    (mistake_scripts.another_seed, "Another option on a rank", 0),
    (mistake_scripts.another_clip_norm, "Another option on a rank", 1),
    (mistake_scripts.another_order, "Parameters in another order", 0),
    (mistake_scripts.batch_norm_by_microbatches_that_is_refused, "Batch norm by microbatches", 1),
]


def collect_answers(script):
    """Return the answers, the seconds and the warnings of all ranks for a script."""
    result = run_on_ranks(mistake_scripts.ALIKE, mistake_scripts.NUM_RANKS)
    return [list(column) for column in zip(*(one[script.__name__] for one in result), strict=True)]


@pytest.mark.parametrize(("script", "title", "place"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_that_cannot_be_is_refused_equally_on_all_ranks(script, title, place):
    answers, seconds, _ = collect_answers(script)
    assert answers == [documented_messages(title)[place]] * mistake_scripts.NUM_RANKS
    assert max(seconds) < 2


@pytest.mark.parametrize("script", [mistake_scripts.another_loss, mistake_scripts.another_smoothing])
def test_another_loss_on_a_rank_is_named(script):
    answers, seconds, _ = collect_answers(script)
    assert len(set(answers)) == 1
    assert "the loss is " in answers[0]
    assert answers[0].endswith(
        "give the same function, with the same code and the same settings, on all of them, or, if results do not depend "
        "on a setting, the name verbose, debug, logger, is_main or rank, which is not compared"
    )
    assert max(seconds) < 2


def test_a_gradient_that_is_not_finite_is_named_with_rank_microbatch_and_parameter():
    result = run_on_ranks((mistake_scripts.a_gradient_that_is_not_finite,), mistake_scripts.NUM_RANKS)
    answers, seconds, _ = zip(*(one["a_gradient_that_is_not_finite"] for one in result), strict=True)
    assert [*answers] == documented_messages("Losses and gradients that are not finite") * mistake_scripts.NUM_RANKS
    assert max(seconds) < 2


def test_a_layer_more_on_a_rank_is_named():
    answers, _, _ = collect_answers(mistake_scripts.another_depth)
    assert len(set(answers)) == 1
    assert "1.weight is float64 (3, 6) on cpu on ranks 0, 1, float64 (6, 6) on cpu on rank 2; every" in answers[0]


def test_other_first_weights_become_those_of_rank_0_and_that_is_said_once():
    answers, _, caught_warnings = collect_answers(mistake_scripts.other_first_weights)
    assert answers == [[True, True], [False, True], [False, True]]
    assert caught_warnings == [documented_messages("Different initial weights")[:1], [], []]


def test_batch_norm_by_microbatches_warns_once_unless_it_is_requested():
    """The numbers are the same in either case."""
    (losses, _, caught_warnings), (meant, _, silence) = map(
        collect_answers,
        (mistake_scripts.batch_norm_by_microbatches, mistake_scripts.batch_norm_by_microbatches_as_meant),
    )
    assert (caught_warnings, silence) == ([documented_messages("Batch norm by microbatches")[:1], [], []], [[], [], []])
    assert losses == meant


def test_a_gradient_that_only_some_ranks_have_warns_once():
    """The losses are those of all ranks; there are two steps, and one notice."""
    answers, _, caught_warnings = collect_answers(mistake_scripts.a_branch_that_one_rank_does_not_take)
    assert answers[0] == answers[1] == answers[2]
    assert caught_warnings == [documented_messages("Parameters without a gradient")[1:], [], []]


def test_a_gradient_that_no_rank_has_is_refused_on_all():
    answers, seconds, _ = collect_answers(mistake_scripts.a_branch_that_no_rank_takes)
    assert answers == documented_messages("Parameters without a gradient")[:1] * mistake_scripts.NUM_RANKS
    assert max(seconds) < 2


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_model_that_was_left_in_evaluation_mode_trains_as_in_training_mode(strategy):
    """It has dropout and batch norm."""
    result = []
    for model in (batch_norm_mlp(), batch_norm_mlp().eval()):
        expected = (
            contextlib.nullcontext()
            if model.training
            else pytest.warns(UserWarning, match="is in evaluation mode before its first step, .* in which module '1'")
        )
        with mistake_scripts.step_of(model, strategy, batch_norm="deferred") as step:
            with expected:
                step(*dataset(12).tensors)
            model.eval()
            step(*dataset(12).tensors)
        result.append(params_of(model))
    assert equal_bits(*result)


def test_one_parameter_of_two_names_is_no_mistake():
    model = mlp()
    model[2].weight = model[2].weight
    model[2].register_parameter("again", model[2].weight)
    with mistake_scripts.step_of(model) as step:
        step(*dataset(12).tensors)
    assert not equal_bits(params_of(model), params_of(mlp()))


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ([["a", "x"], ["b", "x"]], [["a", "x"]], "at index 1 rank 0 has b, rank 1 has no more; every rank must build"),
        ([["a", "x"]], [["b", "x"]], "at index 0 rank 0 has a, rank 1 has b; every rank must build the same one: look"),
        ([["a", "x"]], [["a", "x"]], ""),
    ],
)
def test_the_first_difference_of_two_models_is_reported(mine, theirs, text):
    result = first_difference([mine, theirs])
    assert result.startswith(text)
    assert bool(result) is bool(text)
