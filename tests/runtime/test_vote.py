"""The step commit: every rank of a group decides the same from the same ballots."""

import math

import pytest
import torch

from counterpoint.errors import DataError
from counterpoint.runtime.vote import Guard, ballot_of, decide, from_numbers, require_finite, to_numbers

CLIP, WATCH = Guard(clip_norm=1.0), Guard(watch="gradients")


def sent(ballot):
    return from_numbers(torch.tensor(to_numbers(ballot), dtype=torch.float64).tolist())


def verdict(*ballots, guard=CLIP):
    """Decide from ballots that have travelled as numbers."""
    return decide([sent(ballot) for ballot in ballots], range(len(ballots)), guard)


def test_the_loss_is_the_mean_over_all_samples_of_the_group():
    found = verdict(ballot_of({0: 2.0, 1: 4.0}, {0: 3, 1: 1}, 0.0), ballot_of({2: 6.0, 3: 0.0}, {2: 4, 3: 0}, 0.0))
    assert (found.loss, found.num_samples, found.fault) == ((6 + 4 + 24) / 8, 8, "")


def test_the_norm_is_the_root_of_all_squares_and_gradients_are_scaled_as_torch_does():
    found = verdict(ballot_of({}, {}, 9.0), ballot_of({}, {}, 16.0))
    assert found.norm == 5.0
    assert found.scale == 1.0 / (5.0 + 1e-6)
    assert verdict(ballot_of({}, {}, 0.25)).scale == 1.0


def test_a_norm_that_nobody_asked_for_is_not_told():
    found = verdict(ballot_of({0: 1.0}, {0: 1}, 0.0), guard=Guard())
    assert math.isnan(found.norm)
    assert found.scale == 1.0


def test_a_group_that_saw_no_sample_has_no_loss_and_no_fault():
    found = verdict(ballot_of({}, {}, 0.0), ballot_of({}, {}, 0.0))
    assert math.isnan(found.loss)
    assert (found.num_samples, found.fault) == (0, "")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_rank_with_a_loss_that_is_not_finite_is_named_with_its_microbatch(bad):
    fine = ballot_of({0: 1.0}, {0: 2}, 0.0)
    found = verdict(fine, ballot_of({3: bad, 2: 1.0}, {2: 2, 3: 2}, 0.0), ballot_of({4: bad}, {4: 2}, 0.0))
    assert found.fault == f"the loss of microbatch 3 on rank 1 is {bad}"


def test_the_stages_of_a_stream_say_the_same_of_a_loss_that_is_not_finite_and_count_microbatches_in_its_batch():
    """The last stage decides on microbatches 6 and 7 alone, two replicas of the first on each with another one."""
    bad, fine = ballot_of({6: math.nan, 7: 1.0}, {6: 2, 7: 2}, 0.0), ballot_of({7: 1.0}, {7: 2}, 0.0)
    last = decide([bad], (2,), CLIP, stride=4)
    first = decide([fine, ballot_of({6: math.nan}, {6: 2}, 0.0)], (0, 1), CLIP, stride=4)
    assert last.fault == first.fault == "the loss of microbatch 2 of batch 1 is nan"


def test_the_remedy_for_a_stream_clips_by_stage():
    with pytest.raises(DataError, match=r"or clip with clip_norm=1.0, clip_by='stage', or pass nonfinite='skip'"):
        require_finite("it is nan", 7, 1, Guard(), is_stream=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_by_its_rank(bad):
    found = verdict(ballot_of({0: 1.0}, {0: 1}, 1.0), ballot_of({}, {}, bad), guard=WATCH)
    assert found.fault == "a gradient on rank 1 is not finite"
    assert found.scale == 1.0


def test_norms_that_add_up_to_infinity_are_a_fault():
    assert verdict(ballot_of({}, {}, 1e308), ballot_of({}, {}, 1e308)).fault.startswith("the gradients' norm is too")


def test_what_is_decided_does_not_depend_on_who_reads_the_ballots():
    ballots = [ballot_of({0: 1 / 3}, {0: 3}, 0.1), ballot_of({1: 2 / 7}, {1: 2}, 0.2)]
    assert decide(ballots, (0, 1), CLIP) == decide([sent(ballot) for ballot in ballots], (0, 1), CLIP)


def test_a_fault_ends_the_run_or_is_skipped_until_there_are_too_many():
    with pytest.raises(DataError, match=r"^step 7 cannot be applied: it is nan; the parameters are as they were"):
        require_finite("it is nan", 7, 1, Guard())
    skipping = Guard(nonfinite="skip", most_skips=3)
    require_finite("it is nan", 7, 3, skipping)
    with pytest.raises(DataError, match=r"^4 steps in a row were skipped, the last one, step 7, because it is nan;"):
        require_finite("it is nan", 7, 4, skipping)
    require_finite("", 7, 0, Guard())
