"""Gradients are assigned to buckets in the order in which they become ready."""

from hypothesis import given, strategies as st

from counterpoint.runtime.comm.bucket_plan import candidate_sizes, merge_ranges, subtract_ranges
from counterpoint.strategies.buckets import BucketConfig, ReadyGrad, assign_buckets

READY = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 100)), max_size=12)
SIZES = st.builds(BucketConfig, st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.0, 5.0]))


def ready_grads(result):
    return [ReadyGrad(place, flat_params, size, when / 1000) for place, (flat_params, size, when) in enumerate(result)]


def bucket_config(*sizes):
    return ready_grads([(0, size, when) for when, size in enumerate(sizes)])


@given(READY, SIZES)
def test_every_gradient_is_in_one_bucket_of_its_own_buffer(result, sizes):
    buckets = assign_buckets(ready_grads(result), sizes)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(result)))
    assert all(len({result[place][0] for place in bucket}) == 1 for bucket in buckets)


@given(READY, SIZES)
def test_a_bucket_has_at_most_the_given_size_or_a_single_gradient(result, sizes):
    for bucket in assign_buckets(ready_grads(result), sizes):
        assert len(bucket) == 1 or sum(result[place][1] for place in bucket) <= sizes.bucket_bytes
        times = [result[place][2] for place in bucket]
        assert not sizes.cycle_ms or max(times) - min(times) <= sizes.cycle_ms


def test_a_small_last_layer_shares_a_bucket_with_the_large_one_before_it():
    assert assign_buckets(bucket_config(1, 40, 20, 5), BucketConfig(bucket_bytes=100, first_bytes=10)) == (
        (0, 1),
        (2, 3),
    )
    assert assign_buckets(bucket_config(1, 40, 20, 5), BucketConfig(bucket_bytes=30, first_bytes=10)) == (
        (0,),
        (1,),
        (2, 3),
    )


@given(READY, SIZES)
def test_buckets_are_in_the_order_in_which_they_are_complete(result, sizes):
    ends = [max(result[place][2] for place in bucket) for bucket in assign_buckets(ready_grads(result), sizes)]
    assert ends == sorted(ends)


def test_the_first_bucket_has_its_own_size():
    assert assign_buckets(bucket_config(4, 4, 4, 4, 4), BucketConfig(12, 4)) == ((0,), (1, 2, 3), (4,))


def test_a_first_bucket_is_not_larger_than_the_others():
    assert assign_buckets(bucket_config(4, 4, 4), BucketConfig(0, 100)) == ((0,), (1,), (2,))


def test_a_late_gradient_starts_another_bucket():
    result = [(0, 1, when) for when in (0, 1, 9, 10)]
    assert assign_buckets(ready_grads(result), BucketConfig(100, 100, cycle_ms=5)) == ((0, 1), (2, 3))


@given(st.sets(st.integers(0, 30)))
def test_removed_and_remaining_ranges_make_up_the_whole(taken):
    ranges = merge_ranges((at, at + 1) for at in taken)
    elements = [at for low, high in [*ranges, *subtract_ranges([(0, 31)], ranges)] for at in range(low, high)]
    assert sorted(elements) == list(range(31))


def test_a_single_bucket_is_tried_in_addition_to_larger_and_smaller_ones():
    sizes = [one.bucket_bytes for one in candidate_sizes(BucketConfig(1600, 10))]
    assert sizes == [1600, 6400, 400, 100, max(sizes)]
