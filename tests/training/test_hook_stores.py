"""Losses of what a forward hook keeps, and writes through .data: exact where the model itself runs, else refused."""

import queue
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.partitioning.hook_state import preserve_stores
from tests.training.trainers import build_seeded, dataset, max_difference, params_of

X, Y = dataset(12).tensors
KEPT: dict[str, torch.Tensor] = {}
SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Saver:
    """An object that is a hook."""

    def __init__(self):
        self.out: Any = None

    def __call__(self, _module, _inputs, output):
        self.out = output

    def save(self, module, inputs, output):
        self(module, inputs, output)


def save_globally(_module, _inputs, output):
    KEPT["out"] = output


def save_in(store, _module, _inputs, output):
    store.append(output)


def hook_and_reader(kind: str) -> tuple[Any, Callable[[], Any]]:
    """Return a hook, and what reads the value that it has kept last."""
    if kind == "global":
        return save_globally, lambda: KEPT["out"]
    if kind in {"object", "method"}:
        saver = Saver()
        return saver if kind == "object" else saver.save, lambda: saver.out
    store: list[torch.Tensor] = []
    if kind == "partial":
        return partial(save_in, store), lambda: store[-1]
    last: Any = None

    def rebind(_module, _inputs, output):
        nonlocal last
        last = output

    return rebind, lambda: last


def train(kind, plan, num_microbatches=1, *, how="loss"):
    model = build_seeded(Net)
    hook, read = hook_and_reader(kind)
    model.first.register_forward_hook(hook)

    def loss(output, targets):
        extra = read().square().mean() if how == "loss" else 0.0
        return F.cross_entropy(output, targets) + extra

    if plan == "plain":
        optimizer = SGD(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(X), Y).backward()
            optimizer.step()
        return params_of(model)
    with cp.parallelize(model, SGD, loss, strategy=plan, num_microbatches=num_microbatches) as step:
        for _ in range(2):
            step(X, Y)
    return params_of(model)


KINDS = ["global", "object", "method", "partial", "rebind"]


@pytest.mark.long(quick=["method"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_keeps_is_read_where_the_model_runs_and_refused_where_a_part_of_it_does(kind):
    """Under zero3 and pipelines, losses and gradients were others, without a word."""
    assert max_difference(train(kind, "solo", 2), train(kind, "plain")) < 1e-12
    for plan in ("zero3(2)", "pipeline(2)"):
        with pytest.raises(PlanError, match="a forward hook of module 'first' keeps a differentiable value, but under"):
            train(kind, plan)


@pytest.mark.parametrize("kind", ["object", "method", "partial"])
def test_objects_that_are_hooks_are_copied_with_the_model(kind):
    with pytest.raises(
        PlanError, match="a forward hook of module 'first' keeps a differentiable value, but under data"
    ):
        train(kind, "data(2)")


@pytest.mark.parametrize("kind", ["global", "rebind"])
def test_functions_are_not(kind):
    assert max_difference(train(kind, "data(2)"), train(kind, "plain")) < 1e-12


def test_a_value_without_a_gradient_may_be_kept_but_is_not_in_a_trace():
    """It was that of a run before the first step."""
    model, expected, kept = build_seeded(Net), build_seeded(Net), []
    model.first.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach()))
    with (
        cp.parallelize(model, SGD, F.cross_entropy, strategy="pipeline(2)") as step,
        pytest.warns(UserWarning, match="hook of module 'first' keeps what it sees, but under .* calls no hooks"),
    ):
        step(X, Y)
    assert not kept
    optimizer = SGD(expected.parameters())
    F.cross_entropy(expected(X), Y).backward()
    optimizer.step()
    assert max_difference(params_of(model), params_of(expected)) < 1e-12


class Chain(Net):
    """Counts samples in a list of a dict by layer, and in a queue of a fixed length."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.by_layer: list[Any] = [defaultdict(list), deque(maxlen=99)]
        lists, queue = self.by_layer
        self.first.register_forward_hook(lambda _module, _inputs, output: lists["first"].append(len(output)))
        self.second.register_forward_pre_hook(lambda _module, inputs: queue.append(len(inputs[0])))

    def forward(self, x):
        return self.last(super().forward(x))


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 1), ("solo", 3), ("data(2)", 1), ("zero2(2)", 2)])
def test_hooks_keep_what_training_has_shown_them_and_no_more(plan, num_microbatches):
    """Lists had an entry for each run that has inspected the model before the first step, some with other values."""
    model = build_seeded(Chain)
    lists, queue = model.by_layer
    calls = []
    with cp.parallelize(model, SGD, F.cross_entropy, strategy=plan, num_microbatches=num_microbatches) as step:
        for _ in range(3):
            step(X, Y)
            calls.append((list(lists["first"]), list(queue)))
            lists.clear()
            queue.clear()
    assert calls[0] == calls[1] == calls[2]


class Averaging(Net):
    """Averages what it sees in a tensor, and counts in an object of an object."""

    def __init__(self):
        super().__init__()
        self.mean, counts = torch.zeros(8, dtype=torch.float64), SimpleNamespace(inner=SimpleNamespace(calls=0))
        mean, self.counts = self.mean, counts

        def average(_module, _inputs, output):
            mean.lerp_(output.detach().mean(0), 0.1)
            counts.inner.calls += 1

        self.first.register_forward_hook(average)


def test_tensors_and_nested_objects_of_hooks_are_those_of_a_plain_loop():
    """Runs that inspect the model had changed them, too."""
    model, expected = build_seeded(Averaging), build_seeded(Averaging)
    with cp.parallelize(model, SGD, F.cross_entropy, strategy="solo", num_microbatches=1) as step:
        for _ in range(3):
            step(X, Y)
    optimizer = SGD(expected.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(expected(X), Y).backward()
        optimizer.step()
    assert model.counts.inner.calls == 3
    assert (model.mean - expected.mean).abs().max() < 1e-12


class Decaying(Net):
    """Writes to a buffer through ``.data``."""

    scale: torch.Tensor

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        if self.how == "assign":
            self.scale.data = self.scale.data * 0.9
        else:
            self.scale.data.copy_(self.scale * 0.9)
        return self.second(torch.tanh(self.first(x)) * self.scale)


@pytest.mark.parametrize("how", ["assign", "copy"])
def test_a_write_through_data_is_exact_in_a_whole_model_and_refused_in_a_trace(how):
    result = []
    for plan in ("solo", "data(2)"):
        model = build_seeded(partial(Decaying, how))
        with cp.parallelize(model, SGD, F.cross_entropy, strategy=plan) as step:
            losses = [step(X, Y) for _ in range(2)]
        result.append({**params_of(model), "scale": model.scale, "losses": torch.tensor(losses)})
    assert max_difference(*result) < 1e-12
    with (
        cp.parallelize(build_seeded(partial(Decaying, how)), SGD, F.cross_entropy, strategy="pipeline(2)") as step,
        pytest.raises(PlanError, match=r"tracing the model stopped in .* writes to a tensor through .data, .*copy_"),
    ):
        step(X, Y)


def test_what_threads_share_is_not_restored():
    """A thread that has taken values of a queue would find them again, and count them as done twice."""
    values: queue.Queue[int] = queue.Queue()
    kept: list[int] = []

    def hook(*_):
        values.put(1)
        kept.append(1)

    with preserve_stores(hook):
        hook()
    assert (values.qsize(), kept) == (1, [])
