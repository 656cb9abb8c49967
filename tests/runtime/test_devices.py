"""The device of a model: which plans may use it, and what is read from it when."""

import pytest
import torch
from counterpoint.runtime.devices import (
    PendingScalars,
    model_device,
    preserve_rng,
    require_single_process,
    to_device,
)
from torch import nn

from counterpoint.errors import PlanError

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_model_on_two_devices_is_refused_and_both_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(PlanError, match=r"2 devices: 0\.weight on cpu, 1\.weight on meta; move the whole model"):
        model_device(model)


def test_a_buffer_counts_for_the_device_too():
    model = nn.BatchNorm1d(2)
    model.running_mean = torch.zeros(2, device="meta")
    with pytest.raises(PlanError, match="running_mean on meta"):
        model_device(model)


def test_a_model_without_tensors_is_on_the_cpu():
    assert model_device(nn.ReLU()) == CPU


def test_ranks_in_several_processes_need_host_memory():
    require_single_process(CPU, 1, 2)
    require_single_process(META, 2, 2)
    with pytest.raises(PlanError, match=r"on meta, but ranks in several processes .*model\.cpu\(\)"):
        require_single_process(META, 1, 2)


def test_only_the_tensors_of_a_batch_are_moved():
    moved = to_device({"x": (torch.ones(2), "text"), "n": 3}, META)
    assert moved["x"][0].device == META
    assert (moved["x"][1], moved["n"]) == ("text", 3)


def test_pending_scalars_are_read_once():
    pending = PendingScalars(CPU)
    pending.add(2, torch.tensor(0.5))
    pending.add(7, torch.tensor(1.5, requires_grad=True))
    assert pending.read() == {2: 0.5, 7: 1.5}
    assert pending.read() == {}
    pending.add(1, torch.tensor(1.0))
    pending.clear()
    assert pending.read() == {}


def test_the_random_state_is_restored():
    torch.manual_seed(3)
    with preserve_rng(CPU):
        first = torch.rand(2)
    assert torch.equal(first, torch.rand(2))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)", "server(2)"])
def test_a_gpu_gives_the_losses_of_the_cpu(strategy):
    import counterpoint as cp

    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double().to(device)
        inputs, targets = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with cp.parallelize(model, optimizer, nn.functional.mse_loss, strategy=strategy) as step:
            return [step(inputs, targets) for _ in range(3)]  # batches on the host are moved

    assert train("cuda") == pytest.approx(train("cpu"), rel=1e-10)
