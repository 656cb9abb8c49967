"""Loops in which ranks do different things at one time: all ranks are named, and all exit."""

import re
from functools import partial

import pytest
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from counterpoint.launchers import launch
from tests.mistakes import mistake_scripts
from tests.mistakes.documented import documented_messages
from tests.mistakes.rank_processes import run_on_ranks
from tests.training.trainers import dataset, mlp

pytestmark = [pytest.mark.process, pytest.mark.serial]  # two seconds, where nothing else runs


def check_disagreement(script):
    """Check that all ranks raise the same error within two seconds, and return its text."""
    result = run_on_ranks((script,), mistake_scripts.NUM_RANKS)
    answers, seconds, _ = zip(*(one[script.__name__] for one in result), strict=True)
    assert len(set(answers)) == 1
    assert max(seconds) < 2
    return answers[0]


def test_a_call_of_backward_on_the_number_that_a_step_returns_is_documented():
    inputs, targets = dataset(12).tensors
    step = cp.parallelize(mlp(), partial(optim.SGD, lr=0.1), F.cross_entropy)
    with step, pytest.raises(AttributeError) as caught:
        step(inputs, targets).backward()  # type: ignore[attr-defined]
    assert [f"AttributeError: {caught.value}"] == documented_messages("A call of loss.backward() by habit")


def test_a_step_that_one_rank_leaves_out_names_two_ranks_and_what_they_did():
    text = check_disagreement(mistake_scripts.a_step_that_one_rank_leaves_out)
    assert [re.sub(r"collective \d+", "collective NUMBER", text)] == documented_messages(
        "A branch that depends on the rank"
    )


def test_a_rate_that_changes_on_one_rank_is_named_in_the_step():
    text = check_disagreement(mistake_scripts.a_rate_that_changes_on_one_rank)
    assert [text] == documented_messages("Something that changes on one rank only")


@pytest.mark.slow
def test_an_evaluation_on_one_rank_names_two_ranks_and_what_they_did():
    text = check_disagreement(mistake_scripts.an_evaluation_on_one_rank)
    assert text.startswith("PeerError: ranks 0 and 1 disagree on collective ")
    assert text.index("rank 0 starts barrier of leaving weights") < text.index("rank 1 starts barrier of grad0")


@pytest.mark.slow
def test_an_exception_on_one_rank_is_the_first_line_and_the_others_stopped_because_of_it():
    with pytest.raises(cp.LaunchError) as caught:
        launch(mistake_scripts.an_exception_on_one_rank, ranks=mistake_scripts.NUM_RANKS)
    (text,) = documented_messages("An exception on one rank")
    assert re.sub(r"mistake_scripts.py:\d+", "mistake_scripts.py:PLACE", " ".join(str(caught.value).split())) == text


@pytest.mark.slow
def test_the_launcher_adds_where_each_rank_stood():
    with pytest.raises(cp.LaunchError, match=r"disagree on collective") as caught:
        launch(mistake_scripts.a_step_that_one_rank_leaves_out, ranks=mistake_scripts.NUM_RANKS)
    *_, last = str(caught.value).splitlines()
    assert re.fullmatch(r"ranks 0 and 2 at tests/\S+py:\d+, rank 1 at tests/\S+py:\d+", last)
