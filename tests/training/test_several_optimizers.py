"""A list of optimizers that update parts of one model together."""

import pytest
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from counterpoint.errors import PlanError
from tests.training.trainers import dataset, max_difference, mlp


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


def test_under_tensor_parallelism_optimizers_of_whole_matrices_are_refused():
    model = mlp()
    with (
        cp.parallelize(model, muon_and_adamw(model), F.cross_entropy, strategy="tensor(2)") as step,
        pytest.raises(PlanError, match="may need whole tensors"),
    ):
        step(*next(batches()))


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
