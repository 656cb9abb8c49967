"""Models on the meta device get the same values on any number of ranks, from initializers or files, or are refused."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import CheckpointError, PlanError
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.testing.parity import TOLERANCE
from counterpoint.training.initialization.materialize import LocalSlice, find_runs, materialize
from counterpoint.training.initialization.module_initializers import ModuleInitializers
from tests.process.forked_ranks import run_forked
from tests.training.trainers import max_difference, params_of

WIDTH = 8
SGD = partial(optim.SGD, lr=0.1)


class Scaled(nn.Module):
    """A module without an initializer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.scale


class Positions(nn.Module):
    """A module whose buffer its initializer replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.arange(WIDTH, dtype=torch.float64), persistent=False)

    def reset_parameters(self):
        self.offset = torch.arange(WIDTH, dtype=torch.float64)

    def forward(self, x):
        return x + self.offset


def layers(*others):
    hidden = nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
    norm = nn.LayerNorm(WIDTH), nn.Tanh()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *hidden, *norm, *others, nn.Linear(WIDTH, WIDTH))


def tied():
    model = layers(Positions())
    model[-1].weight = model[0].weight
    return model


def normed():
    return layers(nn.BatchNorm1d(WIDTH))


MODELS = {"tied": tied, "batch norm": normed}


def on_meta(make):
    with torch.device("meta"):
        return make().double()


def batch():
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(8, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)]


def train(model, strategy, **options):
    """Return the weights after three steps; of a model that stays on the meta device, those that ranks gather."""
    step = cp.parallelize(
        model, optim.Adam(model.parameters(), lr=0.01), nn.functional.mse_loss, strategy=strategy, **options
    )
    with step:
        for _ in range(3):
            step(*batch())
        with step.full_weights() as trained:
            return params_of(trained)


def train_on_meta(name, strategies, options):
    """Return the weights of each plan, and where the model is afterwards if it trained on."""
    results = []
    for strategy in strategies:
        model = on_meta(MODELS[name])
        results.append(train(model, strategy, **options))
        step = cp.parallelize(model := on_meta(MODELS[name]), SGD, nn.functional.mse_loss, strategy=strategy, **options)
        with step:
            step(*batch())
        results[-1]["device"] = [float(param.is_meta) for param in model.parameters()]
    return results


PLANS = {
    2: ["data(2)", "zero(2, level=1)", "zero(2, level=3)", "pipeline(2)", "tensor(2)", "tree(2)"],
    4: ["pipeline(2) * zero(2, level=1)", "zero(2, level=3) * data(2)"],
}


@pytest.mark.process
@pytest.mark.long(quick=["tied-2"])
@pytest.mark.parametrize("num_ranks", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_any_plan_train_the_values_of_the_plain_procedure(name, num_ranks):
    options = {"batch_norm": "sync"} if name == "batch norm" else {}
    plans = [plan for plan in PLANS[num_ranks] if name == "tied" or "pipeline" not in plan]
    plain = train(materialize(on_meta(MODELS[name])), "solo", **options)
    for results in run_forked(train_on_meta, ranks=num_ranks, args=[name, plans, options]):
        assert isinstance(results, list), results
        for plan, got in zip(plans, results, strict=True):
            assert all(got.pop("device")), plan
            assert max_difference(got, plain) <= TOLERANCE, plan


@pytest.mark.process
def test_ranks_with_weights_on_disk_train_the_values_of_the_plain_procedure(tmp_path):
    plain = train(materialize(on_meta(tied)), "solo")
    options = {"passes": ("overlap", "offload:params=disk"), "offload_folder": str(tmp_path)}
    for results in run_forked(train_on_meta, ranks=2, args=["tied", ["zero(2, level=3)"], options]):
        assert isinstance(results, list), results
        assert all(results[0].pop("device"))
        assert max_difference(results[0], plain) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["solo", "zero(2, level=3)", "pipeline(2)"])
def test_a_model_gets_its_values_at_once_where_all_ranks_are_here(strategy):
    plain = train(materialize(on_meta(tied)), "solo")
    assert max_difference(train(on_meta(tied), strategy), plain) <= TOLERANCE


def test_the_values_of_a_unit_do_not_depend_on_what_else_is_initialized():
    with torch.device("meta"):
        model = GPT(GPTShape(num_layers=2, width=48, context=8))
    initializers = ModuleInitializers(model, 0)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    together, alone = ({name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(2))
    initializers.write(together)
    for name in reversed(alone):
        initializers.write({name: alone[name]})
    assert all(torch.equal(together[name], alone[name]) for name in shapes)
    assert together["blocks.1.mlp.proj.weight"].std() < together["blocks.1.mlp.fc.weight"].std()


def test_seeds_and_functions_change_the_values_and_generators_stay():
    state = torch.get_rng_state()
    plain, other = (materialize(on_meta(layers), seed=seed)[0].weight for seed in (0, 1))
    ones = materialize(on_meta(layers), init_weights=fill_linear)
    assert not torch.equal(plain, other)
    assert (ones[0].weight == 1).all()
    assert (ones[4].weight == 1).all()  # by the norm's own reset_parameters()
    assert torch.equal(state, torch.get_rng_state())


def fill_linear(module):
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def draw_from_own_generator(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))


def read_values(module):
    if isinstance(module, nn.Linear):
        module.weight.mul_(1 / module.weight.norm().item())


def with_plain_tensor():
    model = layers()
    model[0].mask = torch.ones(2)
    return model


REFUSED = {
    "no initializer": (
        lambda: layers(Scaled()),
        {},
        r"6\.scale is on the meta device.*module '6' \(Scaled\).*weights=",
    ),
    "own generator": (layers, {"init_weights": draw_from_own_generator}, "module '0' draws from a torch.Generator"),
    "reads values": (layers, {"init_weights": read_values}, r"initialization of module '0' \(Linear\) failed"),
    "plain tensor": (with_plain_tensor, {}, r"attribute 0\.mask is a tensor on the meta device"),
    "no function": (layers, {"init_weights": 3}, "init_weights=3 is a int"),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_initialized_is_refused_by_name(make, options, message):
    with pytest.raises(PlanError, match=message):
        cp.parallelize(on_meta(make), SGD, nn.functional.mse_loss, **options)


@pytest.mark.parametrize("name", ["init_weights", "weights"])
def test_values_for_a_model_that_has_some_are_refused(name):
    with pytest.raises(PlanError, match=f"{name} gives values to parameters on the meta device, but Sequential"):
        train(layers(), "solo", **{name: fill_linear if name == "init_weights" else "x"})


def test_a_module_without_initializer_takes_the_function_of_the_user():
    model = materialize(on_meta(lambda: layers(Scaled())), init_weights=fill_scale)
    assert (model[6].scale == 2).all()


def fill_scale(module):
    if isinstance(module, Scaled):
        nn.init.constant_(module.scale, 2.0)


def test_what_has_values_keeps_them():
    model = on_meta(layers)
    model[0] = nn.Linear(WIDTH, WIDTH).double()
    kept = model[0].weight.detach().clone()
    materialize(model)
    assert torch.equal(model[0].weight, kept)


def test_runs_of_a_slice_are_those_of_chunk():
    whole = torch.arange(60).view(3, 5, 4)
    for dim, index, first in ((0, 1, 3), (1, 1, 2), (2, 0, 5)):
        part = whole.chunk(2, dim)[index]
        values = torch.empty(part.numel() - first, dtype=torch.int64)
        for start, offset, count in find_runs((3, 5, 4), LocalSlice(dim, 2, index), first, values.numel()):
            values[offset : offset + count] = whole.reshape(-1)[start : start + count]
        assert torch.equal(values, part.reshape(-1)[first:])


@pytest.fixture
def saved(tmp_path):
    """Return the path of a file with the weights of a model, and the model."""
    torch.manual_seed(1)
    model = tied()
    state = {name: value.double() for name, value in model.double().state_dict().items() if name != "7.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors"), model


@pytest.mark.process
def test_ranks_read_their_shards_of_a_file(saved):
    path, model = saved
    plain = train(model, "solo")
    for results in run_forked(train_on_meta, ranks=2, args=["tied", PLANS[2], {"weights": path}]):
        assert isinstance(results, list), results
        for plan, got in zip(PLANS[2], results, strict=True):
            del got["device"]
            assert max_difference(got, plain) <= TOLERANCE, plan


WRONG_FILES = {
    "missing": ({"0.bias": None}, r"does not have 0\.bias of Sequential \(the nearest name to 0\.bias is"),
    "unexpected": (
        {"0.biass": torch.ones(1)},
        r"has 0\.biass, which Sequential does not have \(the nearest .* 0\.bias",
    ),
    "shape": ({"0.bias": torch.ones(3).double()}, r"has 0\.bias in float64 \(3,\), the model in float64 \(8,\); build"),
    "dtype": ({"0.bias": torch.ones(WIDTH)}, r"has 0\.bias in float32 .* model\.to\(torch\.float32\)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_files_of_another_model_are_refused_by_name(changes, message, tmp_path):
    state = {name: value for name, value in tied().double().state_dict().items() if name != "7.weight"}
    state = {name: value for name, value in {**state, **changes}.items() if value is not None}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        materialize(on_meta(tied), weights=tmp_path)


def test_shards_of_gradients_stay_in_one_place_and_gradients_that_were_read_do_not_change():
    step = cp.parallelize(layers().double(), SGD, nn.functional.mse_loss, strategy="zero(2, level=2)")
    with step:
        step(*batch())
        store = step.local_ranks.ranks[0].interpreter.store
        first, read = shard_places(store), step.gradients()
        kept = {name: grad.clone() for name, grad in read.items()}
        step(*batch())
        assert shard_places(store) == first
        assert all(torch.equal(read[name], grad) for name, grad in kept.items())


def shard_places(store):
    shards = [storage.own_grads.shard for storage in store.flat_params()]
    return [shard.data_ptr() for shard in shards if shard is not None]
