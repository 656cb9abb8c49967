"""Which device a run computes on, and what is said where there is no such device."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.device import cuda, select
from counterpoint.device.host import HostAccelerator
from counterpoint.device.select import (
    LocalRank,
    accelerator_for,
    choose_gpu,
    model_device,
    move_model,
    require_device,
    require_transport,
    select_accelerator,
)
from counterpoint.errors import PlanError
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.house.source import ROOT

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs, of which nothing but the number is asked for."""
    monkeypatch.setattr(select, "count_gpus", lambda: 2)
    monkeypatch.setattr(select, "CudaAccelerator", lambda index: f"cuda:{index}")


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(select, "count_gpus", lambda: 0)


def test_a_model_on_two_devices_is_refused_and_both_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(PlanError, match=r"2 devices: 0\.weight on cpu, 1\.weight on meta; move the whole model"):
        model_device(model)


def test_a_model_without_values_is_refused_where_nothing_gives_it_some():
    with pytest.raises(PlanError, match=r"Linear are on the meta device, .*call model.to_empty\(device='cpu'\)"):
        model_device(nn.Linear(2, 1, device="meta"))


def test_a_buffer_counts_for_the_device_too():
    model = nn.BatchNorm1d(2)
    model.running_mean = torch.zeros(2, device="meta")
    with pytest.raises(PlanError, match="running_mean on meta"):
        model_device(model)


def test_a_model_without_tensors_is_on_the_cpu():
    assert model_device(nn.ReLU()) == CPU


def test_a_transport_between_hosts_memories_takes_no_device():
    require_transport(CPU, 2, takes_device_tensors=False)
    require_transport(META, 2, takes_device_tensors=True)
    require_transport(META, 1, takes_device_tensors=False)
    with pytest.raises(PlanError, match=r"on meta, but the 2 processes .*transport='process_group' .*model\.cpu\(\)"):
        require_transport(META, 2, takes_device_tensors=False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("text", "local_rank", "device"),
    [("auto", LocalRank(), "cuda:0"), ("cuda", LocalRank(1, 2), "cuda:1"), ("cuda:1", LocalRank(), "cuda:1")],
)
def test_a_process_takes_the_gpu_that_is_named_or_that_of_its_local_rank(text, local_rank, device):
    assert select_accelerator(text, local_rank) == device


@pytest.mark.usefixtures("two_gpus")
def test_more_processes_than_gpus_are_refused():
    with pytest.raises(PlanError, match="3 processes of this host each need a GPU, but this one, local rank 2, sees 2"):
        select_accelerator("auto", LocalRank(2, 3))


def test_a_process_takes_the_only_gpu_that_its_launcher_shows_it(monkeypatch):
    """Under Ray and Slurm's --gpus-per-task each process sees one GPU, its own: all but a single rank of a host were refused."""
    monkeypatch.setattr(select, "count_gpus", lambda: 1)
    assert [choose_gpu(LocalRank(number, 4)) for number in range(4)] == [0] * 4


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(PlanError, match="device='cuda:2' does not exist: this process sees 2 GPUs, cuda:0 to cuda:1"):
        select_accelerator("cuda:2", LocalRank())


@pytest.mark.usefixtures("no_gpus")
def test_auto_is_the_cpu_where_there_is_no_gpu():
    assert isinstance(select_accelerator("auto", LocalRank()), HostAccelerator)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("text", ["cuda", "cuda:0"])
def test_a_gpu_is_refused_where_there_is_none(text):
    with pytest.raises(PlanError, match=r"device='cuda' needs a GPU, but .*; give device='cpu', or 'auto'"):
        select_accelerator(text, LocalRank())


@pytest.mark.parametrize("text", ["gpu", "cuda:x", "CUDA", "cuda:-1", ""])
def test_words_that_are_no_device_are_refused(text):
    with pytest.raises(PlanError, match="is not a device"):
        select_accelerator(text, LocalRank())


def test_a_device_of_another_kind_is_refused():
    with pytest.raises(PlanError, match="device='meta' is of a kind that Counterpoint cannot train on"):
        accelerator_for(META)


def test_a_device_may_bring_its_accelerator():
    assert isinstance(accelerator_for(DEVICE.device), StandInAccelerator)
    assert isinstance(select_accelerator("stand_in", LocalRank()), StandInAccelerator)


def test_an_option_of_another_type_is_refused():
    with pytest.raises(PlanError, match="device=0 is a int; give 'cpu'"):
        parallelize(nn.Linear(2, 1), device=0)


def parallelize(model, **options):
    return cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.functional.mse_loss, **options)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(1))


def test_a_moved_model_keeps_its_parameters_ties_gradients_and_optimizer_state():
    model = Tied()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.second(model.first(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    before, params = copy.deepcopy(model), list(model.parameters())
    move_model([model], [optimizer], DEVICE.device)
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]
    assert model.second.weight is model.first.weight
    assert {tensor.device for tensor in (*params, model.scale)} == {DEVICE.device}
    assert {param.grad.device for param in params if param.grad is not None} == {DEVICE.device}
    assert {state["momentum_buffer"].device for state in optimizer.state.values()} == {DEVICE.device}
    optimizer.step()
    move_model([model], [optimizer], CPU)
    assert not torch.equal(model.first.weight, before.first.weight)
    assert model.scale.device == CPU


def test_a_model_that_was_moved_away_is_refused():
    require_device(nn.Linear(2, 1), CPU)
    with pytest.raises(PlanError, match=r"the model is on cpu, but the run was prepared for meta; .* device='cpu'"):
        require_device(nn.Linear(2, 1), META)


def test_a_trained_model_is_where_it_was_asked_to_be_and_equals_the_cpus():
    def train(device):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        with parallelize(model, strategy="data(2)", device=device) as step:
            losses = [step(torch.ones(4, 2), torch.zeros(4, 1)) for _ in range(3)]
        return losses, model

    (losses, model), (expected, _) = train("stand_in"), train(None)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert model.weight.device == DEVICE.device


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)", "server(2)"])
def test_a_gpu_gives_the_losses_of_the_cpu(strategy):
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()
        inputs, targets = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
        with parallelize(model, strategy=strategy, device=device) as step:
            return [step(inputs, targets) for _ in range(3)]  # batches on the host are moved

    assert train("cuda") == pytest.approx(train("cpu"), rel=1e-10)


def message_of(run, *arguments):
    with pytest.raises(PlanError) as found:
        run(*arguments)
    return str(found.value)


def test_the_page_on_gpus_quotes_what_is_raised(monkeypatch):
    page = (ROOT / "docs" / "how-to" / "gpus.md").read_text(encoding="utf-8").partition("## Errors")[2]
    quoted = [line.split("`")[1] for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    raised = [
        message_of(model_device, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))),
        message_of(require_device, nn.Linear(2, 1), META),
        message_of(partial(require_transport, takes_device_tensors=False), META, 8),
        message_of(accelerator_for, torch.device("xla")),
    ]
    monkeypatch.setattr(select, "count_gpus", lambda: 0)
    for reason in ("torch 2.13.0+cpu is built without CUDA", cuda.NO_GPU):
        monkeypatch.setattr(select, "describe_absence", lambda reason=reason: reason)
        raised.append(message_of(select_accelerator, "cuda", LocalRank()))
    monkeypatch.setattr(select, "count_gpus", lambda: 2)
    raised += [message_of(select_accelerator, "cuda:2", LocalRank()), message_of(choose_gpu, LocalRank(2, 3))]
    texts = [text.replace("meta", "cuda:0") for text in raised]
    elsewhere = ("the memory of ", "ranks 0, 1 of host", "the ranks compute on different", "the drivers of the")
    unknown = [one for one in quoted if not one.startswith(elsewhere) and not any(one in text for text in texts)]
    assert (len(quoted), unknown) == (12, [])  # a full device, and several ranks, have tests of their own
