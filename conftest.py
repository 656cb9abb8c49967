"""What holds for every test: one seed, one thread, a time limit, laws on the same examples each time."""

import functools
import random
import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("same")


def has_a_gpu():
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("process") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(120))
        if item.get_closest_marker("gpu") and not has_a_gpu():
            item.add_marker(pytest.mark.skip(reason="there is no GPU that torch can use"))


@functools.cache
def seed_no_absent_device(torch):
    """Let ``torch.manual_seed`` pass over devices that are not there, for each of which it writes down the call stack."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _one_seed_and_one_thread():
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:  # a pure test never pays for importing it
        seed_no_absent_device(torch)
        torch.manual_seed(0)
        torch.set_num_threads(1)
