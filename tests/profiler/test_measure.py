"""What is measured of a model: pieces that add up, memory that stays, and a model that is left as it was."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.model.timing import Timing
from counterpoint.profiler.kept import kept_bytes
from counterpoint.profiler.measure import brought_to, measure
from counterpoint.profiler.roofline import count
from counterpoint.profiler.subject import Subject, set_up
from counterpoint.profiler.watch import Repetition, as_in_training
from counterpoint.runtime.optimizers import Face
from counterpoint.training.profiling import subject_of
from counterpoint.world.cluster import Device

ONCE = Repetition(warm_ups=1, least=1, most=1)
WIDTHS = 8, 16, 4
SLOW = Device(cost_per_s=1.0, memory_bytes_per_s=1e9)


class Residual(nn.Module):
    """A model that has to be traced to be cut, with a buffer and a weight that nobody reads."""

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


def subject(model, targets=4) -> Subject:
    face = Face(partial(optim.SGD, lr=0.1), dict(model.named_parameters()))
    batch = (torch.randn(6, 8),), torch.randn(6, targets)
    return subject_of(model, *batch, loss=F.mse_loss, face=face)


@cache
def timing() -> Timing:
    """Of two linear layers, for two sizes."""
    return measure(subject(layers()), "here", samples=(2, 6), threads=1, effort=ONCE)


def test_every_piece_has_its_times_and_its_bytes():
    assert [point.samples for point in timing().points] == [2, 6]
    assert [(piece.name, piece.weight_bytes) for piece in timing().pieces] == [("0", 576), ("2", 272)]
    assert [piece.output_bytes for piece in timing().points[1].pieces] == [6 * 4 * 16, 6 * 4 * 4]


def test_pieces_add_up_to_what_all_take_in_one_call():
    taken, factor = brought_to([[3.0, 2.0], [5.0, 2.0], [4.0, 4.0]], 1.0, 9.0)
    assert (sum(taken), factor, taken) == (8.0, 2.0, [6.0, 2.0])


@pytest.mark.parametrize(("model", "targets"), [(layers, 4), (Residual, 8)])
def test_a_measured_model_is_as_before(model, targets):
    built = model()
    before, modes = copy.deepcopy(built.state_dict()), [one.training for one in built.modules()]
    measure(subject(built, targets), "here", samples=(4,), threads=1, effort=ONCE)
    assert all(torch.equal(before[name], value) for name, value in built.state_dict().items())
    assert (modes, {param.grad for param in built.parameters()}) == ([one.training for one in built.modules()], {None})


def test_what_stays_for_a_backward_is_what_the_layers_give_and_the_loss_reads():
    bench = set_up(subject(layers()), 6)
    assert kept_bytes(bench.apart, subject(layers()).feed(6, 1)) == [6 * 4 * 16, 6 * 4 * 4]
    assert kept_bytes(bench.whole.compute, subject(layers()).feed(6, 1)) == [6 * 4 * (16 + 4)]


def test_threads_and_random_numbers_are_as_before():
    before, state = torch.get_num_threads(), torch.get_rng_state()
    with as_in_training(before + 1):
        assert torch.get_num_threads() == before + 1
        torch.rand(3)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_at_the_roof_a_layer_takes_its_operations():
    first, last = count(subject(layers()), "slow", SLOW, samples=(6,)).points[0].pieces
    products = 2 * 6 * 8 * 16
    assert first.forward_s == pytest.approx(products, rel=0.1)
    assert first.input_s == 0.0
    assert first.backward_s == pytest.approx(products, rel=0.2)
    assert last.input_s == pytest.approx(2 * 6 * 16 * 4, rel=0.2)


def test_at_the_roof_of_memory_a_layer_takes_its_bytes():
    wide = Device(cost_per_s=1e30, memory_bytes_per_s=1.0)
    first = count(subject(layers()), "narrow", wide, samples=(6,)).points[0].pieces[0]
    linear, relu = 4 * (6 * 8 + 8 * 16 + 16 + 6 * 16), 4 * 2 * 6 * 16
    assert first.forward_s == linear + relu


def test_without_running_the_same_memory_is_seen_to_stay():
    counted = count(subject(layers()), "slow", SLOW, samples=(6,)).points[0]
    assert [piece.kept_bytes for piece in counted.pieces] == [6 * 4 * 16, 6 * 4 * 4]
