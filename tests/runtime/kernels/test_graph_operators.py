"""Operators of graphs are registered once, whichever thread asks first."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from counterpoint.runtime.kernels.graph_operators import register_once


def test_several_threads_register_operators_once():
    calls: list[int] = []
    barrier = Barrier(4)

    @register_once
    def register():
        calls.append(len(calls))
        return len(calls)

    def ask(_):
        barrier.wait(30)
        return register()

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(ask, range(4))] == [1] * 4
    assert calls == [0]
