"""Bytes of tensors are those of their elements, however torch holds them."""

import pytest
import torch

from counterpoint.tensor_bytes import as_bytes, is_resolved, view_bytes

COMPLEX = torch.complex(torch.zeros(1), torch.full((1,), -3.0))
TENSORS = {
    "contiguous": (torch.arange(6.0).view(2, 3), True),
    "transposed": (torch.arange(6.0).view(2, 3).T, False),
    "one element of a stride of two": (torch.arange(4.0)[2:3].as_strided((1,), (2,)), True),
    "negated": (COMPLEX.conj().imag, False),
    "conjugated": (COMPLEX.conj(), False),
    "empty": (torch.empty(0, 3), True),
    "no dims": (torch.tensor(True), True),
    "a parameter": (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_those_of_the_elements(name):
    tensor, is_as_it_is = TENSORS[name]
    found = as_bytes(tensor)
    values = torch.tensor(tensor.detach().flatten().tolist(), dtype=tensor.dtype)
    assert found.view(tensor.dtype).equal(values)
    assert found.dim() == 1
    assert is_resolved(tensor) == is_as_it_is
    if is_as_it_is and tensor.numel():  # what is written to the bytes is written to the tensor
        assert found.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_to_write_to_are_those_of_the_tensor_or_refused(name):
    tensor, is_as_it_is = TENSORS[name]
    if is_as_it_is:
        assert view_bytes(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    else:
        with pytest.raises(ValueError, match=r"cannot be written in place: call \.resolve_conj\(\)\.resolve_neg"):
            view_bytes(tensor)
