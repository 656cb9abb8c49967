"""Compiled plans whose loss does not use all outputs: a weight without a gradient is left alone, as in a plain loop."""

from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError
from counterpoint.partitioning.unused_outputs import EagerGradients, find_affected, is_unreached
from counterpoint.testing.device_survey import batches
from tests.training.compile_backend import reset_counter
from tests.training.trainers import state_of

pytestmark = pytest.mark.filterwarnings("ignore")
COMPILED = "segments(backend=aot_eager)"
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": partial(optim.Adam, lr=0.01, weight_decay=0.1),
}
SMALL, LARGE = 6, 512  # weights whose gradients leave the graph, and one of 2 MiB, whose gradient is written inside


class TwoHeads(nn.Module):
    """Returns a prediction and what a second head makes of it."""

    def __init__(self, width=SMALL):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.inner, self.second = nn.Linear(width, width), nn.Linear(width, 4)
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.head(hidden), self.second(torch.tanh(self.inner(hidden)))


@pytest.fixture(name="counter", autouse=True)
def drop_graphs():
    yield reset_counter()
    reset_counter()


def first_loss(outputs, targets):
    return F.cross_entropy(outputs[0], targets)


def both_losses(outputs, targets):
    return first_loss(outputs, targets) + F.cross_entropy(outputs[1], targets)


def plain_loop(model, optimizer, losses):
    params = optimizer(model.parameters())
    for batch, loss in zip(islice(batches("mlp"), len(losses)), losses, strict=True):
        params.zero_grad()
        loss(model(batch[0].double()), batch[1]).backward()
        params.step()
    return state_of(model)


def train(model, optimizer, plan, loss=first_loss, num_steps=3, **options):
    options = {"compile": COMPILED, "unused_parameters": "skip", **options}
    with cp.parallelize(model, optimizer(model.parameters()), loss, strategy=plan, **options) as step:
        for inputs, targets in islice(batches("mlp"), num_steps):
            step(inputs.double(), targets)
    return state_of(model)


@pytest.mark.long(quick=["6-solo-sgd", "6-pipeline(2)-adam", "512-zero(2, level=3)-sgd"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2)", "zero(2, level=3)", "pipeline(2)"])
@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_weight_that_affects_only_unused_outputs_stays_as_it_is(width, plan, optimizer):
    expected = plain_loop(TwoHeads(width), OPTIMIZERS[optimizer], [first_loss] * 3)
    actual = train(TwoHeads(width), OPTIMIZERS[optimizer], plan)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(actual["inner.weight"], TwoHeads(width).inner.weight)


def test_a_missing_gradient_stays_missing_in_the_graphs_of_blocks_before():
    backend = EagerGradients("aot_eager", is_chained=True)
    first = torch.compile(lambda x, weight: x @ weight, backend=backend)
    last = torch.compile(lambda x, inner, weight: (x @ weight, inner.tanh()), backend=backend)
    x, unused, used = (torch.ones(2, 2, requires_grad=number > 0) for number in range(3))
    last(x, first(x, unused), used)[0].sum().backward()
    assert (unused.grad, used.grad is None) == (None, False)
    last(x, first(x, unused), used)[1].sum().backward()
    assert unused.grad is not None


@pytest.mark.parametrize("last", [lambda x: x, lambda x: x.view(-1), lambda x: (x.view(-1), x * 2)])
def test_a_view_of_an_input_has_no_part_in_what_is_unreached(last):
    weight, other = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    compiled = partial(torch.compile, backend=EagerGradients("aot_eager", is_chained=True))
    hidden, _ = compiled(lambda x, y: (x * 2, y.sin()))(weight, other)
    found = []
    results = compiled(last)(hidden)
    hidden.grad_fn.register_prehook(lambda _: found.append(is_unreached(other)))
    (results if isinstance(results, torch.Tensor) else results[0]).sum().backward()
    assert (found, other.grad) == ([True], None)


def test_graphs_of_which_autograd_records_each_operator_are_not_watched():
    x, weight = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    graph, examples = graph_of(lambda x, weight: (x * 2, weight.sin()), x, weight)
    assert EagerGradients("eager", is_chained=True)(graph, examples) == graph.forward


@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=3)"])
def test_weights_that_are_read_as_casts_have_the_bits_of_an_eager_plan(plan):
    """Gathered casts are read by a function of autograd, which made zeros of a missing gradient, too."""
    weights = [train(TwoHeads(), OPTIMIZERS["adam"], plan, precision="bf16", compile=how) for how in (COMPILED, None)]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


class Alternating:
    """A loss that uses the second output in every other step of one rank."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, outputs, targets):
        self.num_calls += 1
        return (first_loss if self.num_calls % 2 else both_losses)(outputs, targets)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_a_weight_is_left_alone_only_in_the_steps_that_do_not_use_it(width):
    expected = plain_loop(TwoHeads(width), OPTIMIZERS["sgd"], [first_loss, both_losses, first_loss])
    actual = train(TwoHeads(width), OPTIMIZERS["sgd"], "solo", Alternating())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", ["solo", "pipeline(2)"])
def test_such_a_weight_is_named_as_unused(plan):
    with pytest.raises(DataError, match=r"no gradient reached inner\.weight, inner\.bias, second\.weight"):
        train(TwoHeads(), OPTIMIZERS["sgd"], plan, unused_parameters="error")


def graph_of(function, *inputs):
    """Return what Dynamo makes of a function, and the inputs."""
    found = []

    def keep(graph, examples):
        found.append((graph, examples))
        return graph

    torch.compile(function, backend=keep)(*inputs)
    return found[0]


def test_outputs_that_autograd_does_not_see_affected_are_not():
    x, weight, other = (torch.ones(2, 2, requires_grad=True) for _ in range(3))

    def compute(x, weight, other):
        return (x @ weight).relu(), (x.detach() @ other).sum(), (x > 0).long()

    affected = find_affected(*graph_of(compute, x, weight, other))
    assert sorted(affected.values(), key=sorted) == [{0}, {0}, {1}]


class PositiveSum(TwoHeads):
    """Returns a prediction and a sum of as many values of a second head as are positive."""

    def forward(self, x):
        first, second = super().forward(x)
        return first, second[second > 0].sum()


@pytest.fixture
def _sizes_may_depend_on_values():
    config = torch._dynamo.config
    before = config.capture_dynamic_output_shape_ops
    config.capture_dynamic_output_shape_ops = True
    yield
    config.capture_dynamic_output_shape_ops = before  # pytest's monkeypatch would delete the option


@pytest.mark.usefixtures("_sizes_may_depend_on_values")
def test_an_unused_output_may_have_sizes_that_depend_on_values():
    expected = plain_loop(PositiveSum(), OPTIMIZERS["sgd"], [first_loss] * 3)
    actual = train(PositiveSum(), OPTIMIZERS["sgd"], "solo", cross_sample="accept")
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_size_that_is_marked_as_dynamic_stays_so():
    x, weight, other = torch.ones(6, 2), *(torch.ones(2, 2, requires_grad=True) for _ in range(2))
    torch._dynamo.mark_dynamic(x, 0)  # torch refuses a graph that is for one size only

    def compute(x, weight, other):
        return (x @ weight).view(x.shape[0] * 2).sum(), (x @ other).sin()

    torch.compile(compute, backend=EagerGradients("aot_eager"), dynamic=False)(x, weight, other)[0].backward()
    assert (weight.grad is None, other.grad) == (False, None)


def test_a_backward_that_raises_leaves_no_weight_without_gradient():
    weight, other = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    first, second = torch.compile(lambda x, y: (x * 2, y.sin()), backend=EagerGradients("aot_eager"))(weight, other)
    found = []

    def fail(_):
        found.append(is_unreached(other))
        raise ValueError("after the hook of the backend")

    handle = first.grad_fn.register_prehook(fail)
    with pytest.raises(ValueError, match="after the hook"):
        first.sum().backward()
    handle.remove()
    other.register_hook(lambda _: found.append(is_unreached(other)))
    (other * 2).sum().backward()  # a graph without hooks of the backend
    second.sum().backward()
    assert found == [True, False, False]
    torch.testing.assert_close(other.grad, 2 + other.cos())
