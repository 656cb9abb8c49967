"""The stand-in device computes as the host does, and refuses and counts what a GPU would."""

import copy
import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE, StandInTensor

ON = DEVICE.device


def train(device, build):
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets, losses = torch.randn(8, 8).to(device), torch.randint(0, 4, (8,)).to(device), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build_mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


def test_training_has_every_bit_of_the_cpus():
    assert train(ON, build_mlp) == train("cpu", build_mlp)


def test_tensors_of_two_devices_are_refused_but_numbers_are_not():
    on_device = torch.ones(2, device=ON)
    with pytest.raises(RuntimeError, match=r"found at least two devices, stand_in:0 and cpu! \(add\)"):
        on_device + torch.ones(2)
    assert (on_device + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_numpy_and_native_code_cannot_take_a_tensor():
    tensor = torch.ones(2, device=ON)
    with pytest.raises(TypeError, match="can't convert stand_in:0"):
        tensor.numpy()
    with pytest.raises(TypeError, match="cannot be converted to pointer"):
        ctypes.c_void_p(tensor.data_ptr())


def test_addresses_can_be_compared():
    tensor = torch.ones(4, device=ON)
    assert tensor.data_ptr() == tensor.view(2, 2).data_ptr() != torch.ones(4, device=ON).data_ptr()
    assert tensor.data_ptr() < tensor[1:].data_ptr() == tensor.data_ptr() + 4
    assert len({tensor.data_ptr(), tensor.view(2, 2).data_ptr()}) == 1
    assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()


def test_data_of_the_host_is_refused():
    tensor = torch.ones(2, device=ON)
    with pytest.raises(TypeError, match="the data of a tensor on stand_in:0 was replaced by that of one on cpu"):
        tensor.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="of the same shape"):
        tensor.data = torch.ones(3, device=ON)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda tensor: tensor.sum().item(), "read a number"),
        (lambda tensor: bool(tensor.any()), "read a number"),
        (lambda tensor: tensor.cpu(), "copy to the host"),
        (lambda tensor: tensor.tolist(), "copy to the host"),
        (lambda tensor: torch.empty(3).copy_(tensor), "copy to the host"),
        (lambda tensor: tensor.copy_(torch.ones(3)), "copy from the host"),
        (lambda _: torch.ones(3).to(ON), "copy from the host"),
        (lambda tensor: tensor.nonzero(), "nonzero"),
        (lambda tensor: torch.equal(tensor, tensor), "equal"),
        (lambda tensor: tensor[torch.tensor([0, 2])], "copy from the host"),
        (lambda _: StandInAccelerator().synchronize(), "synchronize"),
    ],
)
def test_every_wait_of_the_host_is_counted_with_its_line(read, kind):
    tensor = torch.ones(3, device=ON)
    with DEVICE.count_host_waits() as waits:
        read(tensor)
    ((found, line),) = waits
    assert found == kind
    assert "test_stand_in_device.py" in line


def test_computing_on_the_device_is_no_wait():
    with DEVICE.count_host_waits() as waits:
        tensor = torch.arange(6, device=ON).view(2, 3).double()
        tensor.mul_(2.0)
        torch.where(tensor > 3, tensor, 0.0).sum(0).clone()[1:].fill_(1.0)
    assert not waits


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(1)
    host = torch.default_generator.get_state()
    accelerator = StandInAccelerator()
    accelerator.manual_seed(2)
    first = torch.rand(3, device=ON)
    with accelerator.preserve_rng():
        second = torch.rand(3, device=ON)
        torch.rand(3)
    assert torch.equal(torch.default_generator.get_state(), host)
    assert torch.equal(torch.rand(3, device=ON).cpu(), second.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    state = accelerator.get_rng_state()
    third = torch.rand(3, device=ON)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=ON).cpu(), third.cpu())


def test_memory_is_counted_until_it_is_dropped_or_freed():
    accelerator = StandInAccelerator()
    before = accelerator.memory_stats().allocated_bytes
    accelerator.reset_peak_memory_stats()
    tensor = torch.zeros(1000, device=ON)
    assert accelerator.memory_stats().allocated_bytes == before + 4000
    tensor.untyped_storage().resize_(0)
    assert accelerator.memory_stats().allocated_bytes == before
    tensor.untyped_storage().resize_(4000)
    view = tensor[:2]
    del tensor
    assert accelerator.memory_stats().allocated_bytes == before + 4000
    del view
    assert accelerator.memory_stats() == (before, before + 4000, before, *accelerator.memory_stats()[3:])


def test_a_copy_of_a_parameter_is_a_parameter_of_its_own():
    param = nn.Parameter(torch.ones(2, device=ON), requires_grad=False)
    copied = copy.deepcopy({"a": param, "b": param})
    assert copied["a"] is copied["b"]
    assert isinstance(copied["a"], nn.Parameter)
    assert not copied["a"].requires_grad
    copied["a"].add_(1.0)
    assert param.tolist() == [1.0, 1.0]


def test_rows_of_an_embedding_have_a_sparse_gradient():
    table = nn.Embedding(5, 2, sparse=True).to(ON)
    table(torch.tensor([1, 3, 1]).to(ON)).sum().backward()
    grad = table.weight.grad
    assert isinstance(grad, StandInTensor)
    assert grad.is_sparse
    assert grad.coalesce().indices().tolist() == [[1, 3]]


def test_operators_that_change_a_shape_are_refused_and_not_wrong():
    with pytest.raises(RuntimeError, match="resize_ changes the shape of a tensor"):
        torch.ones(2, device=ON).resize_(3)


def test_its_name_and_shape_are_shown_without_a_wait():
    with DEVICE.count_host_waits() as waits:
        assert repr(torch.ones(2, device=ON)) == "StandInTensor((2,), torch.float32)"
    assert not waits
    assert torch.get_device_module(ON).get_device_name(ON) == "stand_in"
