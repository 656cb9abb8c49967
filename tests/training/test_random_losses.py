"""Random batches, losses and plans: two steps are those of a plain loop to 1e-12, or an error of Counterpoint's.

They are 2,002 examples: 212 for each of 8 plans, and 34 for each of 9 with stages or shards.
"""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import counterpoint as cp
from counterpoint.errors import CounterpointError
from counterpoint.runtime.loss.loss_reduction import compute_plain_loss
from tests.training.trainers import params_of

DTYPE = torch.float64
PLANS = ["solo", "data(2)", "data(3)", "data(2, update=sharded)", "zero1(2)", "zero2(2)", "tree(2)",
         "server(2, consistency=bsp)"]  # fmt: skip
STAGED = ["pipeline(2)", "gpipe(2)", "gpipe(2, replicas=(1,2))", "zero3(2)", "pipeline(2) * data(2)", "gpipe(2) * data(2)",
          "zero_bubble(2)", "tensor(2)", "gpipe(2) * zero1(2)"]  # fmt: skip


@dataclass
class View:
    """Two parts of a batch, with a name."""

    first: object
    second: object
    name: str = "view"


Sides = namedtuple("Sides", "left right")


# ---------------------------------------------------------------------------------------------- nests of inputs

CONSTANTS = st.one_of(
    st.none(), st.booleans(), st.integers(0, 3), st.sampled_from([0.5, 2.0]), st.sampled_from(["a", ""])
)
SHAPES = st.sampled_from([(), (2,), (1, 3)])
"""Of the tensors of a nest after dim 0."""


def containers(parts):
    return st.one_of(
        st.dictionaries(st.sampled_from("xyz"), parts, min_size=1, max_size=3),
        st.lists(parts, min_size=1, max_size=3).map(tuple),
        st.builds(View, parts, parts),
        st.builds(Sides, parts, parts),
        st.lists(parts, min_size=1, max_size=2),
    )


NESTS = st.recursive(st.one_of(SHAPES.map(lambda shape: ("tensor", shape)), CONSTANTS), containers, max_leaves=5)
INPUTS = st.tuples(st.just(("tensor", (2,))), NESTS) | st.fixed_dictionaries(
    {"first": st.just(("tensor", (2,))), "second": NESTS}
)


def is_spec(value):
    return type(value) is tuple and len(value) == 2 and value[0] == "tensor"


def fill(nest, count, generator):
    """Return a nest with tensors of ``count`` samples for their shapes."""
    if is_spec(nest):
        return torch.randn(count, *nest[1], generator=generator, dtype=DTYPE)
    if isinstance(nest, View):
        return View(fill(nest.first, count, generator), fill(nest.second, count, generator), nest.name)
    if isinstance(nest, dict):
        return {key: fill(value, count, generator) for key, value in nest.items()}
    if isinstance(nest, Sides):
        return Sides(*(fill(value, count, generator) for value in nest))
    if isinstance(nest, tuple | list):
        return type(nest)(fill(value, count, generator) for value in nest)
    return nest


class Reader(nn.Module):
    """Reads every part of a nest: tensors by sample, numbers and texts as they are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, first, second):
        total = torch.zeros(len(first), dtype=DTYPE)
        for place, leaf in enumerate(leaves_of(second), 1):
            if isinstance(leaf, torch.Tensor):
                total = total + place * leaf.reshape(len(leaf), -1).mean(1)
            elif leaf is not None:
                total = total + 0.1 * place * (len(leaf) if isinstance(leaf, str) else leaf)
        return torch.tanh(self.layer(first) + total[:, None])


def leaves_of(value):
    if isinstance(value, View):
        return [*leaves_of(value.first), *leaves_of(value.second), value.name]
    return [inner for leaf in tree_leaves(value) for inner in (leaves_of(leaf) if isinstance(leaf, View) else [leaf])]


# ---------------------------------------------------------------------------------------------- losses


def squares(output, targets):
    return ((output - targets["value"]) ** 2).sum(1)


TERMS = {
    "mean": lambda output, targets: squares(output, targets).mean(),
    "sum": lambda output, targets: squares(output, targets).sum(),
    "weighted": lambda output, targets: cp.WeightedMean((squares(output, targets) * targets["weight"]).sum(),
                                                        targets["weight"].sum()),
    "undeclared": lambda output, targets: (squares(output, targets) * targets["weight"]).sum() / targets["weight"].sum(),
    "tokens": lambda output, targets: F.cross_entropy(output, targets["label"]),
    "token_sum": lambda output, targets: F.cross_entropy(output, targets["label"], reduction="sum"),
    "in_batch": lambda output, targets: F.cross_entropy(output @ output.T, torch.arange(len(output))),
    "spread": lambda output, targets: ((output - output.mean(0)) ** 2).mean(),
    "largest": lambda output, targets: output.amax(0).sum(),
    "size": lambda output, targets: cp.WeightedMean(output.abs().sum(), len(output)),
}  # fmt: skip


def scaled(name, factor, output, targets):
    term = TERMS[name](output, targets)
    return cp.WeightedMean(term.total * factor, term.weight) if isinstance(term, cp.WeightedMean) else term * factor


def added(names, output, targets):
    return sum(
        (compute_plain_loss(TERMS[name](output, targets)) for name in names[1:]), TERMS[names[0]](output, targets)
    )


def parts(names, output, targets):
    return {name: TERMS[name](output, targets) for name in names}


NAMES = st.sampled_from(sorted(TERMS))
SEVERAL = st.lists(NAMES, min_size=1, max_size=3, unique=True)
LOSSES = st.one_of(
    NAMES.map(TERMS.__getitem__),
    st.builds(partial, st.just(scaled), NAMES, st.sampled_from([0.5, 1.0])),
    st.builds(partial, st.just(added), SEVERAL),
    st.builds(partial, st.just(parts), SEVERAL),
)
REDUCTIONS = st.sampled_from(["mean", "mean", "sum", "batch"])


# ---------------------------------------------------------------------------------------------- the law


def make_targets(count, generator):
    label = torch.randint(-1, 2, (count,), generator=generator)
    weight = torch.randint(0, 3, (count,), generator=generator).to(DTYPE)
    value = torch.randn(count, 2, generator=generator, dtype=DTYPE)
    return {"value": value, "weight": weight, "label": label.where(label >= 0, -100)}


def call(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def train_plainly(model, loss, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = compute_plain_loss(loss(call(model, inputs), targets))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def require_same_or_refused(build, batches, loss, plan, num_microbatches, reduction):
    """Train by a plan, and by a plain loop if the plan takes it; their losses and weights are the same."""
    model, plain = build(), build()
    try:
        with cp.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy=plan, num_microbatches=num_microbatches,
            loss_reduction=reduction, retain_freed_memory=False,
        ) as step:  # fmt: skip
            losses = [step(inputs, targets) for inputs, targets in batches]
    except CounterpointError:
        return
    expected = train_plainly(plain, loss, batches)
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-12, atol=1e-12), (losses, expected)
    for name, value in params_of(plain).items():
        assert torch.allclose(params_of(model)[name], value, rtol=1e-12, atol=1e-12), name


def build_reader():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Reader().double()


def build_staged():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)).double()


def draw_batches(draw_batch, plan, num_microbatches, sizes, seed):
    """Return two batches: one that is divided equally, and one of any size that is not larger."""
    generator = torch.Generator().manual_seed(seed)
    count = sizes[0] * cp.Plan.parse(plan, num_microbatches=num_microbatches).global_num_microbatches
    counts = count, min(count, sizes[1])
    return [(draw_batch(size, generator), make_targets(size, generator)) for size in counts]


SIZES = st.tuples(st.integers(1, 2), st.integers(1, 6))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=212)
@given(
    nest=INPUTS,
    loss=LOSSES,
    num_microbatches=st.integers(1, 2),
    reduction=REDUCTIONS,
    sizes=SIZES,
    seed=st.integers(0, 9),
)
def test_random_nests_and_losses_train_as_a_plain_loop_or_are_refused(
    plan, nest, loss, num_microbatches, reduction, sizes, seed
):
    batches = draw_batches(partial(fill, nest), plan, num_microbatches, sizes, seed)
    require_same_or_refused(build_reader, batches, loss, plan, num_microbatches, reduction)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", STAGED)
@settings(max_examples=34)
@given(
    loss=LOSSES,
    num_microbatches=st.sampled_from([2, 4]),
    reduction=REDUCTIONS,
    sizes=SIZES,
    seed=st.integers(0, 9),
)
def test_random_losses_train_through_stages_as_in_a_plain_loop_or_are_refused(
    plan, loss, num_microbatches, reduction, sizes, seed
):
    batches = draw_batches(partial(fill, (("tensor", (2,)),)), plan, num_microbatches, sizes, seed)
    require_same_or_refused(build_staged, batches, loss, plan, num_microbatches, reduction)
