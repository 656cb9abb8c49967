"""A list of optimizers that update parts of one model together."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError
from tests.training.trainers import build_seeded, dataset, max_difference, mlp


def muon_and_adamw(model):
    matrices = [param for param in model.parameters() if param.dim() == 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    return optim.Muon(matrices, lr=0.02), optim.AdamW(vectors, lr=0.01)


def batches():
    inputs, targets = dataset().tensors
    return zip(inputs[:36].split(12), targets[:36].split(12), strict=True)


def train_by_hand():
    model = mlp()
    optimizers = muon_and_adamw(model)
    schedule = optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    for inputs, targets in batches():
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
    return model.state_dict()


@pytest.mark.long(quick=["zero(2, level=1)", "solo", "bsp(2)", "data(2)", "zero3(2)"])
@pytest.mark.parametrize(
    "strategy", ["solo", "data(2)", "zero(2, level=1)", "zero3(2)", "pipeline(2) * data(2)", "bsp(2)"]
)
def test_each_optimizer_updates_its_part_at_its_own_rate(strategy):
    model = mlp()
    optimizers = muon_and_adamw(model)
    schedule = optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    with cp.parallelize(model, list(optimizers), F.cross_entropy, strategy=strategy) as step:
        for batch in batches():
            step(*batch)
            schedule.step()
    assert max_difference(model.state_dict(), train_by_hand()) <= 1e-12


def test_a_checkpoint_has_the_state_of_all_of_them(tmp_path):
    final = {}
    for name, strategies in {"whole": ("solo", "solo"), "parts": ("zero3(2)", "data(2)")}.items():
        for epochs, strategy in enumerate(strategies, 1):
            model = mlp()
            trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=muon_and_adamw(model), strategy=strategy)
            resume = {"resume": tmp_path / name} if epochs > 1 else {}
            with trainer:
                trainer.fit(dataset(24), batch_size=12, epochs=epochs, checkpoint_dir=tmp_path / name, **resume)
        final[name] = model.state_dict()
    assert max_difference(final["parts"], final["whole"]) <= 1e-12


class Residual(nn.Module):
    """An embedding, a pair of layers that tensor parallelism shards, and a head that it leaves whole."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head((x + self.narrow(torch.tanh(self.wide(x)))).mean(1))


def split(model, names, first, second):
    """Return an optimizer of the named weights, and one of the others."""
    chosen = [param for name, param in model.named_parameters() if name in names]
    others = [param for name, param in model.named_parameters() if name not in names]
    return first(chosen), second(others)


OUTSIDE, SHARDED = ("table.weight", "head.weight"), ("wide.weight", "narrow.weight")
ADAMW, SGD = partial(optim.AdamW, lr=0.05), partial(optim.SGD, lr=0.1, momentum=0.9)
TOKENS = torch.arange(96).view(24, 4) * 7 % 10, torch.arange(24) % 3


@pytest.mark.long(quick=["whole-tensor(2)"])
@pytest.mark.parametrize("strategy", ["tensor(2)", "tensor(2) * data(2)"])
@pytest.mark.parametrize(
    ("names", "first"),
    [(("table.weight",), SGD), (SHARDED, SGD), (OUTSIDE, partial(optim.Muon, lr=0.02))],
    ids=["embedding", "sharded", "whole"],
)
def test_under_tensor_parallelism_each_optimizer_of_elements_may_have_shards(names, first, strategy):
    """And one of whole matrices those that are not sharded."""
    model, expected = build_seeded(Residual), build_seeded(Residual)
    mine, plain = (split(one, names, first, ADAMW) for one in (model, expected))
    with cp.parallelize(model, list(mine), F.cross_entropy, strategy=strategy) as step:
        for _ in range(3):
            step(*TOKENS)
            expected.zero_grad()
            F.cross_entropy(expected(TOKENS[0]), TOKENS[1]).backward()
            for optimizer in plain:
                optimizer.step()
        assert step.local_ranks.compiled is not None
        assert any(block.tp for block in step.local_ranks.compiled.model.blocks)
    assert max_difference(model.state_dict(), expected.state_dict()) <= 1e-12
    for found, right in zip(mine, plain, strict=True):
        for index, state in right.state_dict()["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(found.state_dict()["state"][index][key], value, rtol=1e-12, atol=1e-14)


def test_under_tensor_parallelism_an_optimizer_of_whole_matrices_is_refused_for_shards():
    model = build_seeded(Residual)
    optimizers = split(model, SHARDED, optim.Muon, ADAMW)
    text = r"^Muon may need whole tensors, but under tensor\(2\) a rank has only a shard of wide.weight and 1 other, so"
    with (
        cp.parallelize(model, list(optimizers), F.cross_entropy, strategy="tensor(2)") as step,
        pytest.raises(PlanError, match=text),
    ):
        step(*TOKENS)


def test_two_optimizers_of_one_parameter_are_refused():
    model = mlp()
    params = list(model.parameters())
    with pytest.raises(
        PlanError, match=r"SGD and Adam of optimizer=\[...\] both hold a parameter of the shape \(8, 6\)"
    ):
        cp.parallelize(model, [optim.SGD(params, lr=0.1), optim.Adam(params[:1])], F.cross_entropy)


@pytest.mark.parametrize(("optimizers", "text"), [([], "nothing"), ([optim.SGD], "type")])
def test_a_list_of_something_else_is_refused(optimizers, text):
    with pytest.raises(PlanError, match=f"optimizer= is a list with {text} in it; give torch optimizers"):
        cp.parallelize(mlp(), optimizers, F.cross_entropy)
