"""Fused cross entropy gives torch's results."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.fabric.shm.native import native
from counterpoint.runtime.kernels import cross_entropy as module
from counterpoint.runtime.kernels.cross_entropy import fused_cross_entropy
from counterpoint.runtime.kernels.function_mode import InterceptFunctions

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native().library is None, reason="the native part is not built"),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(module, "MIN_LOGITS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fused():
    return InterceptFunctions({F.cross_entropy: fused_cross_entropy})


def random_inputs(rows, classes):
    torch.manual_seed(0)
    return (3 * torch.randn(rows, classes)).requires_grad_(), torch.randint(0, classes, (rows,))


def loss_and_grad(logits, targets, **options):
    loss = F.cross_entropy(logits, targets, **options)
    return loss.detach(), *torch.autograd.grad(3 * loss, logits)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 0}], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 2), (7, 37), (33, 16), (4, 4100)])
def test_loss_and_gradient_are_those_of_torch(rows, classes, options):
    logits, targets = random_inputs(rows, classes)
    exact, exact_gradient = loss_and_grad(logits.double(), targets, **options)
    with fused():
        loss, gradient = loss_and_grad(logits, targets, **options)
        assert "CrossEntropyBackward" in repr(F.cross_entropy(logits, targets, **options))
    assert torch.allclose(loss.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.allclose(gradient.double(), exact_gradient.double(), rtol=2e-6, atol=1e-6)


def test_without_any_target_the_mean_is_nan():
    logits, _ = random_inputs(3, 5)
    with fused():
        loss, gradient = loss_and_grad(logits, torch.full((3,), -100))
    assert math.isnan(loss)
    assert not gradient.any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_and_inf_are_kept(wrong):
    logits, targets = random_inputs(3, 40)
    logits.data[1, 20] = wrong
    with fused():
        loss, gradient = loss_and_grad(logits, targets)
    assert math.isnan(loss)
    assert gradient[1].isnan().any()
    assert gradient[[0, 2]].isfinite().all()


def test_logits_of_minus_infinity_contribute_nothing():
    logits, targets = random_inputs(4, 40)
    logits.data[:, 7] = -math.inf
    targets[:] = 3
    exact, _ = loss_and_grad(logits.double(), targets)
    with fused():
        loss, gradient = loss_and_grad(logits, targets)
    assert torch.allclose(loss.double(), exact)
    assert not gradient[:, 7].any()


def test_a_target_that_is_not_a_class_is_torchs_error():
    logits, targets = random_inputs(4, 5)
    targets[2] = 5
    with fused(), pytest.raises(IndexError, match="Target 5 is out of bounds"):
        F.cross_entropy(logits, targets)


def test_the_gradient_can_itself_be_differentiated():
    def twice(logits, targets):
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, targets), logits, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), logits)[0]

    logits, targets = random_inputs(4, 6)
    expected = twice(logits, targets)
    with fused():
        assert torch.allclose(twice(logits, targets), expected, atol=1e-7)


@pytest.mark.parametrize(
    "call",
    [
        lambda logits, targets: F.cross_entropy(logits.double(), targets),
        lambda logits, targets: F.cross_entropy(logits.t().contiguous().t(), targets),
        lambda logits, targets: F.cross_entropy(logits, targets, label_smoothing=0.1),
        lambda logits, targets: F.cross_entropy(logits, targets, weight=torch.ones(6)),
        lambda logits, targets: F.cross_entropy(logits, targets, reduction="none").sum(),
        lambda logits, targets: F.cross_entropy(logits, F.one_hot(targets, 6).float()),
        lambda logits, targets: F.cross_entropy(logits.detach(), targets),
    ],
    ids=["float64", "not contiguous", "smoothed", "weighted", "each", "probabilities", "no gradient"],
)
def test_all_other_calls_are_torchs(call, monkeypatch):
    monkeypatch.setattr(module, "FusedCrossEntropy", None)
    logits, targets = random_inputs(4, 6)
    with fused():
        assert torch.equal(call(logits, targets), call(logits, targets))


def test_a_transformed_call_is_torchs():
    logits, targets = random_inputs(4, 6)
    _, expected = loss_and_grad(logits, targets)
    with fused():
        result = torch.func.grad(lambda given: 3 * F.cross_entropy(given, targets))(logits.detach())
    assert torch.equal(result, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of its decompositions
def test_a_call_in_forward_mode_is_torchs():
    logits, targets = random_inputs(4, 6)
    with fused(), forward_ad.dual_level():
        along = forward_ad.make_dual(logits, torch.ones_like(logits))
        assert forward_ad.unpack_dual(F.cross_entropy(along, targets)).tangent.abs() < 1e-6


def test_a_compiled_loss_is_compiled_as_torch_has_it():
    logits, targets = random_inputs(4, 6)
    loss = torch.compile(lambda *given: F.cross_entropy(*given), backend="eager", fullgraph=True)
    with fused():
        assert torch.equal(loss(logits, targets), F.cross_entropy(logits.detach(), targets))


class OpNames(TorchDispatchMode):
    """Records which operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 0}], ids=str)
def test_without_gradients_no_matrix_of_log_probabilities_is_made(options):
    logits, targets = random_inputs(33, 16)
    exact = F.cross_entropy(logits.detach().double(), targets, **options)
    with fused(), torch.no_grad(), OpNames() as ops:
        loss = F.cross_entropy(logits, targets, **options)
    assert torch.allclose(loss.double(), exact, rtol=1e-6, atol=1e-6)
    assert not [name for name in ops.names if "softmax" in name]
    assert not loss.requires_grad


def test_a_tensor_without_memory_of_its_own_is_torchs():
    """Its memory was read at address 0."""
    logits, targets = torch.randn(256, 512), torch.zeros(256, dtype=torch.int64)
    with fused(), torch.no_grad():
        found: Any = F.cross_entropy(TwoTensor(logits, logits.clone()), targets)
    assert found.a.item() == F.cross_entropy(logits, targets).item()
