"""``CudaAccelerator`` calls ``torch.cuda`` as the installed torch defines it, also where there is no GPU."""

import inspect
import re
import sys
from unittest.mock import create_autospec

import pytest
import torch

from counterpoint.device.accelerator import Event, Stream
from counterpoint.device.cuda import CudaAccelerator, count_gpus

FUNCTIONS = [
    "can_device_access_peer",
    "current_stream",
    "device_count",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "is_available",
    "is_initialized",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "stream",
    "synchronize",
]
"""What :mod:`counterpoint.device.cuda` calls; the autospecs raise if it does so with other arguments."""


@pytest.fixture
def cuda(monkeypatch):
    """Replace the functions of ``torch.cuda`` by functions of the same signatures."""
    specs = {name: create_autospec(getattr(torch.cuda, name)) for name in FUNCTIONS}
    for name, spec in specs.items():
        monkeypatch.setattr(torch.cuda, name, spec)
    specs["mem_get_info"].return_value = (1, 2)
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    return specs


def test_every_call_has_the_arguments_of_the_installed_torch(cuda):
    accelerator = CudaAccelerator(0)
    accelerator.current_stream()
    accelerator.stream(None)
    accelerator.synchronize()
    accelerator.manual_seed(1)
    accelerator.set_rng_state(accelerator.get_rng_state())
    stats = accelerator.memory_stats()
    assert (stats.free_bytes, stats.total_bytes) == (1, 2)
    accelerator.reset_peak_memory_stats()
    accelerator.identity()
    count_gpus()
    device = torch.device("cuda", 0)
    for name in ("current_stream", "synchronize", "memory_allocated", "mem_get_info", "reset_peak_memory_stats"):
        cuda[name].assert_called_once_with(device)


@pytest.mark.parametrize(("protocol", "kind"), [(Stream, torch.cuda.Stream), (Event, torch.cuda.Event)])
def test_streams_and_events_have_the_methods_that_are_used(protocol, kind):
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    assert len(methods) >= 4
    assert [name for name in methods if not callable(getattr(kind, name, None))] == []


def test_the_list_is_what_the_source_names():
    source = inspect.getsource(sys.modules[CudaAccelerator.__module__])
    named = {*re.findall(r"torch\.cuda\.([a-z_]+)\(", source)}
    assert named == {*FUNCTIONS}
