"""Tensors on a device whose process groups there are none of: they travel through host memory."""

import pytest
import torch

from counterpoint.testing import stand_in_device
from tests.fabric.run_ranks import on_process_groups

pytestmark = pytest.mark.process
TRIO, BOUNDS, COUNTS = (0, 1, 2), [0, 1, 1, 5], [[1, 2, 0], [0, 1, 3], [2, 0, 1]]


def staged(fabric):
    """Return the results of all collectives and of a message, which are on the device again."""
    device = stand_in_device.DEVICE.device
    own = torch.arange(5.0) + 10 * fabric.rank
    summed, shares, whole, root = (own.to(device) for _ in range(4))
    fabric.all_reduce("loss", summed, TRIO).wait()
    fabric.reduce_scatter("grad", shares, BOUNDS, TRIO).wait()
    fabric.all_gather("weight", whole, BOUNDS, TRIO).wait()
    fabric.broadcast("root's", root, TRIO, 2).wait()
    sent = torch.full((sum(COUNTS[fabric.rank]),), float(fabric.rank)).to(device)
    received, work = fabric.all_to_all("tokens", sent, COUNTS, TRIO)
    work.wait()
    fabric.send((fabric.rank + 1) % 3, "x", [torch.tensor(fabric.rank), own.to(device)])
    number, values = fabric.recv((fabric.rank - 1) % 3, "x")
    tensors = [summed, shares[BOUNDS[fabric.rank] : BOUNDS[fabric.rank + 1]], whole, root, received, values]
    assert {tensor.device.type for tensor in tensors} == {device.type}
    assert number.device.type == "cpu"
    # rank 0 serves the store over which the others connect: it must not end before they have
    fabric.all_reduce("all have received", torch.ones(1), TRIO).wait()
    return [number.item(), *(tensor.cpu().tolist() for tensor in tensors)]


def test_tensors_of_another_device_are_staged_through_host_memory():
    total = [30.0, 33.0, 36.0, 39.0, 42.0]
    gathered = [0.0, 21.0, 22.0, 23.0, 24.0]
    for rank, (number, summed, share, whole, root, received, values) in enumerate(on_process_groups(staged, 3)):
        before = (rank - 1) % 3
        assert (number, values) == (before, [10.0 * before + index for index in range(5)])
        assert (summed, share) == (total, total[BOUNDS[rank] : BOUNDS[rank + 1]])
        assert (whole, root) == (gathered, [20.0, 21.0, 22.0, 23.0, 24.0])
        assert received == [float(sender) for sender in TRIO for _ in range(COUNTS[sender][rank])]


def refused(fabric):
    """A transport that moves host memory is given a tensor of a device."""
    device = stand_in_device.DEVICE.device
    fabric.all_reduce("loss", torch.ones(3).to(device), (0, 1)).wait()


@pytest.mark.long(quick=["gloo", "process_group"])
def test_a_transport_of_host_memory_refuses_a_tensor_on_a_device(local_processes):
    if local_processes is on_process_groups:
        pytest.skip("it stages it")
    for text in local_processes(refused, 2):
        assert text.startswith("ProgramError: rank ")
        assert "the tensor is on stand_in:0, and this transport moves tensors in host memory only" in text
