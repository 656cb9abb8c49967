"""Processes need the memory that is predicted, so that several train a model that one of them could not hold."""

import pytest

import counterpoint as cp
from counterpoint.errors import LaunchError
from tests.process import peak_memory
from tests.process.forked_ranks import run_forked

pytestmark = [
    pytest.mark.process,
    pytest.mark.serial,
    pytest.mark.skipif(not peak_memory.SMAPS.exists(), reason="the kernel does not tell the memory of a process"),
]
NUM_LAYERS = 32
PLANS = {
    "data(2)": 2,
    "zero(2, level=1)": 2,
    "zero(2, level=2)": 2,
    "zero(2, level=3)": 2,
    "pipeline(2)": 2,
    "tensor(2)": 2,
    "data(4)": 4,
    "zero(4, level=1)": 4,
    "zero(4, level=2)": 4,
    "zero(4, level=3)": 4,
    "zero(2, level=3) * data(2)": 4,
    "pipeline(2) * zero(2, level=1)": 4,
}


EXACT = {
    2: [(f"zero(2, level={level})", count) for level in (2, 3) for count in (1, 2)],
    4: [(f"zero(2, level={level}) * data(2)", 1) for level in (2, 3)],
}


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_ranks", EXACT)
def test_shards_that_stay_in_place_change_no_value(num_ranks):
    expected = peak_memory.plain_losses(peak_memory.small_double())
    for losses in run_forked(peak_memory.train_in_double, ranks=num_ranks, args=[EXACT[num_ranks]]):
        assert isinstance(losses, list), losses  # else an error
        assert losses == [pytest.approx(expected, rel=1e-12)] * len(EXACT[num_ranks])


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_processes_grow_by_what_is_predicted(plan):
    args = [plan, NUM_LAYERS, {"share_params_on_host": False}]
    samples, predicted = zip(
        *cp.launch(peak_memory.measure, ranks=PLANS[plan], args=args, threads_per_rank=1), strict=True
    )
    assert peak_memory.joint_growth(samples) == pytest.approx(sum(predicted), rel=0.1)


@pytest.mark.long
def test_four_processes_train_a_model_of_which_one_could_hold_only_half():
    half = peak_memory.STATES * peak_memory.LAYER_BYTES * NUM_LAYERS // 2
    with peak_memory.memory_cgroups(4, half + peak_memory.BESIDES_BYTES) as folders:
        if not folders:
            pytest.skip(
                "this process cannot make a cgroup with a limit of memory; run as root, in a container of its own"
            )
        with pytest.raises(LaunchError, match="was killed by SIGKILL"):
            cp.launch(peak_memory.train_plainly, ranks=1, args=[folders[:1], NUM_LAYERS])
        assert cp.launch(peak_memory.train_plainly, ranks=1, args=[folders[:1], NUM_LAYERS // 2])
        args = [folders, "zero(4, level=3)", NUM_LAYERS]
        trained = cp.launch(peak_memory.train_within, ranks=4, args=args, threads_per_rank=1)
        (expected,) = cp.launch(peak_memory.train_plainly, ranks=1, args=[[], NUM_LAYERS])
    assert all(losses == pytest.approx(expected, rel=1e-5) for losses in trained)
