"""What holds for every test: one seed, one thread, a time limit, laws on the same examples each time, quick cases."""

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


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector):
    """Take the mark ``long`` from the cases that its argument ``quick`` lists; each of them must be there."""
    made = yield
    items = [item for item in made or [] if isinstance(item, pytest.Function)] if isinstance(made, list) else []
    marks = [mark for item in items[:1] for mark in item.iter_markers("long") if "quick" in mark.kwargs]
    for quick in (set(mark.kwargs["quick"]) for mark in marks):
        cases = {item.callspec.id: item for item in items if hasattr(item, "callspec")}
        if unknown := sorted(quick - {*cases}):
            raise collector.CollectError(
                f"{items[0].originalname} has no cases {unknown}; quick names ids of its cases"
            )
        for name in quick:
            cases[name].own_markers[:] = [mark for mark in cases[name].own_markers if mark not in marks]
    return made


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
