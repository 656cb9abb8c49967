"""The strategies by name: what a user may write in a plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from counterpoint.errors import PlanError
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.server import Server
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Named:
    """One name of the table.

    Args:
        make: called with the ranks along the new axis and the options.
        summary: what it is, in one line.
        options: the options it takes.
        parent: the class whose docstring says promise, cost and source.
    """

    make: Callable[..., Strategy]
    summary: str
    options: tuple[str, ...]
    parent: type


def _server(degree: int, *, servers: int = 1, consistency: Literal["bsp", "asp"] = "bsp") -> Strategy:
    return Server(degree, servers, consistency)


STRATEGIES: dict[str, Named] = {
    "data": Named(
        Data,
        "replicas on their own samples, gradients summed before the update",
        ("update", "compress", "reduce", "sync_every", "sync_first", "staleness"),
        Data,
    ),
    "zero": Named(Zero, "replicas that share out optimizer state, gradients or weights", ("level",), Zero),
    "zero1": Named(partial(Zero, level=1), "zero with shared optimizer state", (), Zero),
    "zero2": Named(partial(Zero, level=2), "zero with shared optimizer state and gradients", (), Zero),
    "zero3": Named(partial(Zero, level=3), "zero with shared optimizer state, gradients and weights", (), Zero),
    "pipeline": Named(
        Pipeline,
        "stages of blocks, microbatches flow through them",
        ("order", "replicas", "balance", "vertical_sync"),
        Pipeline,
    ),
    "gpipe": Named(
        partial(Pipeline, order="gpipe"),
        "a pipeline that fills and drains",
        ("replicas", "balance"),
        Pipeline,
    ),
    "one_f_one_b": Named(
        partial(Pipeline, order="one_f_one_b"),
        "a pipeline that alternates forward and backward",
        ("replicas", "balance"),
        Pipeline,
    ),
    "pipedream": Named(
        partial(Pipeline, order="pipedream"),
        "a pipeline that never flushes, on stashed weights",
        ("replicas", "balance", "vertical_sync"),
        Pipeline,
    ),
    "pipedream_2bw": Named(
        partial(Pipeline, order="pipedream_2bw"),
        "a pipeline that never flushes, on two versions of the weights",
        ("replicas", "balance"),
        Pipeline,
    ),
    "tensor": Named(Tensor, "layers sliced along named dims", ("dims",), Tensor),
    "server": Named(_server, "workers that push to servers and pull from them", ("servers", "consistency"), Server),
    "bsp": Named(partial(_server, consistency="bsp"), "a server that waits for all workers", ("servers",), Server),
    "asp": Named(partial(_server, consistency="asp"), "a server that updates at every push", ("servers",), Server),
}


def find(name: str) -> Named:
    """Return the strategy of that name.

    Raises:
        PlanError: there is none; the message suggests the nearest name.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(name.lower(), [*STRATEGIES, "solo"], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PlanError(f"there is no strategy {name!r}; {hint}the strategies are solo, {', '.join(STRATEGIES)}")
