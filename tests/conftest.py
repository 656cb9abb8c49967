"""Golden files, texts that a person has read once and that must not change unseen; quick cases; signals that tests send."""

import gc
import signal
import sys
from pathlib import Path

import pytest

from tests.covering import unmark_quick_cases

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="rewrite tests/golden instead of comparing with it")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--golden"):
        items[:] = [item for item in items if "golden" in item.fixturenames]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    made = yield
    if isinstance(made, list):
        unmark_quick_cases([item for item in made if isinstance(item, pytest.Function)])
    return made


def pytest_collection_finish():
    """Let the garbage collector pass over torch's modules and thousands of tests: 7 % of a run's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_function_mode_is_left():
    """A mode that a test leaves active would intercept the calls of all tests after it in its process."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        left = [type(torch._C._get_function_stack_at(index)) for index in range(torch._C._len_torch_function_stack())]
        for _ in left:
            torch._C._pop_torch_function_stack()
        assert not left


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Processes that tests start can be interrupted, even where nohup or a shell in the background lets none be."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "tests.forkserver" in sys.modules:
        sys.modules["tests.forkserver"].start_forkserver()
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def golden(request):
    """Return ``same(name, text)``: it compares with tests/golden/name, or writes that file under --golden."""

    def same(name, text):
        path = GOLDEN / name
        if request.config.getoption("--golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is not there; `make golden` writes it"
        assert text == path.read_text(encoding="utf-8"), f"{path} reads otherwise; see `make golden`"

    return same
