"""Gradients of one batch by power of two: exact, with the loss scale that saves them, and nothing of the model changes."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.profiler.gradient_profile import profile_gradients


def profile_of(model, inputs, loss=lambda out, _: out.sum(), targets=None):
    """Return the profile of a model on some inputs."""
    return profile_gradients(model, inputs, targets, loss=loss, num_samples=len(inputs))


class Weighted(nn.Module):
    """Returns its input; the loss below gives the output's gradient any value."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values):
        """Return the input times one."""
        return values * self.scale


def test_gradients_that_fp16_loses_are_counted_and_the_suggested_scale_saves_them():
    grads = torch.cat([torch.full((31,), 1.5 * 2.0**-28), torch.full((68,), 0.75 * 2.0**-10), torch.tensor([2.0**-6])])
    counted = profile_of(Weighted(), torch.ones(100), loss=lambda out, _: (out * grads).sum())
    activations = counted.total("activations")
    assert (activations.num_nonzero, activations.num_lost()) == (100, 31)
    assert int((grads.half() == 0).sum()) == 31
    scale = 2.0**counted.loss_scale_exponent
    assert activations.num_lost(counted.loss_scale_exponent) == int(((grads * scale).half() == 0).sum()) == 0
    assert (grads * scale).half().isfinite().all()
    assert "without a loss scale loses 30.7 % of the gradients" in counted.recommendation  # with that of the weight
    assert "saves all of them" in counted.recommendation


def test_a_scale_that_cannot_save_the_gradients_is_not_recommended():
    grads = torch.cat([torch.full((50,), 2.0**-45), torch.full((50,), 4.0)])
    counted = profile_of(Weighted(), torch.ones(100), loss=lambda out, _: (out * grads).sum())
    assert counted.total("activations").num_lost(counted.loss_scale_exponent) == 50
    assert counted.recommendation.startswith("use bf16: in fp16 even a scale of 2^")


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1.0, "fp16 loses no gradient of this batch even without a loss scale; a scale of 2^"),
        (0.0, "all gradients are zero"),
        (1e5, "use bf16: gradients reach 2^"),
        (float("inf"), "gradients are infinite or nan before any conversion to fp16"),
    ],
)
def test_the_recommendation_says_what_the_gradients_allow(factor, expected):
    counted = profile_of(nn.Linear(3, 2), torch.ones(4, 3), loss=lambda out, _: factor * out.sum())
    assert expected in counted.recommendation
    assert (counted.to_dict()["loss_scale"] is None) == (factor in {0.0, float("inf")})


def test_outputs_changed_in_place_and_returned_twice_count_as_they_are():
    first, last = nn.Linear(3, 4), nn.Linear(4, 1, bias=False)
    model = nn.Sequential(first, nn.Identity(), nn.ReLU(inplace=True), last)
    inputs = torch.randn(5, 3)
    counted = profile_of(model, inputs).by_kind
    hidden = first(inputs)
    grad = last.weight.expand(5, 4)
    assert counted["activations", "ReLU"].num_values == 20
    assert counted["activations", "ReLU"].num_zeros == int((grad == 0).sum())
    linear = counted["activations", "Linear"]  # of both
    assert (linear.num_values, linear.num_zeros) == (20 + 5, int((hidden <= 0).sum()))
    assert ("activations", "Identity") not in counted


class Stateful(nn.Module):
    """Draws from every generator, counts its calls, changes its parameter and has running statistics."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.net = nn.Sequential(self.linear, nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.calls = 0
        self.seen = []

    def forward(self, values):
        """Return the output times a random factor."""
        self.calls += 1
        self.seen.append(self.calls)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.net(values) * (random.random() + np.random.rand())


def generator_states():
    """Return the states of all global generators."""
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


def test_nothing_of_the_model_changes():
    model, inputs = Stateful(), torch.randn(6, 4)
    model.net[2].eval()
    for param in model.parameters():
        param.grad = torch.full_like(param, 3.0)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    pointers = [param.data_ptr() for param in model.parameters()]
    before, states = copy.deepcopy(model.state_dict()), generator_states()
    counted = profile_of(model, inputs)
    assert counted.total("weights").num_values == sum(param.numel() for param in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(
        param.grad is grad and torch.equal(grad, torch.full_like(grad, 3.0))
        for param, grad in zip(model.parameters(), grads, strict=True)
    )
    assert [param.data_ptr() for param in model.parameters()] == pointers
    assert (model.calls, model.seen, model.net[2].training, model.training) == (0, [], False, True)
    assert generator_states() == states
    assert not any(module._forward_hooks for module in model.modules())


class CountingLoss(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, out, _):
        """Return the scaled mean."""
        self.calls.add_(1)
        return (out * self.temperature).mean()


def test_parameters_of_the_loss_count_and_its_state_stays():
    loss = CountingLoss()
    counted = profile_of(nn.Linear(2, 2), torch.ones(3, 2), loss=loss)
    assert counted.by_kind["weights", "CountingLoss"].num_values == 1
    assert (float(loss.calls), loss.temperature.grad) == (0.0, None)


def test_sparse_and_dense_gradients_of_an_embedding_count_the_same():
    indices = torch.tensor([[0, 3, 3]])
    dense, sparse = (nn.Embedding(10, 2, sparse=sparse) for sparse in (False, True))
    sparse.load_state_dict(dense.state_dict())
    assert profile_of(dense, indices).by_kind == profile_of(sparse, indices).by_kind


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_models_of_other_dtypes_are_counted_in_their_own(dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    counted = profile_of(model, torch.ones(4, 3, dtype=dtype), loss=lambda out, _: out.abs().sum())
    assert counted.dtypes == (str(dtype).removeprefix("torch."),)
    assert counted.total("weights").num_values == 8 * (2 if dtype.is_complex else 1)


def test_gradients_are_counted_without_the_autocast_around():
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert profile_of(model, inputs).dtypes == ("float32",)


def test_checkpointed_modules_count_once_and_reentrant_ones_are_refused():
    class Checkpointed(nn.Sequential):
        is_reentrant: bool

        def forward(self, values):
            return checkpoint(super().forward, values.requires_grad_(), use_reentrant=self.is_reentrant)

    model = Checkpointed(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    model.is_reentrant = False
    plain = nn.Sequential(*model)
    assert profile_of(model, torch.ones(2, 3)).by_kind == profile_of(plain, torch.ones(2, 3)).by_kind
    model.is_reentrant = True
    with pytest.raises(PlanError, match=r"cannot be counted with .*use_reentrant=True.*; pass use_reentrant=False"):
        profile_of(model, torch.ones(2, 3))


def test_a_model_without_gradients_is_refused():
    with pytest.raises(PlanError, match="the model has no trainable parameters, so there are no gradients; set"):
        profile_of(nn.Linear(2, 1).requires_grad_(False), torch.ones(1, 2))
    with pytest.raises(PlanError, match="the loss does not depend on a trainable parameter"):
        profile_of(nn.Linear(2, 1), torch.ones(1, 2), loss=lambda out, _: out.detach().sum())
    with pytest.raises(PlanError, match="cannot be called with 2 positional"):
        profile_gradients(nn.Linear(2, 1), (torch.ones(1, 2),) * 2, loss=lambda out, _: out.sum(), num_samples=1)


@pytest.mark.long(quick=["zero3(2)", "data(2)"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
def test_gradients_between_two_fits_are_counted_and_training_goes_on_as_without(strategy):
    dataset = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    inputs, targets = dataset.tensors
    weights, profiles = [], []
    for is_counted in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with cp.Trainer(model, loss=F.cross_entropy, optimizer=optimizer, strategy=strategy) as trainer:
            trainer.fit(dataset, batch_size=8)
            if is_counted:
                profiles.append(profile_of(model, inputs, F.cross_entropy, targets))
                profiles.append(profile_of(copy.deepcopy(model), inputs, F.cross_entropy, targets))
            trainer.fit(dataset, batch_size=8)
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert profiles[0] == profiles[1]
    assert torch.equal(*weights)
