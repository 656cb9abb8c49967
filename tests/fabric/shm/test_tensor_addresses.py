"""Where tensors are is read, and they are copied into one, in a single call of the native library for all."""

import pytest
import torch

from counterpoint.fabric.shm import tensor_addresses
from counterpoint.fabric.shm.tensor_addresses import AddressReader, copy_at, find_objects, make_counts, read_addresses

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_tensor_is_copied_to_its_start_and_nothing_else_is_written(dtype):
    tensors = [torch.arange(1, 7, dtype=dtype).view(2, 3), torch.ones(0, dtype=dtype), torch.full((2,), 9, dtype=dtype)]
    into = torch.full((10,), -1, dtype=dtype)
    copy_at(read_addresses(tensors), make_counts(map(torch.Tensor.numel, tensors)), make_counts([4, 0, 1]), into)
    assert into.tolist() == [-1, 9, 9, -1, 1, 2, 3, 4, 5, 6]


@pytest.fixture(params=["native", "python"])
def reader_of(request, monkeypatch):
    """Return ``reader_of(tensors)``, which reads through DLPack and without."""
    if request.param == "python":
        monkeypatch.setattr(tensor_addresses, "_native_reader", lambda: None)
    return lambda tensors: AddressReader(tensors, tensors[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_addresses_are_those_that_torch_tells(reader_of, dtype):
    tensors = [torch.ones(3, 4, dtype=dtype)[1:], torch.ones(0, 5, dtype=dtype), torch.ones((), dtype=dtype)]
    tensors += [torch.ones(4, 2, dtype=dtype)[1:2, 1:], torch.ones(5, 1, 3, dtype=dtype).transpose(0, 1)]  # odd strides
    reader, expected = reader_of(tensors), [tensor.data_ptr() for tensor in tensors]
    assert [at or 0 for at in reader.read(tensors)] == expected
    assert [at or 0 for at in reader.read(tensors, find_objects(tensors))] == expected
    assert list(reader.counts) == [8, 0, 1, 1, 15]


def negated(value):
    return torch.complex(torch.zeros(1), torch.tensor([-value])).conj().imag


UNREADABLE = {
    "transposed": lambda: torch.ones(2, 3).T,
    "sparse": lambda: torch.eye(3)[:2].to_sparse(),
    "negated": lambda: negated(1.0),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_tensor_whose_memory_does_not_have_its_elements_in_order_is_not_read(reader_of, name):
    tensor, dense = UNREADABLE[name](), torch.ones(2)
    reader = reader_of([dense, tensor.to_dense().clone()])
    for _ in range(2):  # the second time it is known that torch refuses some
        assert reader.read([dense, tensor]) is None
    assert reader.read([dense, tensor.to_dense().resolve_neg().contiguous()])[0] == dense.data_ptr()


def test_a_tensor_of_another_dtype_is_not_read():
    assert AddressReader([torch.ones(2)], torch.float32).read([torch.ones(2).double()]) is None


def test_torch_publishes_what_the_library_reads():
    """Else all would be read one by one, which takes a hundredth of a step of small layers."""
    assert tensor_addresses._native_reader() is not None
