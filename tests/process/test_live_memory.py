"""Between two steps, processes hold what the formula of their strategy says: nothing whole outlives its use."""

import pytest

from tests.process.forked_ranks import run_forked
from tests.process.live_memory import NUM_LAYERS, measure, measure_activations, measure_weights

pytestmark = pytest.mark.process
# Weights, gradients and Adam's two moments, in sizes of the model.
FORMULAS = {
    "2": {
        "data(2)": 1 + 1 + 2,
        "zero(2, level=1)": 1 + 1 + 2 / 2,
        "zero(2, level=2)": 1 + 1 / 2 + 2 / 2,
        "zero(2, level=3)": (1 + 1 + 2) / 2,
        "zero(2, level=3, reshard_after_forward=off)": (1 + 1 + 2) / 2,
        "zero(2, level=3, persistence_threshold=300000)": 1 + (1 + 2) / 2,  # every unit has 262,656 elements
        "pipeline(2)": (1 + 1 + 2) / 2,
        "tensor(2)": (1 + 1 + 2) / 2,
    },
    "4": {
        "data(4)": 1 + 1 + 2,
        "zero(4, level=1)": 1 + 1 + 2 / 4,
        "zero(4, level=2)": 1 + 1 / 4 + 2 / 4,
        "zero(4, level=3)": (1 + 1 + 2) / 4,
        "pipeline(4)": (1 + 1 + 2) / 4,
        "tensor(4)": (1 + 1 + 2) / 4,
    },
    "4 on two axes": {
        "zero(2, level=1) * data(2)": 1 + 1 + 2 / 2,
        "zero(2, level=2) * data(2)": 1 + 1 / 2 + 2 / 2,
        "zero(2, level=3) * data(2)": (1 + 1 + 2) / 2,
        "tensor(2) * data(2)": (1 + 1 + 2) / 2,
        "pipeline(2) * zero(2, level=1)": (1 + 1 + 2 / 2) / 2,
    },
}


MASTERS = "bf16(reduce=bf16, weights=compute)"
# Bytes of weights, gradients, and master weights with two moments, for each parameter.
BYTES = {
    2: {"data(2)": 2 + 2 + 12, "zero(2, level=1)": 2 + 2 + 12 / 2, "zero(2, level=2)": 2 + 2 / 2 + 12 / 2},
    4: {
        "zero(4, level=1)": 2 + 2 + 12 / 4,
        "zero(4, level=2)": 2 + 2 / 4 + 12 / 4,
        "zero(2, level=2) * data(2)": 2 + 2 / 2 + 12 / 2,
        "pipeline(2) * zero(2, level=1)": (2 + 2 + 12 / 2) / 2,
    },
}


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_ranks", BYTES)
def test_processes_have_the_bytes_of_the_table_of_zero_with_master_weights(num_ranks):
    formulas = BYTES[num_ranks]
    for measured in run_forked(measure, ranks=num_ranks, args=[list(formulas), "gloo", MASTERS]):
        assert isinstance(measured, list), measured
        live = {plan: 4 * one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


# The same in bytes for each parameter, with Adam's moments and master weights on disk.
OFFLOADED = {
    None: {
        "data(2)": 4 + 4,
        "zero(2, level=2)": 4 + 4 / 2,
        "zero(2, level=3)": 4 / 2 + 4 / 2,
        "pipeline(2)": (4 + 4) / 2,
    },
    MASTERS: {"data(2)": 2 + 2, "zero(2, level=2)": 2 + 2 / 2},
}


@pytest.mark.long(quick=["None"])
@pytest.mark.parametrize("precision", OFFLOADED)
def test_state_on_disk_is_not_live_between_steps(precision, tmp_path):
    formulas = OFFLOADED[precision]
    for measured in run_forked(measure, ranks=2, args=[list(formulas), "gloo", precision, str(tmp_path)]):
        assert isinstance(measured, list), measured
        live = {plan: 4 * one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


# The same with weights on disk, and Adam's moments in memory or on disk, too.
WEIGHTS = {
    ("offload:params=disk",): {"zero(2, level=3)": 4 / 2 + 8 / 2},
    ("offload:params=disk", "offload:state=disk"): {
        "zero(2, level=3)": 4 / 2,
        "zero(2, level=3, reshard_after_forward=off)": 4 / 2,
    },
}


@pytest.mark.parametrize("passes", WEIGHTS, ids=" ".join)
def test_weights_on_disk_are_not_live_between_steps(passes, tmp_path):
    formulas = WEIGHTS[passes]
    for measured in run_forked(measure, ranks=2, args=[list(formulas), "gloo", None, str(tmp_path), passes]):
        assert isinstance(measured, list), measured
        live = {plan: 4 * one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


def test_weights_on_disk_take_as_much_less_as_predicted_while_others_are_gathered(tmp_path):
    """In memory are the weights that the loss has been computed with, and no shard: none is read before their backward."""
    passes = [("overlap",), ("overlap", "offload:params=disk")]
    for measured in run_forked(measure_weights, ranks=2, args=[passes, str(tmp_path)]):
        assert isinstance(measured, list), measured
        (live, predicted), (live_rest, predicted_rest) = measured
        assert predicted - predicted_rest == NUM_LAYERS
        assert live - live_rest == pytest.approx(NUM_LAYERS, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", FORMULAS)
def test_live_tensors_are_those_of_the_formula(ranks, transport):
    formulas = FORMULAS[ranks]
    for measured in run_forked(measure, ranks=int(ranks[0]), args=[list(formulas), transport]):
        assert isinstance(measured, list), measured  # else an error
        live = {plan: one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


def test_gloo_keeps_no_more_for_reductions_than_the_gradients_of_the_other_ranks():
    for measured in run_forked(measure, ranks=2, args=[["zero(2, level=1)"], "gloo"]):
        assert isinstance(measured, list), measured
        ((_, pooled),) = measured
        assert pooled <= 0.75  # a half of the gradient is received, and little is rounded up


def test_partitioned_activations_take_as_much_less_as_predicted():
    passes = [("recompute",), ("recompute", "partition_activations")]
    for measured in run_forked(measure_activations, ranks=2, args=["tensor(2)", passes]):
        assert isinstance(measured, list), measured
        (live, predicted), (live_parts, predicted_parts) = measured
        assert live - live_parts == pytest.approx(predicted - predicted_parts, rel=0.02)
        assert predicted - predicted_parts >= 2


def test_activations_on_disk_take_as_much_less_as_predicted(tmp_path):
    """The one that is being written may be on disk already."""
    passes = [("recompute",), ("recompute", "offload:activations=disk")]
    (measured,) = run_forked(measure_activations, ranks=1, args=["solo", passes, str(tmp_path)])
    assert isinstance(measured, list), measured
    (live, predicted), (live_rest, predicted_rest) = measured
    saved = predicted - predicted_rest
    assert saved == 5
    assert saved - 0.02 <= live - live_rest <= saved + 1.02
