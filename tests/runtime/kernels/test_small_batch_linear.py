"""A linear layer's output for few samples is torch's, up to rounding."""

import pytest
import torch
import torch.nn.functional as F

from counterpoint.runtime.kernels import small_batch_linear as module
from counterpoint.runtime.kernels.small_batch_linear import MAX_SAMPLES, small_batch_linear


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("samples", [(1,), (5, 7), (32,), (33,), (MAX_SAMPLES,)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (700, 24), (1030, 13)])
def test_few_samples_give_what_torch_gives(samples, inputs, outputs):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*samples, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(small_batch_linear(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.allclose(small_batch_linear(x, weight, None).double(), exact - bias, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(MAX_SAMPLES + 1, 8), torch.randn(4, 8)),
        (torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)),
        (torch.randn(8, 3).t(), torch.randn(4, 8)),
        (torch.randn(0, 8), torch.randn(4, 8)),
    ],
    ids=["many", "float64", "not contiguous", "none"],
)
def test_all_other_calls_are_torchs(x, weight, monkeypatch):
    monkeypatch.setattr(module, "byref", None)
    assert torch.equal(small_batch_linear(x, weight, None), F.linear(x, weight))


@pytest.mark.usefixtures("one_thread")
def test_operands_that_do_not_fit_are_torchs_error():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        small_batch_linear(torch.randn(2, 7), torch.randn(4, 8), None)
