"""Large batches under a trainer: rates go by the global batch, and LARS and LAMB continue from checkpoints of any plan."""

from functools import partial

import pytest
from torch import optim

import counterpoint as cp
from counterpoint.errors import PlanError
from tests.training.trainers import StopAt, fit, max_difference, mlp

RECIPE = partial(
    cp.large_batch_schedule, batch_size=12, reference_batch_size=3, epochs=2, steps_per_epoch=4, warmup_epochs=1
)
MAKERS = {"lars": partial(cp.LARS, lr=0.5, trust_coefficient=0.02), "lamb": partial(cp.LAMB, lr=1e-2)}


@pytest.mark.long(quick=["data(2)", "solo", "zero(2, level=3)"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "data(4)", "zero(2, level=3)"])
def test_the_learning_rate_of_a_step_does_not_depend_on_the_number_of_ranks(strategy):
    _, history = fit(strategy, epochs=2, lr_scheduler=RECIPE, optimizer=partial(optim.SGD, lr=0.1))
    after = [0.175, 0.25, 0.325, 0.4, 0.34142, 0.2, 0.05858, 0.0]
    assert [step.options["lr"] for step in history.steps] == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"batch_size": 24},
            r"^the scheduler scales .* for global batches of 24 samples, but they have 12; .* the same o",
        ),
        ({"steps_per_epoch": 3}, r"^the scheduler counts 3 steps per epoch, but with batches of 12 samples this data"),
    ],
)
def test_a_schedule_for_another_batch_is_refused_before_the_first_step(changes, text):
    with pytest.raises(PlanError, match=text):
        fit("data(2)", lr_scheduler=partial(RECIPE, **changes))


@pytest.mark.long(quick=["lamb"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_run_with_a_rate_for_each_layer_continues_under_another_plan(name, tmp_path):
    settings = {"optimizer": MAKERS[name], "lr_scheduler": RECIPE, "epochs": 2}
    whole, _ = fit("solo", mlp(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(
            "zero(2, level=2)",
            mlp(),
            fit_options={"checkpoint_dir": tmp_path, "save_every": 2},
            callbacks=[StopAt(3)],
            **settings,
        )
    result, _ = fit("pipeline(2) * data(2)", mlp(), fit_options={"resume": tmp_path}, **settings)
    assert max_difference(result, whole) < 1e-12


def test_a_rate_scaled_with_the_ranks_on_a_resume_is_not_taken_and_said(tmp_path):
    """The global batch is as before: twice the ranks with twice the rate would train at twice the rate."""
    sgd = partial(optim.SGD, lr=0.1)
    fit("data(2)", mlp(), optimizer=sgd, fit_options={"checkpoint_dir": tmp_path})
    with pytest.warns(
        UserWarning, match=r"^the optimizer was made with lr=0.2, but .* has 0.1, which is restored: the gl"
    ):
        _, history = fit("data(4)", mlp(), optimizer=partial(sgd, lr=0.2), epochs=2, fit_options={"resume": tmp_path})
    assert {step.options["lr"] for step in history.steps} == {0.1}
