import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from counterpoint.data.sampler import Cursor, Sampler, permute, split_batch
from counterpoint.errors import DataError
from tests.covering import given_few_or_many

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 10**9)


def epoch_of(sampler, epoch):
    return np.concatenate([sampler.batch(epoch, index) for index in range(sampler.num_batches)])


@given_few_or_many(20, 100, num_samples=st.integers(1, 3000), seed=SEEDS, epoch=EPOCHS)
@example(num_samples=1, seed=0, epoch=0)
@example(num_samples=17, seed=0, epoch=0)
def test_an_epoch_holds_every_sample_once(num_samples, seed, epoch):
    order = epoch_of(Sampler(num_samples, batch_size=101, seed=seed), epoch)
    assert sorted(order) == list(range(num_samples))


@given(num_samples=st.integers(1, 2**50), position=st.integers(0, 2**50), seed=SEEDS)
def test_a_single_position_of_a_dataset_of_any_size_is_found_at_once(num_samples, position, seed):
    where = np.array([position % num_samples])
    assert 0 <= permute(where, num_samples=num_samples, seed=seed, epoch=3)[0] < num_samples


@given_few_or_many(
    20, 100, num_samples=st.integers(1, 500), seed=SEEDS, sizes=st.tuples(st.integers(9, 70), st.integers(9, 70))
)
def test_the_order_does_not_depend_on_how_it_is_cut_into_batches(num_samples, seed, sizes):
    one, other = (epoch_of(Sampler(num_samples, size, seed), epoch=1) for size in sizes)
    assert one.tolist() == other.tolist()


@given(batch_len=st.integers(0, 200), num_ranks=st.integers(1, 12))
def test_the_pieces_of_a_batch_joined_are_the_batch_on_any_number_of_ranks(batch_len, num_ranks):
    pieces = split_batch(batch_len, num_ranks)
    assert [x for start, stop in pieces for x in range(start, stop)] == list(range(batch_len))
    sizes = [stop - start for start, stop in pieces]
    assert len(sizes) == num_ranks
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given_few_or_many(20, 100, num_samples=st.integers(1, 30), batch_size=st.integers(1, 9), stop=st.integers(0, 12))
def test_a_run_resumed_from_a_saved_cursor_sees_what_the_uninterrupted_run_sees(num_samples, batch_size, stop):
    sampler = Sampler(num_samples, batch_size, seed=5)

    def walk(cursor, num_steps):
        seen = []
        for _ in range(num_steps):
            seen.append(sampler.batch(cursor.epoch, cursor.batch).tolist())
            cursor = cursor.advance(sampler.num_batches)
        return cursor, seen

    _, whole = walk(Cursor(), stop + 9)
    cursor, before = walk(Cursor(), stop)
    _, after = walk(Cursor.from_dict(cursor.to_dict()), 9)
    assert before + after == whole


def test_the_order_of_a_seed_never_changes_between_releases():
    sampler = Sampler(10, batch_size=10, seed=7)
    assert sampler.batch(0, 0).tolist() == [7, 1, 9, 3, 0, 5, 4, 2, 6, 8]
    assert sampler.batch(1, 0).tolist() == [6, 1, 2, 9, 7, 0, 5, 3, 4, 8]


def test_every_sample_is_at_every_position_equally_often():
    num_samples, num_epochs = 12, 2400
    orders = np.stack([Sampler(num_samples, 12, seed=1).batch(epoch, 0) for epoch in range(num_epochs)])
    counts = np.stack([np.bincount(orders[:, position], minlength=12) for position in range(12)])
    expected = num_epochs / num_samples
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 180  # 121 degrees of freedom: 1 in 2500 for a fair shuffle


def test_neighbours_in_the_order_are_not_neighbours_in_the_dataset():
    order = Sampler(100_000, 100_000, seed=3).batch(0, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.01


def test_epochs_and_seeds_have_unrelated_orders():
    orders = [Sampler(1000, 1000, seed).batch(epoch, 0) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    same = [(a == b).sum() for i, a in enumerate(orders) for b in orders[:i]]
    assert max(same) < 10


def test_the_last_batch_is_smaller_or_dropped():
    kept = Sampler(10, batch_size=4, shuffle="sequential")
    assert [kept.batch(0, index).tolist() for index in range(kept.num_batches)][-1] == [8, 9]
    assert kept.batch_len(2) == 2
    assert Sampler(10, batch_size=4, drop_last=True).num_batches == 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Sampler(0, 4), "the dataset has 0 samples"),
        (lambda: Sampler(4, 0), "batch_size is 0; give batch_size=1 or more"),
        (lambda: Sampler(4, 8, drop_last=True), "4 samples do not fill one batch of 8.*give batch_size=4"),
        (
            lambda: Sampler(4, 2, shuffle="random"),  # type: ignore[arg-type]
            "shuffle='random'; give feistel or sequential",
        ),
        (lambda: Sampler(4, 2).batch(0, 2), "no batch 2: 4 samples in batches of 2 are batches 0 to 1"),
        (lambda: Sampler(4, 2).batch(-1, 0), "no epoch -1; epochs count from 0"),
        (lambda: Cursor(0, -1), "epoch 0, batch -1 does not exist"),
        (lambda: Cursor(0, 9).advance(9), "is at batch 9, but an epoch has 9 batches"),
        (
            lambda: Cursor.from_dict({"epoch": 1}),
            r"has the keys \['epoch'\], but must have exactly batch and",
        ),
        (
            lambda: Cursor.from_dict({"epoch": 1, "batch": "2"}),
            "epoch 1 and batch '2', but both must be whole",
        ),
        (lambda: split_batch(4, 0), "a batch of 4 samples cannot be split into 0 microbatches;"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_the_values_and_the_remedy(make, text):
    with pytest.raises(DataError, match=text):
        make()


def test_sampling_needs_no_torch():
    code = "import sys, counterpoint.data.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("shuffle", ["feistel", "sequential"])
def test_many_batches_at_once_are_the_batches_one_by_one(shuffle):
    sampler = Sampler(num_samples=23, batch_size=5, seed=2, shuffle=shuffle)
    at_once = sampler.batches(epoch=3, first=1, count=99)
    assert [batch.tolist() for batch in at_once] == [sampler.batch(3, index).tolist() for index in range(1, 5)]
