"""What holds for every test: one seed, one thread, a time limit, laws on the same examples each time."""

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


@pytest.fixture(autouse=True)
def _one_seed_and_one_thread():
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:  # a pure test never pays for importing it
        torch.manual_seed(0)
        torch.set_num_threads(1)
