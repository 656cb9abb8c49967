"""Deferred weight gradients: the input part of a backward queues their computation, the weight part runs it.

Linear layers, embedding tables and convolutions are deferred, which are nearly all the cost of a weight part. Other
gradients, of norms and biases for instance, are computed with the input part, and so is that of a weight that is used
in another way. Results are the same; only less is deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor

from counterpoint.runtime.kernels.embedding import RowGradSink
from counterpoint.runtime.kernels.weight_grad import GradSink, GradSinks
from counterpoint.runtime.params.grad_sinks import FlatGradSink, ParamGradSink
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.params.sparse_grads import RowGrad

WeightGradJob: TypeAlias = Callable[[], None]


class WeightGradQueue:
    """Runs jobs immediately, or queues them during the input part of a backward."""

    def __init__(self) -> None:
        self.recorded: list[WeightGradJob] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[WeightGradJob]]:
        """Queue jobs in the list that is yielded."""
        self.recorded = []
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def submit(self, job: WeightGradJob) -> None:
        """Run a job, or queue it."""
        if self.recorded is None:
            job()
        else:
            self.recorded.append(job)


class DeferredGradSink(NamedTuple):
    """A sink whose gradient may be computed later."""

    sink: ParamGradSink | GradSink
    queue: WeightGradQueue

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients computed now belong to a step."""
        return self.sink.accepts_grads

    @property
    def is_deferred(self) -> bool:
        """Always True."""
        return True

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether to add to what is there."""
        return self.sink.target()

    def add(self, row_grad: RowGrad) -> None:
        """Submit a job that adds rows to the gradient."""
        self.queue.submit(partial(self.sink.add, row_grad))

    def is_bounded(self, rows: Tensor, inputs: Tensor) -> bool:
        """Check the gradient ``rows.T @ inputs`` by its factors; return whether it need not be read itself."""
        return self.sink.is_bounded(rows, inputs)

    def check(self, grad: Tensor, *, is_bounded: bool = False) -> None:
        """Check a gradient that was written to :meth:`target`, unless its factors have shown that it is finite."""
        self.sink.check(grad, is_bounded=is_bounded)

    def submit(self, job: WeightGradJob) -> None:
        """Run a job, or queue it for the weight part."""
        self.queue.submit(job)


def build_grad_sinks(store: ParamStore, queue: WeightGradQueue | None) -> GradSinks:
    """Return the sinks of a rank's gradients that bypass autograd."""
    if queue is None:
        sinks: list[tuple[int, ParamGradSink | FlatGradSink]] = [*store.param_sinks.items(), *store.flat_sinks.items()]
        weight_sinks: dict[int, GradSink] = {weight: sink for weight, sink in sinks if not sink.has_user_hooks}
        shared = {weight: sink for weight, sink in store.flat_sinks.items() if sink.is_shared}
        return GradSinks(weight_sinks, {**_embedding_sinks(store), **shared})
    deferred = build_deferred_sinks(store, queue)
    return GradSinks(deferred, {**_embedding_sinks(store), **deferred})


def _embedding_sinks(store: ParamStore) -> Mapping[int, RowGradSink]:
    """Return the sinks of tables whose gradient stays on this rank, by ``id`` of the table in every version.

    Tables whose gradient other ranks add to are left to autograd, which signals when it is complete.
    """
    names = (store.tables.keys() & store.params.keys()) - store.sparse_names
    if not names:
        return {}
    names -= {name for flat_params in store.flat_params() for name in flat_params.params}
    versions = (
        [store.params]
        if store.weight_versions is None
        else [version.leaves for version in store.weight_versions.versions]
    )
    return {
        id(leaves[name]): ParamGradSink(name, store.params[name], store)
        for leaves in versions
        for name in names
        if leaves[name].is_cpu  # elsewhere a function mode would cost more than it saves
    }


def build_deferred_sinks(store: ParamStore, queue: WeightGradQueue) -> Mapping[int, GradSink]:
    """Return deferring sinks of all dense weight gradients, by ``id`` of the weight."""
    return {
        id(param): DeferredGradSink(store.flat_sinks.get(id(param)) or ParamGradSink(name, param, store), queue)
        for name, param in store.params.items()
        if param.requires_grad and name not in store.sparse_names
    }
