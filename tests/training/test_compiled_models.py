"""Models that were compiled with torch.compile: they stay compiled, with the same numbers, or are refused by name."""

import re
from functools import partial
from itertools import islice, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.testing.device_survey import batches

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 4


class CountingBackend:
    """A backend of torch.compile that counts graphs and their calls."""

    def __init__(self):
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph, _):
        self.num_graphs += 1

        def call(*args):
            self.num_calls += 1
            return graph(*args)

        return call


@pytest.fixture(name="backend")
def counting_backend():
    torch._dynamo.reset()
    yield CountingBackend()
    torch._dynamo.reset()


def make_gpt(dropout=0.0):
    torch.manual_seed(0)
    return GPT(GPTShape(num_layers=2, width=8, head_dim=4, context=4, num_tokens=11, dropout=dropout))


def compiled(model, how, backend):
    """Return the model with a part of it compiled."""
    if how == "wrapped":
        return torch.compile(model, backend=backend)
    for module in [model] if how == "in place" else model.blocks:
        module.compile(backend=backend)
    return model


def token_loss(output, targets):
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def train(model, plan="solo", **options):
    """Return the losses of a few steps."""
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, token_loss, strategy=plan, timeout_s=20.0, **options) as step:
        return [float(step(*batch)) for batch in islice(batches("gpt"), NUM_STEPS)]


@pytest.mark.long(quick=["1-blocks", "1-wrapped"])
@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_whole_model_stays_compiled(how, num_microbatches, backend):
    losses = train(compiled(make_gpt(), how, backend), num_microbatches=num_microbatches)
    expected = train(make_gpt(), num_microbatches=num_microbatches)
    assert losses == pytest.approx(expected, rel=1e-6)
    num_modules = 2 if how == "blocks" else 1
    # equal blocks share one; the first microbatch of several is run by a mode that looks for losses in the model
    assert backend.num_graphs <= num_microbatches
    num_checks = num_microbatches - 1  # of the first microbatch of several, which runs once more
    assert backend.num_calls == (NUM_STEPS * num_microbatches + num_checks) * num_modules


def test_children_of_a_sequential_stay_compiled_in_the_stages_of_a_pipeline(backend):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
    blocks = nn.Sequential(*(Block(child) for child in model))
    for block in blocks:
        block.compile(backend=backend)
    x, y = torch.randn(4, 8), torch.randint(8, (4,))
    step = cp.parallelize(blocks, optim.SGD(blocks.parameters(), lr=0.1), F.cross_entropy, strategy="pipeline(2)")
    with step:
        losses = [float(step(x, y)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert backend.num_calls >= 3 * 4 * step.local_ranks.global_num_microbatches


@pytest.mark.parametrize("path", ["", "1"])
@pytest.mark.parametrize("plan", ["pipeline(2)", "zero(2, level=3)"])
def test_a_compiled_sequential_whose_children_ranks_call_is_refused(plan, path, backend):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))
    model.get_submodule(path).compile(backend=backend)
    step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan)
    text = (
        f"{repr(path) if path else 'Sequential'} is compiled with torch.compile, but under {plan} ranks call its child"
    )
    with step, pytest.raises(cp.PlanError, match=re.escape(text)):
        step(torch.randn(4, 8), torch.randint(0, 8, (4,)))


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.long(quick=["data(2)-...", "solo-..."])
@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])
@pytest.mark.parametrize(
    ("plan", "dropout", "text"),
    [
        ("pipeline(2)", 0.0, "but under pipeline(2) ranks run the operations of a trace of the model, which is not "),
        ("zero(2, level=3)", 0.0, "ranks run the operations of a trace of the model, which is not compiled; drop "),
        (
            "data(2)",
            0.0,
            "ranks train copies of the model, and copies are not compiled; drop .compile() and torch.comp",
        ),
        ("solo", 0.2, "but the model draws random numbers in training, which ranks key by sample, and which"),
    ],
)
def test_what_would_run_without_compilation_is_refused(how, plan, dropout, text, backend):
    model = compiled(make_gpt(dropout), how, backend)
    name = "'blocks.0'" if how == "blocks" else "GPT"
    with pytest.raises(cp.PlanError, match=f"{name} is compiled with torch.compile.*{re.escape(text)}"):
        train(model, plan)
    assert not backend.num_calls


@pytest.mark.long
def test_the_remedies_train(backend):
    assert train(make_gpt(0.2), "pipeline(2)", compile="segments(backend=eager)")
    assert train(compiled(make_gpt(0.0), "in place", backend))


@pytest.mark.long(quick=["bf16(autocast=true)"])
@pytest.mark.parametrize("precision", ["bf16", "bf16(autocast=true)"])
def test_a_wrapped_model_computes_in_a_precision(precision, backend):
    losses = train(compiled(make_gpt(), "wrapped", backend), precision=precision)
    assert losses == pytest.approx(train(make_gpt(), precision=precision), rel=1e-2)
    assert backend.num_calls == NUM_STEPS


def test_casts_of_a_model_that_was_compiled_in_place_are_refused(backend):
    text = "GPT is compiled by its method compile(), but precision=bf16 casts parameters in hooks, which torch.compile"
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        train(compiled(make_gpt(), "in place", backend), precision="bf16")
    assert train(compiled(make_gpt(), "in place", backend), precision="bf16(autocast=true)")


BACKEND = CountingBackend()
"""Of the functions below, which are compiled where their classes are defined."""


@torch.compile(backend=BACKEND)
def activation(x):
    return torch.tanh(x) * 2


class CallsFunction(nn.Module):
    """Calls a compiled function from a method that its forward calls."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(8, 12), nn.Dropout(dropout), nn.Linear(12, 4)

    def forward(self, x):
        return self.second(self.dropout(self.hidden(x)))

    def hidden(self, x):
        return activation(self.first(x))


class DecoratedForward(nn.Linear):
    @torch.compile(backend=BACKEND)
    def forward(self, x):
        return super().forward(x)


class DecoratedMethod(nn.Linear):
    @torch.compile(backend=BACKEND)
    def inner(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.inner(x)


def replaced_forward():
    model = nn.Sequential(nn.Linear(8, 4))
    vars(model)["forward"] = torch.compile(model.forward, backend=BACKEND)
    return model


HOW_CALLED = {
    "function": CallsFunction,
    "decorated forward": lambda: DecoratedForward(8, 4),
    "decorated method": lambda: DecoratedMethod(8, 4),
    "replaced forward": replaced_forward,
}


def train_functions(make, plan, **options):
    """Return the losses of six steps, and how often graphs were called in each."""
    torch._dynamo.reset()
    BACKEND.num_calls = 0
    torch.manual_seed(0)
    model, draw = make(), torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=draw), torch.randint(4, (8,), generator=draw)
    calls, losses = [0], []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, timeout_s=20.0, **options) as step:
        for _ in range(6):
            losses.append(float(step(x, y)))
            calls.append(BACKEND.num_calls)
    return losses, [after - before for before, after in pairwise(calls)]


@pytest.mark.parametrize(
    ("how", "plan", "options"),
    [
        *((how, "solo", {}) for how in HOW_CALLED),
        *((how, "solo", {"num_microbatches": 2}) for how in HOW_CALLED),
        ("decorated forward", "solo", {"precision": "bf16"}),
        ("replaced forward", "solo", {"precision": "bf16(autocast=true)"}),
        ("function", "data(2)", {}),
        ("decorated method", "zero(2, level=1)", {}),
        ("function", "server(2)", {"precision": "bf16"}),
    ],
)
def test_compiled_functions_and_methods_stay_compiled(how, plan, options):
    """Dry runs under dispatch modes made Dynamo give up, and all steps but the first ran without compilation."""
    losses, calls = train_functions(HOW_CALLED[how], plan, **options)
    num_microbatches = 2 if options.get("num_microbatches") or plan != "solo" else 1
    assert calls[1:] == [num_microbatches] * 5
    with torch.compiler.set_stance("force_eager"):
        assert losses == pytest.approx(train_functions(HOW_CALLED[how], plan, **options)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("make", "plan", "text"),
    [
        (
            CallsFunction,
            "pipeline(2)",
            "CallsFunction calls activation, which is compiled with torch.compile, but under",
        ),
        (CallsFunction, "zero(2, level=3)", "ranks run the operations of a trace of the model, which is not compiled"),
        (
            partial(CallsFunction, 0.5),
            "solo",
            "calls activation, which is compiled with torch.compile, but the model dr",
        ),
        (partial(CallsFunction, 0.5), "data(2)", "or set dropout to 0"),
        (
            HOW_CALLED["decorated method"],
            "tensor(2)",
            "calls DecoratedMethod.inner, which is compiled with torch.compi",
        ),
        (HOW_CALLED["decorated forward"], "data(2)", "DecoratedForward is compiled with torch.compile, but under data"),
        (replaced_forward, "zero(2, level=1)", "ranks train copies of the model, and copies are not compiled; drop"),
        (
            replaced_forward,
            "pipeline(1)",
            "Sequential is compiled with torch.compile, but under pipeline(1) ranks call",
        ),
    ],
)
def test_compiled_functions_that_would_run_without_compilation_are_refused(make, plan, text):
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        train_functions(make, plan)


def test_a_function_that_is_compiled_is_part_of_the_graphs_of_the_plan():
    losses, calls = train_functions(partial(CallsFunction, 0.5), "pipeline(2)", compile="segments(backend=eager)")
    expected, _ = train_functions(partial(CallsFunction, 0.5), "solo", compile="segments(backend=eager)")
    assert losses == pytest.approx(expected, rel=1e-6)
    assert not any(calls[1:])
