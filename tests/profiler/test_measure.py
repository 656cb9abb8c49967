"""Measuring a model: layers that add up, saved activations, and a model that is not modified."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.model.model_profile import ModelProfile
from counterpoint.profiler.measure import measure_model, rescale_to, saved_activation_bytes
from counterpoint.profiler.profile_target import ProfileTarget, build_harness
from counterpoint.profiler.roofline import estimate_model
from counterpoint.profiler.timer import RepeatPolicy, training_conditions
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.profiling import build_profile_target
from counterpoint.world.cluster import Device

ONCE = RepeatPolicy(num_warmups=1, min_repeats=1, max_repeats=1)
WIDTHS = 8, 16, 4
SLOW = Device(cost_per_s=1.0, memory_bytes_per_s=1e9)


class Residual(nn.Module):
    """A model that has to be traced, with an unused buffer and an unused weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.unread = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x)


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def subject(model, targets=4) -> ProfileTarget:
    optimizer_spec = OptimizerSpec(partial(optim.SGD, lr=0.1), dict(model.named_parameters()))
    batch = (torch.randn(6, 8),), torch.randn(6, targets)
    return build_profile_target(model, *batch, loss=F.mse_loss, optimizer_spec=optimizer_spec)


@cache
def timing() -> ModelProfile:
    """Profile of two linear layers, for two microbatch sizes."""
    return measure_model(subject(layers()), "here", samples=(2, 6), threads=1, repeat_policy=ONCE)


def test_every_layer_has_its_times_and_its_bytes():
    assert [point.samples for point in timing().batch_sizes] == [2, 6]
    assert [(piece.name, piece.weight_bytes) for piece in timing().layers] == [("0", 576), ("2", 272)]
    assert [piece.output_bytes for piece in timing().batch_sizes[1].layers] == [6 * 4 * 16, 6 * 4 * 4]


def test_layers_add_up_to_the_time_of_one_call():
    taken, factor = rescale_to([[3.0, 2.0], [5.0, 2.0], [4.0, 4.0]], 1.0, 9.0)
    assert (sum(taken), factor, taken) == (8.0, 2.0, [6.0, 2.0])


@pytest.mark.long(quick=["layers-4"])
@pytest.mark.parametrize(("model", "targets"), [(layers, 4), (Residual, 8)])
def test_a_measured_model_is_as_before(model, targets):
    built = model()
    before, modes = copy.deepcopy(built.state_dict()), [one.training for one in built.modules()]
    measure_model(subject(built, targets), "here", samples=(4,), threads=1, repeat_policy=ONCE)
    assert all(torch.equal(before[name], value) for name, value in built.state_dict().items())
    assert (modes, {param.grad for param in built.parameters()}) == ([one.training for one in built.modules()], {None})


def test_saved_activations_are_layer_outputs_and_inputs_of_the_loss():
    bench = build_harness(subject(layers()), 6)
    assert saved_activation_bytes(bench.separate, subject(layers()).batches(6, 1)) == [6 * 4 * 16, 6 * 4 * 4]
    assert saved_activation_bytes(bench.whole.executor, subject(layers()).batches(6, 1)) == [6 * 4 * (16 + 4)]


def test_threads_and_random_numbers_are_as_before():
    before, state = torch.get_num_threads(), torch.get_rng_state()
    with training_conditions(before + 1):
        assert torch.get_num_threads() == before + 1
        torch.rand(3)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_at_the_roofline_a_layer_takes_the_time_of_its_operations():
    first, last = estimate_model(subject(layers()), "slow", SLOW, samples=(6,)).batch_sizes[0].layers
    products = 2 * 6 * 8 * 16
    assert first.forward_s == pytest.approx(products, rel=0.1)
    assert first.backward_input_s == 0.0
    assert first.backward_s == pytest.approx(products, rel=0.2)
    assert last.backward_input_s == pytest.approx(2 * 6 * 16 * 4, rel=0.2)


def test_at_the_memory_roofline_a_layer_takes_the_time_of_its_bytes():
    wide = Device(cost_per_s=1e30, memory_bytes_per_s=1.0)
    first = estimate_model(subject(layers()), "narrow", wide, samples=(6,)).batch_sizes[0].layers[0]
    linear, relu = 4 * (6 * 8 + 8 * 16 + 16 + 6 * 16), 4 * 2 * 6 * 16
    assert first.forward_s == linear + relu


def test_fake_tensors_save_the_same_activation_bytes():
    counted = estimate_model(subject(layers()), "slow", SLOW, samples=(6,)).batch_sizes[0]
    assert [piece.saved_bytes for piece in counted.layers] == [6 * 4 * 16, 6 * 4 * 4]
