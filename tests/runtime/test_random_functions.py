"""Replaced functions draw from the same distributions as torch's, and refuse what torch refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.rng.draw_sites import DrawRecorder, DrawSite, DrawSites
from counterpoint.runtime.rng.random_functions import random_functions
from counterpoint.runtime.rng.sample_rng import SampleRange, SampleRNG

SHAPE = (4, 25_000)
DTYPES = [torch.float32, torch.float64]
DRAWS = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: x.clone().uniform_(-1, 2),
    "randn": lambda x: torch.randn(*x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.clone().normal_(3, 0.5),
    "normal": lambda x: torch.normal(torch.full_like(x, 2.0), 0.5),
    "normal of numbers": lambda x: torch.normal(2.0, 0.5, x.shape, dtype=x.dtype),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli with p": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(torch.full_like(x, 0.3)),
    "randint": lambda x: torch.randint(2, 12, x.shape).to(x.dtype),
    "randint to": lambda x: torch.randint(high=5, size=x.shape).to(x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "dropout": lambda x: F.dropout(x + 1, 0.2),
    "dropout in place": lambda x: F.dropout(x + 1, 0.2, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "dropout1d": lambda x: F.dropout1d((x + 1).view(4, -1, 1), 0.2),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.view(4, -1, 5)),
    "distribution": lambda x: torch.distributions.Normal(x, 2.0).rsample(),
}


def run(function, dtype):
    """Return what a function gives with numbers of samples, and what it gives with torch's."""
    x = torch.zeros(SHAPE, dtype=dtype)
    rng = SampleRNG(1, sites=DrawSites({DrawSite("", number): 0 for number in range(4)}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = function(x)
        rng.begin_microbatch(0, 0, SampleRange(0, len(x), len(x)))
        with InterceptFunctions(rng.functions):
            return function(x), expected, rng.site.number


@pytest.mark.long(quick=["bernoulli-dtype1", "randint-dtype1", "dropout-dtype0", "dropout1d-dtype1"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAWS)
def test_values_have_the_distribution_of_torchs(name, dtype):
    actual, expected, num_draws = run(DRAWS[name], dtype)
    assert num_draws == 1
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    deviation = float(expected.double().std()) / expected.numel() ** 0.5
    assert abs(float(actual.double().mean() - expected.double().mean())) < 6 * deviation
    for q in (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999):
        below = [(values.double() < expected.double().quantile(q)).double().mean() for values in (actual, expected)]
        assert abs(float(below[0] - below[1])) < 0.01


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: F.dropout(x, 1.5),
        lambda x: torch.bernoulli(x + 2),
        lambda x: x.bernoulli_(float("nan")),
        lambda x: x.normal_(0.0, -1.0),
        lambda x: x.uniform_(1.0, 0.0),
        lambda x: x.exponential_(-1.0),
        lambda x: torch.rand(2, dtype=torch.int64),
        lambda x: torch.randint(3, 3, (2,)),
    ],
)
def test_what_torch_refuses_is_refused(refused):
    with pytest.raises((RuntimeError, ValueError)):
        run(refused, torch.float32)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_run_one_by_one_give_what_torch_gives(make):
    """The recorder of draws gives noise of ones."""
    layers = make(3, 4, 3, dropout=0.5, bidirectional=True, batch_first=True).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    layers.eval()
    expected, state = layers(x)
    layers.train()
    with InterceptFunctions(random_functions(DrawRecorder())):
        actual, other_state = layers(x)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-14)
    for mine, theirs in zip(
        *((part,) if isinstance(part, Tensor) else part for part in (other_state, state)), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-14)
