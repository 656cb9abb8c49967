"""A function on several ranks of this host, and a trainer inside it that finds them by itself."""

import pytest

import counterpoint as cp
from tests.process.forked_ranks import run_forked
from tests.training.trainers import dataset, fit, make_trainer, max_difference, params_of

pytestmark = pytest.mark.process


def train(strategy):
    """What every rank trains: its losses, its weights, and whether it is the one that listens."""
    recorded_steps = []

    class Listener(cp.Callback):
        def on_step(self, event):
            recorded_steps.append(event.step)

    with make_trainer(strategy, callbacks=[Listener()]) as one:
        history = one.fit(dataset(), batch_size=12, eval_dataset=dataset(9))
        metrics = history.evaluations[-1].metrics
        return one.rank, history.losses, params_of(one.model), len(recorded_steps), dict(metrics)


@pytest.mark.long
def test_a_launched_trainer_gives_every_rank_the_weights_and_the_metrics_of_solo():
    expected, history = fit("solo", fit_options={"eval_dataset": dataset(9)})
    result = cp.launch(train, ranks=2, args=["zero(2, level=3)"])
    assert [rank for rank, *_ in result] == [0, 1]
    for _, losses, params, _, metrics in result:
        assert losses == pytest.approx(history.losses, rel=1e-12)
        assert max_difference(params, expected) <= 1e-12
        assert metrics == pytest.approx(history.evaluations[-1].metrics, rel=1e-12)
    assert [recorded_steps for *_, recorded_steps, _ in result] == [4, 0]


def test_a_plan_for_another_number_of_ranks_is_refused_on_all_of_them():
    texts = run_forked(train, ranks=2, args=["data(4)"])
    expected = "PlanError: data(4) needs 4 ranks (data=4), but there are 2; start 4 ranks, or change"
    assert [text.startswith(expected) for text in texts] == [True, True]
