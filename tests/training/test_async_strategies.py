"""What the trainer does with a server that does not wait: nothing equals solo, and all of it can be repeated."""

from functools import partial

import pytest
import torch.nn.functional as F
from torch import optim

from counterpoint.data.sampler import Sampler
from tests.training.trainers import StopAt, dataset, equal_bits, fit, make_trainer, max_difference, mlp, params_of

ASP = ["asp(2)", "asp(2, servers=2)", "asp(4)", "data(2) * asp(2)"]
SGD = partial(optim.SGD, lr=0.1)


@pytest.mark.long(quick=["asp(4)"])
@pytest.mark.parametrize("strategy", ASP)
def test_a_run_repeats_itself_in_one_process(strategy):
    (mine, history), (again, repeated) = fit(strategy), fit(strategy)
    assert equal_bits(mine, again)
    assert history.losses == repeated.losses


@pytest.mark.long(quick=["asp(2)"])
@pytest.mark.parametrize("strategy", ASP)
def test_it_learns(strategy):
    """The samples can be distinguished by their sum, so that there is something to learn."""
    data = dataset(48)
    data.tensors[1][:] = (data.tensors[0].sum(-1) > 0).long()
    _, history = fit(strategy, data=data, epochs=12, fit_options={"eval_dataset": data})
    losses = [event.metrics["loss"] for event in history.evaluations]
    assert losses[-1] < 0.6 * losses[0]


def test_a_step_is_the_first_workers_own_part_of_the_batch():
    _, history = fit("asp(2)")
    assert [step.num_samples for step in history.steps] == [6, 6, 6, 6]


def test_the_model_has_the_servers_weights_afterwards():
    with make_trainer("asp(2)") as one:
        one.fit(dataset(), batch_size=12)
        served = one.local_ranks.ranks[2].interpreter.store.params
        assert equal_bits(params_of(one.model), {name: param.detach() for name, param in served.items()})
        assert len(one.local_ranks.ranks[2].interpreter.state.push_log) == 8


def test_two_workers_that_push_one_after_the_other_are_two_steps_on_half_the_batch():
    """Plain SGD, one step: both gradients are taken at the first weights, each the mean over its own half."""
    one = dataset(12)
    result, _ = fit("asp(2)", data=one, optimizer=SGD)
    model = mlp()
    positions = Sampler(12, 12).batch(0, 0)
    start = params_of(model)
    moved = {name: value.clone() for name, value in start.items()}
    for half in (positions[:6], positions[6:]):
        gradients = gradients_of(model, *(tensor[half] for tensor in one.tensors))
        for name, gradient in gradients.items():
            moved[name] -= 0.1 * gradient
    assert max_difference(result, moved) <= 1e-12


def gradients_of(model, inputs, targets):
    model.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.long(quick=["asp(2, servers=2)"])
@pytest.mark.parametrize("strategy", ASP[:2])
def test_an_interrupted_run_continues_bit_for_bit(strategy, tmp_path):
    """A checkpoint is a moment at which all workers fetch the newest weights, so that both runs save at the same."""
    saving = {"save_every": 2, "epochs": 2}
    with make_trainer(strategy) as one:
        one.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path / "a", **saving)
    with pytest.raises(KeyboardInterrupt), make_trainer(strategy, callbacks=[StopAt(2)]) as two:
        two.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path / "b", **saving)
    with make_trainer(strategy) as three:
        three.fit(dataset(), batch_size=12, checkpoint_dir=tmp_path / "b", resume=tmp_path / "b", **saving)
    assert equal_bits(params_of(three.model), params_of(one.model))
