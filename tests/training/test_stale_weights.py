"""Reads of the model between steps: what a plain loop would read, or an error that says what to do."""

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.training.between_steps.stale_weights import StaleTensor, StaleWeights
from tests.covering import each_value_once
from tests.training.trainers import build_seeded, equal_bits, make_generator, max_difference, state_of

PLANS = ["solo", "data(2)", "zero1(2)", "zero3(2)", "pipeline(2)", "tensor(2)", "server(2)", "tree(2)"]


def net():
    return build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))


def batches(num=3):
    random = make_generator()
    return [
        (torch.randn(8, 4, generator=random, dtype=torch.float64), torch.randint(3, (8,), generator=random))
        for _ in range(num)
    ]


def plain_states():
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        yield model


def planned_states(plan, model=None):
    model = net() if model is None else model
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.5), F.cross_entropy, strategy=plan) as step:
        for batch in batches():
            step(*batch)
            yield model


def averages(states):
    """The running average of the weights, as torch.optim.swa_utils computes it, and what is read in each step."""
    average, read = None, []
    for model in states:
        if average is None:
            average = optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, _: 0.5 * mean + 0.5 * new)
        average.update_parameters(model)
        read.append(float(model[0].weight.detach().norm()))
    return state_of(average), read


READS = {
    "state_dict": lambda model: model.state_dict()["2.weight"],
    "forward": lambda model: model(batches()[0][0]),
    "norm": lambda model: model[2].weight.norm(),
    "data": lambda model: model[2].weight.data,
    "copy": lambda model: copy.deepcopy(model)[2].weight,
    "pickle": lambda model: pickle.loads(pickle.dumps(model))[2].weight,
    "list": lambda model: torch.tensor(model[2].weight.tolist(), dtype=torch.float64),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
}


@pytest.mark.long(quick=["list-server(2)", "vector-tree(2)"])
@pytest.mark.parametrize(("name", "plan"), each_value_once([*READS], PLANS))
def test_a_read_after_each_step_gives_what_a_plain_loop_has(plan, name):
    read = READS[name]
    expected = [read(model).detach().clone() for model in plain_states()]
    found = [read(model).detach().clone() for model in planned_states(plan)]
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.long(quick=["data(2)", "zero1(2)", "zero3(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_averages_of_weights_are_those_of_a_plain_loop(plan):
    (expected, norms), (found, read) = averages(plain_states()), averages(planned_states(plan))
    assert max_difference(found, expected) < 1e-12
    assert read == pytest.approx(norms, rel=1e-12)


@pytest.mark.long(quick=["tensor(2)"])
@pytest.mark.parametrize("plan", PLANS)
def test_reads_do_not_change_what_is_trained(plan):
    model, other = net(), net()
    for _ in planned_states(plan, model):
        float(model[0].weight.detach().sum())
    for _ in planned_states(plan, other):
        pass
    assert max_difference(state_of(model), state_of(other)) < 1e-15


def test_questions_that_read_no_value_load_nothing():
    model = net()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.5), F.cross_entropy, strategy="zero3(2)") as step:
        step(*batches()[0])
        weight = model[0].weight
        assert (weight.shape, weight.dtype, weight.numel(), weight.requires_grad, len(weight)) == (
            (8, 4), torch.float64, 32, True, 8,
        )  # fmt: skip
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, StaleTensor)
        step.optimizer.zero_grad()
        assert isinstance(weight, StaleTensor)
        assert not isinstance(next(step.export_weights().parameters()), StaleTensor)
    assert type(weight) is nn.Parameter


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.layer(self.norm(x))


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)"])
def test_buffers_are_read_after_each_step_as_well(plan):
    model = build_seeded(Counting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = [int(model.norm.num_batches_tracked) for model in planned_states(plan, model)]
    assert counts == [1, 2, 3]


def test_weights_are_plain_after_a_failed_run():
    model = net()

    def failing(outputs, targets):
        if has_failed:
            raise ValueError("broken")
        return F.cross_entropy(outputs, targets)

    has_failed: list[bool] = []
    step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.5), failing, strategy="zero3(2)")
    step(*batches()[0])
    has_failed.append(True)
    with pytest.raises(ValueError, match="broken"):
        step(*batches()[1])
    step.close()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert equal_bits(state_of(model), state_of(next(planned_states("zero3(2)"))))


def test_full_weights_may_be_written_back():
    model = net()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.0), F.cross_entropy, strategy="zero3(2)") as step:
        step(*batches()[0])
        with step.full_weights(writeback=True) as full, torch.no_grad():
            next(full.parameters()).fill_(2.0)
        step(*batches()[1])
    assert bool((model[0].weight == 2.0).all())


def test_a_callback_reads_what_a_loop_reads():
    class Norms(cp.Callback):
        def __init__(self, model):
            self.model, self.read = model, []

        def on_step(self, event):
            self.read.append(float(self.model[0].weight.detach().norm()))

    found = {}
    for plan in ("solo", "zero3(2)"):
        model = net()
        norms = Norms(model)
        data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))
        with cp.Trainer(model, loss=F.cross_entropy, optimizer=sgd, strategy=plan, callbacks=[norms]) as trainer:
            trainer.fit(data, batch_size=8)
        found[plan] = norms.read
    assert found["zero3(2)"] == pytest.approx(found["solo"], rel=1e-12)


def sgd(params):
    return optim.SGD(params, lr=0.5)


def test_a_read_that_needs_other_processes_is_refused():
    layer = nn.Linear(2, 2)
    stale = StaleWeights(dict(layer.named_parameters()), "pipeline(2)", None)
    stale.mark()
    text = (
        "weight of the model is read after a step, but under pipeline(2) this process does not have the trained values; "
        "read them inside `with step.full_weights() as model:`, or after step.export_weights(), which all ranks call"
    )
    for read in (layer.state_dict, lambda: layer(torch.ones(1, 2)), lambda: copy.deepcopy(layer)):
        with pytest.raises(cp.DataError, match=re.escape(text)):
            read()
    stale.unmark()
    assert layer.weight.isfinite().all()


def test_a_buffer_that_is_changed_where_other_processes_have_its_values_can_be_replaced():
    norm = nn.BatchNorm1d(2)
    stale = StaleWeights(dict(norm.named_buffers()), "zero(2, level=3)", None)
    stale.mark()
    text = r"^running_mean of the model is read or changed in place after .* \(model.running_mean = tensor\)$"
    with pytest.raises(cp.DataError, match=text):
        norm.get_buffer("running_mean").mul_(0.5)
    norm.running_mean = torch.ones(2)
    stale.unmark()
    assert torch.equal(norm.running_mean, torch.ones(2))


@pytest.mark.long(quick=["True-zero1(2)", "False-zero2(2)", "False-zero3(2)", "False-tree(2)"])
@pytest.mark.parametrize(
    "plan", ["data(2)", "zero1(2)", "zero2(2)", "zero3(2)", "pipeline(2)", "tree(2)", "server(2, consistency=asp)", "easgd(2)",
             "pipeline(2)*data(2)", "pipeline(2)*zero2(2)"],
)  # fmt: skip
@pytest.mark.parametrize("shared", [True, False])
def test_what_a_rank_of_its_own_process_may_read_is_current(plan, shared):
    """In a process of its own, a rank trains the user's parameters themselves."""
    model = net()
    with cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.5), F.cross_entropy, strategy=plan, share_params_on_host=shared
    ) as step:
        for batch in batches():
            step(*batch)
        ranks = step.local_ranks
        current = {id(tensor) for tensor in ranks.current_tensors()}
        store = next(iter(ranks.ranks.values())).interpreter.store
        read = {name: param.detach().clone() for name, param in store.params.items() if id(param) in current}
        expected = state_of(step.export_weights())
    assert bool(read) == (plan not in {"zero3(2)", "server(2, consistency=asp)", "easgd(2)"})
    assert all(torch.equal(value, expected[name]) for name, value in read.items())


def clamp_data(model):
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)


def assign_vector(model):
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def change_array(model):
    model[0].weight.detach().numpy()[:] *= 0.9


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (clamp_data, r"0.weight and \d other parameters of the model changed between two steps"),
        (assign_vector, r"0.weight and \d other parameters of the model changed between two steps"),
        (change_array, "0.weight of the model changed between two steps"),
        (replace_parameter, "0.weight of the model was replaced by another parameter between two steps"),
    ],
)
def test_changes_that_torch_does_not_count_are_refused(plan, change, message):
    states = planned_states(plan)
    change(next(states))
    with pytest.raises(cp.DataError, match=f"^{message}"):
        next(states)


@pytest.mark.parametrize("plan", ["data(2)", "pipeline(2)"])
def test_they_are_trained_on_if_they_are_written_back(plan):
    model = net()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.5), F.cross_entropy, strategy=plan) as step:
        for batch in batches():
            step(*batch)
            with step.full_weights(writeback=True):
                clamp_data(model)
    alone = net()
    optimizer = optim.SGD(alone.parameters(), lr=0.5)
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(alone(inputs), targets).backward()
        optimizer.step()
        clamp_data(alone)
    assert max_difference(state_of(model), state_of(alone)) < 1e-12
