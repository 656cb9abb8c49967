"""Weight gradients that are put off: the input part of a backward notes them, the weight part makes them.

What is put off are products of linear layers, tables and convolutions, which are nearly all that a weight part costs.
All other gradients, of norms and biases for instance, are made with the input part, and so is that of a weight that is
used in another way: results are the same, only less is left for later.
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
    """Where jobs are done at once, or noted while a backward is only an input part."""

    def __init__(self) -> None:
        self.recorded: list[WeightGradJob] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[WeightGradJob]]:
        """Note jobs in the list that is given."""
        self.recorded = []
        try:
            yield self.recorded
        finally:
            self.recorded = None

    def submit(self, job: WeightGradJob) -> None:
        """Do a job, or note it."""
        if self.recorded is None:
            job()
        else:
            self.recorded.append(job)


class DeferredGradSink(NamedTuple):
    """Where a gradient belongs that may be put off."""

    sink: ParamGradSink | GradSink
    queue: WeightGradQueue

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients that are made now are those of a step."""
        return self.sink.accepts_grads

    @property
    def is_deferred(self) -> bool:
        """They may be."""
        return True

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""
        return self.sink.target()

    def add(self, row_grad: RowGrad) -> None:
        """Take rows in the place of a gradient of the weight's size."""
        self.queue.submit(partial(self.sink.add, row_grad))

    def submit(self, job: WeightGradJob) -> None:
        """Do it at once, or when the row comes to it."""
        self.queue.submit(job)


def build_grad_sinks(store: ParamStore, queue: WeightGradQueue | None) -> GradSinks:
    """Return where gradients of a rank's weights are put that autograd does not hand over."""
    if queue is None:
        found: list[tuple[int, ParamGradSink | FlatGradSink]] = [*store.param_sinks.items(), *store.flat_sinks.items()]
        open_ones: dict[int, GradSink] = {weight: place for weight, place in found if not place.has_user_hooks}
        shown = {weight: place for weight, place in store.flat_sinks.items() if place.is_shared}
        return GradSinks(open_ones, {**_embedding_sinks(store), **shown})
    places = build_deferred_sinks(store, queue)
    return GradSinks(places, {**_embedding_sinks(store), **places})


def _embedding_sinks(store: ParamStore) -> Mapping[int, RowGradSink]:
    """Return where rows of tables' gradients are added, by the identity of what is looked up in, in every version.

    What other ranks add to is left to autograd, which says when it is complete.
    """
    shared = {name for arena in store.flat_params() for name in arena.params}
    own = (store.tables.keys() & store.params.keys()) - shared - store.sparse_names
    versions = (
        [store.params]
        if store.weight_versions is None
        else [edition.leaves for edition in store.weight_versions.versions]
    )
    return {id(leaves[name]): ParamGradSink(store.params[name], store) for leaves in versions for name in own}


def build_deferred_sinks(store: ParamStore, queue: WeightGradQueue) -> Mapping[int, GradSink]:
    """Return where the gradients of a rank's weights belong, by the weights' identity; sparse ones are autograd's."""
    return {
        id(param): DeferredGradSink(store.flat_sinks.get(id(param)) or ParamGradSink(param, store), queue)
        for name, param in store.params.items()
        if param.requires_grad and name not in store.sparse_names
    }
