"""A rank that alone changes something between two steps: an error on all ranks in that step, with ranks and values."""

import os
import re
import time
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.process.forked_ranks import run_forked
from tests.training.trainers import dataset, mlp

pytestmark = pytest.mark.process
X, Y = dataset(12).tensors
PLANS = {"pipeline(2)": 2, "data(2)": 2, "zero3(2)": 2, "pipeline(2) * data(2)": 4}


def partly_frozen():
    """A model whose second layer is frozen, with a module whose mode is read."""
    model = mlp()
    model[1] = nn.Dropout(0.0)
    model[2].requires_grad_(False)
    return model


class Shifted(nn.Module):
    """Adds a buffer, which the user sets between steps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        return self.layer(x) + self.shift


def set_in_place(model):
    model[1].shift.fill_(0.5)


def replace_buffer(model):
    model[1].shift = torch.full_like(model[1].shift, 0.5)


def load(model):
    model.load_state_dict({"1.shift": torch.full_like(model[1].shift, 0.5)}, strict=False)


def freeze(model, optimizer):
    model[0].bias.requires_grad_(False)


def freeze_other(model, optimizer):
    model[0].weight.requires_grad_(False)


def thaw(model, optimizer):
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[2].parameters()]})


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [*model[2].parameters()]})


def set_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.2


def set_mode(model, optimizer):
    model[1].eval()


CHANGES = {
    freeze: "PlanError: between two steps 0.bias was frozen on rank {rank}, but not on all ranks; all ranks train one",
    thaw: "PlanError: between two steps 2.weight and 1 other parameter were made trainable on rank {rank}, but not on all",
    add_group: "PlanError: between two steps the optimizer has 2 groups of parameters instead of 1 on rank {rank}, but not",
    set_rate: "DataError: the ranks were given different values for step 1: lr of the optimizer's group 0 is .* on rank {rank}",
    set_mode: "DataError: the ranks were given different values for step 1: 1.training of the model is .* on rank {rank}",
}


def train(plan, changes):
    """Take three steps; a rank makes its change before the second one. Return the losses, or the error and seconds."""
    model = partly_frozen()
    optimizer = optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    step = cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan)
    losses = [step(X, Y)]
    rank = int(os.environ["RANK"])
    if rank in changes:
        globals()[changes[rank]](model, optimizer)
    began = time.perf_counter()
    try:
        return [*losses, step(X, Y), step(X, Y)]
    except cp.CounterpointError as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - began


@pytest.mark.long(quick=["pipeline(2)-add_group", "zero3(2)-freeze"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_change_on_one_rank_is_named_on_all_of_them_at_once(plan, change):
    """Under a pipeline it was a wait until the timeout; a mode that only one rank had changed was not an error."""
    num_ranks = PLANS[plan]
    changed = (list(PLANS).index(plan) + list(CHANGES).index(change)) % num_ranks
    answers = run_forked(train, ranks=num_ranks, args=(plan, {changed: change.__name__}))
    texts, seconds = zip(*answers, strict=True)
    assert len(set(texts)) == 1
    assert re.match(CHANGES[change].format(rank=changed), texts[0])
    assert max(seconds) < 2


def test_different_changes_on_two_ranks_are_both_named():
    answers = run_forked(train, ranks=2, args=("pipeline(2)", {0: "freeze", 1: "freeze_other"}))
    assert {text for text, _ in answers} == {answers[0][0]}
    assert "0.bias was frozen on rank 0 and 0.weight was frozen on rank 1, but not on all" in answers[0][0]


@pytest.mark.long(quick=["data(2)"])
@pytest.mark.parametrize("plan", ["pipeline(2)", "data(2)"])
def test_a_change_on_all_ranks_is_made(plan):
    answers = run_forked(train, ranks=2, args=(plan, {0: "thaw", 1: "thaw"}))
    model = partly_frozen()
    optimizer = optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    expected = []
    for number in range(3):
        if number == 1:
            thaw(model, optimizer)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in answers:
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


def train_with_buffer(plan, change, imports, changed):
    """Take three steps; some ranks set a buffer before the second one. Return the losses, or the error."""
    model = nn.Sequential(nn.Linear(X.shape[1], 8), Shifted(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel(), dtype=param.dtype).reshape(param.shape))
    step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan)
    losses = [step(X, Y)]
    if imports:
        step.export_weights()
    if int(os.environ["RANK"]) in changed:
        globals()[change](model)
    if imports:
        step.import_weights()
    try:
        return [*losses, step(X, Y), step(X, Y)]
    except cp.CounterpointError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.long
@pytest.mark.parametrize("change", [set_in_place, replace_buffer, load])
@pytest.mark.parametrize(
    ("plan", "imports"), [("data(2)", False), ("data(2)", True), ("zero3(2)", True), ("pipeline(2)", True)]
)
def test_a_buffer_that_one_rank_sets_is_named(plan, change, imports):
    """Ranks trained on with different buffers."""

    def run(*changed):
        return run_forked(train_with_buffer, ranks=2, args=(plan, change.__name__, imports, changed))

    for rank in range(2):
        answers = run(rank)
        assert len(set(answers)) == 1
        assert re.match(
            "DataError: the ranks were given different values for step 1: 1.shift of the model is ", answers[0]
        )
    everyone, unchanged = run(0, 1), run()
    assert everyone[0] == everyone[1]
    assert everyone[0][0] == unchanged[0][0]
    assert everyone[0][1] != unchanged[0][1]


def train_with_written_weights(plan, is_context, changed):
    """Change a weight on some ranks after the first step; return the next loss, or the error."""
    model = mlp()
    step = cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan)
    step(X, Y)
    try:
        with torch.no_grad(), step.full_weights(writeback=True) if is_context else nullcontext(step.export_weights()):
            if int(os.environ["RANK"]) in changed:
                model[0].weight.add_(0.5)
        if not is_context:
            step.import_weights()
        return step(X, Y)
    except cp.CounterpointError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.long(quick=["False-zero3(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "zero2(2)", "zero3(2)", "pipeline(2)"])
@pytest.mark.parametrize("is_context", [False, True])
def test_weights_that_one_rank_writes_back_are_named(plan, is_context):
    def run(*changed):
        return run_forked(train_with_written_weights, ranks=2, args=(plan, is_context, changed))

    for rank in range(2):
        for answer in run(rank):
            assert re.match("DataError: rank 1 would load other values of 0.weight than rank 0, each a part", answer)
    everyone, unchanged = run(0, 1), run()
    assert everyone[0] == everyone[1] != unchanged[0]
