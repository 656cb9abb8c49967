"""Cross entropy in fewer passes is what torch computes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from counterpoint.fabric.shm.native import native
from counterpoint.runtime.kernels import cross_entropy as module
from counterpoint.runtime.kernels.cross_entropy import FusedCrossEntropyMode

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


def drawn(rows, classes):
    torch.manual_seed(0)
    return (3 * torch.randn(rows, classes)).requires_grad_(), torch.randint(0, classes, (rows,))


def differentiated(scores, targets, **options):
    loss = F.cross_entropy(scores, targets, **options)
    return loss.detach(), *torch.autograd.grad(3 * loss, scores)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 0}], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 2), (7, 37), (33, 16), (4, 4100)])
def test_loss_and_gradient_are_those_of_torch(rows, classes, options):
    scores, targets = drawn(rows, classes)
    exact, exact_gradient = differentiated(scores.double(), targets, **options)
    with FusedCrossEntropyMode():
        loss, gradient = differentiated(scores, targets, **options)
        assert "CrossEntropyBackward" in repr(F.cross_entropy(scores, targets, **options))
    assert torch.allclose(loss.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.allclose(gradient.double(), exact_gradient.double(), rtol=2e-6, atol=1e-6)


def test_without_any_class_the_mean_is_no_number():
    scores, _ = drawn(3, 5)
    with FusedCrossEntropyMode():
        loss, gradient = differentiated(scores, torch.full((3,), -100))
    assert math.isnan(loss)
    assert not gradient.any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_stays_none(wrong):
    scores, targets = drawn(3, 40)
    scores.data[1, 20] = wrong
    with FusedCrossEntropyMode():
        loss, gradient = differentiated(scores, targets)
    assert math.isnan(loss)
    assert gradient[1].isnan().any()
    assert gradient[[0, 2]].isfinite().all()


def test_scores_of_minus_infinity_have_no_part():
    scores, targets = drawn(4, 40)
    scores.data[:, 7] = -math.inf
    targets[:] = 3
    exact, _ = differentiated(scores.double(), targets)
    with FusedCrossEntropyMode():
        loss, gradient = differentiated(scores, targets)
    assert torch.allclose(loss.double(), exact)
    assert not gradient[:, 7].any()


def test_a_target_that_is_no_class_is_torchs_error():
    scores, targets = drawn(4, 5)
    targets[2] = 5
    with FusedCrossEntropyMode(), pytest.raises(IndexError, match="Target 5 is out of bounds"):
        F.cross_entropy(scores, targets)


def test_the_gradient_can_itself_be_differentiated():
    def twice(scores, targets):
        (gradient,) = torch.autograd.grad(F.cross_entropy(scores, targets), scores, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), scores)[0]

    scores, targets = drawn(4, 6)
    expected = twice(scores, targets)
    with FusedCrossEntropyMode():
        assert torch.allclose(twice(scores, targets), expected, atol=1e-7)


@pytest.mark.parametrize(
    "call",
    [
        lambda scores, targets: F.cross_entropy(scores.double(), targets),
        lambda scores, targets: F.cross_entropy(scores.t().contiguous().t(), targets),
        lambda scores, targets: F.cross_entropy(scores, targets, label_smoothing=0.1),
        lambda scores, targets: F.cross_entropy(scores, targets, weight=torch.ones(6)),
        lambda scores, targets: F.cross_entropy(scores, targets, reduction="none").sum(),
        lambda scores, targets: F.cross_entropy(scores, F.one_hot(targets, 6).float()),
        lambda scores, targets: F.cross_entropy(scores.detach(), targets),
    ],
    ids=["float64", "not contiguous", "smoothed", "weighted", "each", "probabilities", "no gradient"],
)
def test_all_other_calls_are_torchs_own(call, monkeypatch):
    monkeypatch.setattr(module, "FusedCrossEntropy", None)
    scores, targets = drawn(4, 6)
    with FusedCrossEntropyMode():
        assert torch.equal(call(scores, targets), call(scores, targets))


def test_a_transformed_call_is_torchs_own():
    scores, targets = drawn(4, 6)
    _, expected = differentiated(scores, targets)
    with FusedCrossEntropyMode():
        found = torch.func.grad(lambda given: 3 * F.cross_entropy(given, targets))(scores.detach())
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of its decompositions
def test_a_call_that_is_differentiated_forwards_is_torchs_own():
    scores, targets = drawn(4, 6)
    with FusedCrossEntropyMode(), forward_ad.dual_level():
        along = forward_ad.make_dual(scores, torch.ones_like(scores))
        assert forward_ad.unpack_dual(F.cross_entropy(along, targets)).tangent.abs() < 1e-6


def test_a_compiled_loss_is_compiled_as_torch_has_it():
    scores, targets = drawn(4, 6)
    loss = torch.compile(lambda *given: F.cross_entropy(*given), backend="eager", fullgraph=True)
    with FusedCrossEntropyMode():
        assert torch.equal(loss(scores, targets), F.cross_entropy(scores.detach(), targets))
