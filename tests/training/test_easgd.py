"""What the trainer does with workers that are drawn to a center, or fetch weights now and then."""

import pytest
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from tests.training.trainers import StopAt, dataset, equal_bits, fit, make_trainer, mlp, params_of

CENTERED = [
    "easgd(2, alpha=0.25, tau=2)",
    "easgd(2, servers=2, alpha=0.5, tau=1)",
    "data(2) * easgd(2, alpha=0.5, tau=3)",
]
RARE = ["asp(2, pull_every=2)", "asp(2, compress=twobit:0.05)", "bsp(2, compress=topk:0.1)", "ssp(2)"]


@pytest.mark.long(quick=["easgd(2, servers=2, alpha=0.5, tau=1)"])
@pytest.mark.parametrize("strategy", CENTERED)
def test_the_model_is_the_center_and_evaluations_change_no_worker(strategy):
    measured, _ = fit(strategy, epochs=2, fit_options={"eval_dataset": dataset(7), "evaluate_every": 1})
    plain, _ = fit(strategy, epochs=2)
    assert equal_bits(measured, plain)
    with make_trainer(strategy) as one:
        one.fit(dataset(), batch_size=12)
        stores = [rank.interpreter.store for rank in one.local_ranks.ranks.values()]
        center = {name: value for store in stores[-1:] for unit in store.units for name, value in unit_of(store, unit)}
        assert all(params_of(one.model)[name].equal(value) for name, value in center.items())


def unit_of(store, unit):
    return [(name, param.detach()) for name, param in store.units[unit].params.items()]


@pytest.mark.long(quick=["easgd(2, servers=2, alpha=0.5, tau=1)"])
@pytest.mark.parametrize("strategy", [*CENTERED, *RARE])
def test_an_interrupted_run_continues_bit_for_bit(strategy, tmp_path):
    """Saved in the middle of a period: every worker's weights and optimizer state, the center, and what is unsent."""
    saving = {"save_every": 3, "epochs": 2}
    with make_trainer(strategy) as one:
        one.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path / "a", **saving)
    with pytest.raises(KeyboardInterrupt), make_trainer(strategy, callbacks=[StopAt(3)]) as two:
        two.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path / "b", **saving)
    with make_trainer(strategy) as three:
        three.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path / "b", resume=tmp_path / "b", **saving)
    assert equal_bits(params_of(three.model), params_of(one.model))


def test_another_plan_continues_from_the_center(tmp_path):
    with make_trainer("easgd(2, alpha=0.5, tau=2)") as one:
        one.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path)
    with make_trainer("data(2)") as two:
        two.fit(dataset(), batch_size=12, resume=tmp_path)
        assert equal_bits(params_of(two.model), params_of(one.model))


@pytest.mark.long(quick=["asp(2, pull_every=3)"])
@pytest.mark.parametrize("strategy", ["easgd(2, alpha=0.5, tau=2)", "ssp(2)", "asp(2, pull_every=3)"])
def test_it_learns(strategy):
    """The samples can be distinguished by their sum, so that there is something to learn."""
    data = dataset(48)
    data.tensors[1][:] = (data.tensors[0].sum(-1) > 0).long()
    _, history = fit(strategy, data=data, epochs=12, fit_options={"eval_dataset": data})
    losses = [event.metrics["loss"] for event in history.evaluations]
    assert losses[-1] < 0.7 * losses[0]


def test_downpour_warns_of_an_optimizer_that_is_not_adagrad():
    def make(optimizer, strategy="downpour(2)"):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=optimizer, strategy=strategy).close()

    with pytest.warns(RuntimeWarning, match="downpour is published with Adagrad on its servers, and this run has SGD"):
        make(optim.SGD)
    make(optim.Adagrad)
    make(optim.SGD, "asp(2)")
