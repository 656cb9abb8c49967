"""Batches of samples of similar length: every sample once, within the limits, the same in every process."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from counterpoint.data.sampler import LengthGroupedBatchSampler
from counterpoint.errors import DataError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(lengths=LENGTHS, tokens=st.integers(30, 90), width=st.sampled_from([None, 4, 7]), multiple=st.integers(1, 4))
def test_every_sample_is_in_one_batch_that_has_no_more_tokens_than_allowed(lengths, tokens, width, multiple):
    tokens += 5  # room for the padding to a bucket
    sampler = LengthGroupedBatchSampler(lengths, tokens_per_batch=tokens, bucket_width=width, multiple_of=multiple)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(batches) == len(sampler)
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        padded = longest if width is None else -(-longest // width) * width
        assert padded * len(batch) <= tokens
        if width is not None:
            assert {-(-lengths[index] // width) for index in batch} == {padded // width}


@given(lengths=LENGTHS, size=st.integers(1, 9))
def test_batches_of_a_number_of_samples_waste_no_more_than_sorted_ones_do(lengths, size):
    batches = list(LengthGroupedBatchSampler(lengths, batch_size=size, shuffle=False))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert [lengths[index] for batch in batches for index in batch] == sorted(lengths)


def test_sizes_are_multiples_but_that_of_the_last_batch():
    sampler = LengthGroupedBatchSampler([3] * 10 + [4] * 7, tokens_per_batch=21, multiple_of=4, shuffle=False)
    assert [len(batch) for batch in sampler] == [4, 4, 4, 5]


def test_an_epoch_is_another_order_of_the_same_batches_and_depends_on_seed_and_epoch_only():
    lengths = np.arange(1, 41)
    first, again, other = (LengthGroupedBatchSampler(lengths, tokens_per_batch=64, seed=seed) for seed in (1, 1, 2))
    epochs = []
    for epoch in range(3):
        first.set_epoch(epoch)
        epochs.append(list(first))
    again.set_epoch(2)
    other.set_epoch(2)
    assert list(again) == epochs[2] != list(other)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(map(sorted, epochs[0])) == sorted(map(sorted, epochs[1]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "tokens_per_batch=None and batch_size=None were given; a batch has either"),
        ({"tokens_per_batch": 9, "batch_size": 2}, "tokens_per_batch=9 and batch_size=2 were given; "),
        ({"batch_size": 0}, "batch_size is 0; give batch_size=1 or more"),
        ({"tokens_per_batch": 8}, "sample 1 has 9 tokens, with those that pad it, but tokens_per_batch is 8; give tok"),
        ({"tokens_per_batch": 9, "bucket_width": 5}, "sample 1 has 10 tokens, "),
    ],
)
def test_what_makes_no_batches_is_refused(options, text):
    with pytest.raises(DataError, match=f"^{text}"):
        LengthGroupedBatchSampler([4, 9, 2], **options)


def test_no_sample_is_refused():
    with pytest.raises(DataError, match=r"^there are no lengths, so there is no sample; "):
        LengthGroupedBatchSampler([], batch_size=2)
