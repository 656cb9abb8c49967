"""Models are split and compared in float64, where 1e-12 means equal."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
