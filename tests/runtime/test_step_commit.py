"""The step commit: every rank of a group decides the same from the same reports."""

import math
from dataclasses import replace

import pytest
import torch

from counterpoint.errors import DataError
from counterpoint.runtime.commit.step_commit import (
    StepGuard,
    StepResult,
    decide_skips,
    decide_step,
    decode_report,
    encode_report,
    make_step_report,
    may_overflow,
    require_finite,
)
from counterpoint.runtime.loss.loss_scale import DynamicLossScale
from counterpoint.runtime.params.grad_check import GradReport

CLIP = StepGuard(clip_norm=1.0)


def round_trip(report):
    return decode_report(torch.tensor(encode_report(report), dtype=torch.float64).tolist())


def decide(*reports, guard=CLIP):
    """Decide from reports that were round_trip as numbers."""
    return decide_step([round_trip(report) for report in reports], range(len(reports)), guard)


def test_the_loss_is_the_mean_over_all_samples_of_the_group():
    result = decide(
        make_step_report({0: 2.0, 1: 4.0}, {0: 3, 1: 1}, 0.0), make_step_report({2: 6.0, 3: 0.0}, {2: 4, 3: 0}, 0.0)
    )
    assert (result.loss, result.num_samples, result.skip_reason) == ((6 + 4 + 24) / 8, 8, "")


def test_the_norm_is_the_root_of_all_squares_and_gradients_are_scaled_as_torch_does():
    result = decide(make_step_report({}, {}, 9.0), make_step_report({}, {}, 16.0))
    assert result.norm == 5.0
    assert result.scale == 1.0 / (5.0 + 1e-6)
    assert decide(make_step_report({}, {}, 0.25)).scale == 1.0


def test_a_norm_that_was_not_requested_is_nan():
    result = decide(make_step_report({0: 1.0}, {0: 1}, 0.0), guard=StepGuard())
    assert math.isnan(result.norm)
    assert result.scale == 1.0


def test_a_group_without_samples_has_no_loss_and_no_skip_reason():
    result = decide(make_step_report({}, {}, 0.0), make_step_report({}, {}, 0.0))
    assert math.isnan(result.loss)
    assert (result.num_samples, result.skip_reason) == (0, "")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_rank_with_a_loss_that_is_not_finite_is_named_with_its_microbatch(bad):
    fine = make_step_report({0: 1.0}, {0: 2}, 0.0)
    result = decide(
        fine, make_step_report({3: bad, 2: 1.0}, {2: 2, 3: 2}, 0.0), make_step_report({4: bad}, {4: 2}, 0.0)
    )
    assert result.skip_reason == f"the loss of microbatch 3 on rank 1 is {bad}"


def test_the_stages_of_an_async_pipeline_report_the_same_loss_that_is_not_finite_by_its_batch():
    """The last stage decides on microbatches 6 and 7; two replicas of the first on one of them each, with another one."""
    bad, fine = make_step_report({6: math.nan, 7: 1.0}, {6: 2, 7: 2}, 0.0), make_step_report({7: 1.0}, {7: 2}, 0.0)
    last = decide_step([bad], (2,), CLIP, microbatches_per_batch=4)
    first = decide_step([fine, make_step_report({6: math.nan}, {6: 2}, 0.0)], (0, 1), CLIP, microbatches_per_batch=4)
    assert last.skip_reason == first.skip_reason == "the loss of microbatch 2 of batch 1 is nan"


def skipped(reason, **fields):
    return StepResult(1.0, 1, math.nan, 1.0, reason, **fields)


def test_the_remedy_for_an_async_pipeline_clips_by_stage():
    with pytest.raises(DataError, match=r"or clip with clip_norm=1.0, clip_by='stage', or pass nonfinite='skip'"):
        require_finite(skipped("it is nan"), 7, 1, StepGuard(), is_async_pipeline=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_named_by_its_rank(bad):
    result = decide(make_step_report({0: 1.0}, {0: 1}, 1.0), make_step_report({}, {}, bad))
    assert result.skip_reason == "the norm of the gradients on rank 1 is not finite"
    assert result.scale == 1.0


def test_the_first_gradient_that_is_not_finite_is_named_with_its_rank_and_microbatch():
    fine = make_step_report({0: 1.0}, {0: 1}, 0.0, grads=GradReport(share=0.5))
    bad = make_step_report({2: 1.0}, {2: 1}, 0.0, grads=GradReport(2, "fc.weight"))
    result = decide_step([fine, bad], (0, 1), StepGuard())
    assert result.skip_reason == "the gradient of fc.weight in microbatch 2 on rank 1 is not finite"
    result = decide_step([fine, bad], (0, 1), StepGuard(), microbatches_per_batch=2)
    assert result.skip_reason == "the gradient of fc.weight in microbatch 0 of batch 1 on rank 1 is not finite"
    assert decide_skips([fine, bad], result, has_samples=True) == (True, False)
    assert decide_skips([fine, bad], result, has_samples=True, delays_grads=True) == (False, True)


def test_sums_are_only_read_where_they_may_overflow():
    half, quarter = (make_step_report({}, {}, 0.0, grads=GradReport(share=share)) for share in (0.5, 0.25))
    assert not may_overflow([half, quarter])
    assert may_overflow([half, half])
    reports = [half, replace(half, has_overflow=True)]
    result = decide_step(reports, (0, 1), StepGuard())
    assert result.skip_reason.startswith("the sum of gradients over microbatches and ranks is not finite on rank 1")
    assert decide_skips(reports, result, has_samples=True) == (True, False)
    assert decide_skips(reports, result, has_samples=True, delays_grads=True) == (True, False)


def test_norms_that_add_up_to_infinity_skip_the_step():
    assert decide(make_step_report({}, {}, 1e308), make_step_report({}, {}, 1e308)).skip_reason.startswith(
        "the gradients' norm is too"
    )


def test_the_result_does_not_depend_on_the_member():
    reports = [make_step_report({0: 1 / 3}, {0: 3}, 0.1), make_step_report({1: 2 / 7}, {1: 2}, 0.2)]
    assert decide_step(reports, (0, 1), CLIP) == decide_step([round_trip(report) for report in reports], (0, 1), CLIP)


def test_the_error_of_an_asynchronous_pipeline_says_which_updates_may_be_applied():
    """It said that the parameters are unchanged, while other stages had applied the batch or earlier ones."""
    with pytest.raises(DataError, match=r"some may have applied this batch, and some not yet .* last checkpoint"):
        require_finite(skipped("it is nan"), 7, 1, StepGuard(), is_async_pipeline=True)


def test_a_skip_reason_ends_the_run_or_skips_until_there_are_too_many():
    with pytest.raises(DataError, match=r"^step 7 cannot be applied: it is nan; the parameters are unchanged"):
        require_finite(skipped("it is nan"), 7, 1, StepGuard())
    skipping = StepGuard(nonfinite="skip", max_consecutive_skips=3)
    require_finite(skipped("it is nan"), 7, 3, skipping)
    with pytest.raises(DataError, match=r"^4 steps in a row were skipped, the last one, step 7, because it is nan;"):
        require_finite(skipped("it is nan"), 7, 4, skipping)
    require_finite(skipped(""), 7, 0, StepGuard())


def test_gradients_that_are_not_finite_skip_the_step_while_the_loss_scale_may_shrink():
    result = skipped("it is inf", nonfinite="gradients", loss_scale=1.0)
    guard = StepGuard(loss_scale=DynamicLossScale(), max_consecutive_skips=3)
    require_finite(result, 7, 9, guard, may_shrink=True)
    with pytest.raises(DataError, match=r"^step 7 cannot be applied: it is inf, at the smallest loss scale, 1; the p"):
        require_finite(result, 7, 9, guard)
    with pytest.raises(DataError, match=r"^step 7 cannot be applied: it is nan; the parameters"):  # no scale helps
        require_finite(skipped("it is nan", nonfinite="losses"), 7, 1, guard, may_shrink=True)
    with pytest.raises(
        DataError, match=r"it is inf, with loss_scale=1024; .* give a smaller loss_scale, or 'dynamic', "
    ):
        require_finite(replace(result, loss_scale=1024.0), 7, 1, StepGuard(loss_scale=1024.0))
