from functools import partial

import pytest

from counterpoint.fabric.shm.native import native
from tests.fabric.run_ranks import on_gloo, on_hosts, on_local, on_process_groups, on_shm
from tests.forkserver import CONTEXT

SHARED = [
    pytest.mark.process,
    pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}"),
]
PROCESSES = [
    pytest.param(on_gloo, id="gloo", marks=pytest.mark.process),
    pytest.param(on_shm, id="shm", marks=SHARED),
    pytest.param(on_process_groups, id="process_group", marks=pytest.mark.process),
]
HOSTS = pytest.param(partial(on_hosts, (0, 1, 0)), id="hosts", marks=[*SHARED, pytest.mark.slow])


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked_at_once():
    """A test that measures how long ranks wait does not measure how long importing torch took before the first."""
    first = CONTEXT.Process(target=int)
    first.start()
    first.join()


@pytest.fixture(params=[pytest.param(on_local, id="local"), *PROCESSES, HOSTS])
def run_scenario(request):
    """Return ``run_scenario(scenario, num_ranks)``: what each rank got, on this transport."""
    return request.param


@pytest.fixture(params=[*PROCESSES, HOSTS])
def processes(request):
    """Return ``processes(scenario, num_ranks, timeout_s, present)`` on a transport between processes."""
    return request.param


@pytest.fixture(params=PROCESSES)
def local_processes(request):
    """Return ``local_processes(scenario, num_ranks, timeout_s, present)``, as ``processes``, all of them on one host."""
    return request.param
