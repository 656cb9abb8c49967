"""Random functions in graphs of torch.compile draw what they draw eagerly, in every step and for every part of a batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from counterpoint.errors import DataError
from counterpoint.model.compilation import Compilation
from counterpoint.partitioning.segment_compiler import SegmentCompiler, with_mode
from counterpoint.runtime.compiled_draws import CompiledMode, write_draws
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.rng.draw_sites import DrawSite, DrawSites
from counterpoint.runtime.rng.sample_rng import SampleRange, SampleRNG
from tests.runtime.test_random_functions import DRAWS

pytestmark = pytest.mark.filterwarnings("ignore")


HEADS = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True, dtype=torch.float64)
UNSEEN = ("rand_like", "randn_like", "randint_like", "normal", "normal of numbers")
"""Functions that torch.compile does not let be replaced."""


def attend(x):
    query = x.view(4, 2, 3, 5)
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.3, is_causal=True)


def attend_with_heads(x):
    tokens = x.view(4, 5, 6)
    return HEADS(tokens, tokens, tokens)[0]


def draw_twice(x):
    return F.dropout(x + 1, 0.2) + torch.rand(x.shape)


def recompute(x):
    return checkpoint(draw_twice, x, use_reentrant=False)


FUNCTIONS = {
    **{name: function for name, function in DRAWS.items() if name not in UNSEEN},
    "attention": attend,
    "multi-head attention": attend_with_heads,
    "two draws": draw_twice,
    "checkpoint": recompute,
    "unflatten": lambda x: F.dropout(x.unflatten(-1, (5, 6)), 0.2),
}


@pytest.fixture(name="reset_dynamo", autouse=True)
def start_without_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_rng(num_sites=2, batch_dim=0):
    return SampleRNG(1, sites=DrawSites({DrawSite("", number): batch_dim for number in range(num_sites)}))


def run_eagerly(function, x, step, first=0):
    rng = make_rng(4)
    rng.begin_microbatch(step, 0, SampleRange(first, len(x), 8))
    with InterceptFunctions(rng.functions):
        return function(x), rng.site.number


def compiled(function, backend="eager"):
    return SegmentCompiler(Compilation("segments", backend), "Model").compile(with_mode(function), "")


def run_compiled(function, x, step, num_draws, first=0):
    rng = make_rng(num_draws)
    rng.begin_microbatch(step, 0, SampleRange(first, len(x), 8))
    mode = CompiledMode(write_draws(rng.list_draws(rng.sites_of(None))))
    output = function(mode, x)
    mode.require_complete()
    return output


@pytest.mark.long(quick=["dropout", "normal_", "multi-head attention"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_draws_what_the_function_draws(name):
    x = torch.linspace(-1, 1, 120, dtype=torch.float64).view(4, 30)
    if name.startswith("bernoulli with"):
        x = x.abs()
    function = compiled(FUNCTIONS[name])
    for step, first in ((0, 0), (1, 4)):
        expected, num_draws = run_eagerly(FUNCTIONS[name], x, step, first)
        assert torch.equal(run_compiled(function, x, step, num_draws, first), expected)
        assert num_draws >= 1


@pytest.mark.parametrize("name", UNSEEN)
def test_functions_that_cannot_be_replaced_are_refused(name):
    with pytest.raises(DataError, match="a compiled forward has 0 draws of random numbers, but 1 on the first batch"):
        run_compiled(compiled(DRAWS[name]), torch.ones(4, 6, dtype=torch.float64), 0, 1)
