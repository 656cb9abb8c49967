"""The options that say how gradients are put together for their sums."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.strategies.buckets import BucketConfig, format_bytes, parse_bytes
from counterpoint.strategies.data import Data

MiB = 2**20


def test_options_that_are_not_given_are_as_they_are_by_default():
    assert Plan.parse("data(4, first_bucket=2MiB)").strategies == (Data(4, buckets=BucketConfig(25 * MiB, 2 * MiB)),)


def test_a_plan_with_buckets_as_they_are_by_default_says_nothing_about_them():
    assert str(Plan.parse("data(4, bucket=25MiB, first_bucket=1MiB, cycle=0, tune=on)")) == "data(4)"


@pytest.mark.parametrize("text", ["0", "1B", "1023B", "1KiB", "1025B", "3MiB", "2GiB"])
def test_a_size_writes_what_it_reads(text):
    assert format_bytes(parse_bytes("bucket", text)) == text


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("bucket=-1", "bucket=-1 is not a size; give whole numbers such as bucket=64MiB, 512KiB, 1000B or 0"),
        ("first_bucket=1.5MiB", "first_bucket=1.5MiB is not a size; give whole numbers such as first_bucket=64MiB,"),
        ("bucket=64MB", "bucket=64MB is not a size;"),
        ("cycle=soon", "cycle=soon is not a time; give milliseconds, such as cycle=5"),
        ("cycle=-1", "cycle=-1.0 is not a time; give milliseconds, such as cycle=5, or 0 for no"),
        ("cycle=nan", "cycle=nan is not a time;"),
        ("tune=maybe", "there is no tune=maybe; give tune=on or tune=off"),
    ],
)
def test_an_option_that_is_none_is_refused(option, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(f"data(2, {option})")
    assert message in str(caught.value)
