"""What a device needs that compiles a whole step, as a TPU does by XLA: every step launches the same operators."""

import itertools

import pytest

from counterpoint.errors import PlanError
from counterpoint.testing.device_survey import batches, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")


def record(name, plan, numbers=(5, 6), **options):
    """Return what two steps launch; no loss is checked in them."""
    step, _ = make_step(name, plan, StandInAccelerator(), **options)
    recorded = []
    with step:
        for number, batch in enumerate(itertools.islice(itertools.cycle(list(batches(name))), max(numbers) + 1)):
            with DEVICE.record_operators() as operators:
                step(*batch)
            recorded += [operators] if number in numbers else []
    return recorded


@pytest.mark.long(quick=["mlp-zero(2, level=1)"])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mlp", "solo"),
        ("mlp", "data(2)"),
        ("mlp", "zero(2, level=1)"),
        ("mlp", "pipeline(2)"),
        ("experts", "tensor(2)"),
    ],
)
def test_every_step_launches_the_same_operators_with_the_same_shapes_and_numbers(name, plan):
    first, second = record(name, plan, clip_norm=0.5, nonfinite="skip")
    assert len(first) > 50
    assert first == second


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
def test_tensors_that_graphs_cannot_have_as_inputs_are_refused_by_their_class(plan):
    """The error named a line of this package, and asked to change it."""
    with pytest.raises(PlanError, match=r"are tensors of StandInTensor, into which torch\.compile cannot look"):
        record("mlp", plan, (0,), compile="segments(backend=aot_eager)")


@pytest.mark.long
def test_numbers_of_random_draws_differ_between_steps():
    """The seed of a step is a number of the host, so that a graph with dropout would be compiled again."""
    first, second = record("gpt", "solo")
    assert len(first) == len(second)
    assert first != second
