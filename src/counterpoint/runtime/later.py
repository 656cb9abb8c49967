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

from counterpoint.runtime.direct import Place, Ways
from counterpoint.runtime.landing import Landing, OwnGradient
from counterpoint.runtime.lookup import Shelf
from counterpoint.runtime.rows import Piece
from counterpoint.runtime.store import Store

Job: TypeAlias = Callable[[], None]


class Desk:
    """Where jobs are done at once, or noted while a backward is only an input part."""

    def __init__(self) -> None:
        self.noted: list[Job] | None = None

    @contextmanager
    def noting(self) -> Iterator[list[Job]]:
        """Note jobs in the list that is given."""
        self.noted = []
        try:
            yield self.noted
        finally:
            self.noted = None

    def take(self, job: Job) -> None:
        """Do a job, or note it."""
        if self.noted is None:
            job()
        else:
            self.noted.append(job)


class LaterPlace(NamedTuple):
    """Where a gradient belongs that may be put off."""

    place: OwnGradient | Place
    desk: Desk

    @property
    def is_open(self) -> bool:
        """Whether gradients that are made now are those of a step."""
        return self.place.is_open

    @property
    def puts_off(self) -> bool:
        """They may be."""
        return True

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""
        return self.place.target()

    def add(self, piece: Piece) -> None:
        """Take rows in the place of a gradient of the weight's size."""
        self.desk.take(partial(self.place.add, piece))

    def when_due(self, job: Job) -> None:
        """Do it at once, or when the row comes to it."""
        self.desk.take(job)


def ways_of(store: Store, desk: Desk | None) -> Ways:
    """Return where gradients of a rank's weights are put that autograd does not hand over."""
    if desk is None:
        found: list[tuple[int, OwnGradient | Landing]] = [*store.own.items(), *store.landings.items()]
        open_ones: dict[int, Place] = {weight: place for weight, place in found if not place.is_watched}
        shown = {weight: place for weight, place in store.landings.items() if place.is_shown}
        return Ways(open_ones, {**_own_tables(store), **shown})
    places = later_places(store, desk)
    return Ways(places, {**_own_tables(store), **places})


def _own_tables(store: Store) -> Mapping[int, Shelf]:
    """Return where rows of tables' gradients are added, by the identity of what is looked up in, in every version.

    What other ranks add to is left to autograd, which says when it is complete.
    """
    shared = {name for arena in store.arenas() for name in arena.params}
    own = (store.tables.keys() & store.params.keys()) - shared - store.sparse
    versions = [store.params] if store.editions is None else [edition.leaves for edition in store.editions.editions]
    return {id(leaves[name]): OwnGradient(store.params[name], store) for leaves in versions for name in own}


def later_places(store: Store, desk: Desk) -> Mapping[int, Place]:
    """Return where the gradients of a rank's weights belong, by the weights' identity; sparse ones are autograd's."""
    return {
        id(param): LaterPlace(store.landings.get(id(param)) or OwnGradient(param, store), desk)
        for name, param in store.params.items()
        if param.requires_grad and name not in store.sparse
    }
