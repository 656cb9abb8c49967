"""What the ranks of the part ``nccl`` do, each in a process of its own; all of them on the first GPU.

In a dry run they use process groups of gloo and host memory: the same code but for NCCL.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.errors import PeerError, PlanError
from counterpoint.fabric import Address, Fabric, connect
from counterpoint.testing.device_survey import SurveyCase, train

NUM_VALUES = 1 << 16
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class RankPlace:
    """Args:
    rank: the own one.
    num_ranks: how many there are.
    port: of their rendezvous.
    device: ``cuda``, or ``cpu`` in a dry run.
    """

    rank: int
    num_ranks: int
    port: int
    device: str

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device, copy=True)

    def connect(self) -> Fabric:
        """Return this rank's fabric, whose tensors move over process groups."""
        address = Address("127.0.0.1", self.port)
        return connect(self.rank, self.num_ranks, address, job="gpu", timeout_s=TIMEOUT_S, transport="process_group")


# What ranks do: each returns JSON values.


def run_collectives(place: RankPlace) -> dict[str, Any]:
    """Return by collective of torch.distributed whether its result is right, and when the first was complete."""
    backend = "nccl" if place.device == "cuda" else "gloo"
    start = time.perf_counter()
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{place.port}", rank=place.rank, world_size=place.num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    try:
        outcomes = _collectives(place, start)
        total = place.tensor(torch.ones(NUM_VALUES))
        start = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(total)
        if place.device == "cuda":
            torch.cuda.synchronize()
        outcomes["ms per all_reduce of 256 KiB"] = round((time.perf_counter() - start) * 50, 2)
        return outcomes
    finally:
        dist.destroy_process_group()


def _collectives(place: RankPlace, start: float) -> dict[str, Any]:
    rank, num_ranks = place.rank, place.num_ranks
    outcomes: dict[str, Any] = {}

    def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        outcomes[name] = bool(torch.equal(actual.cpu(), expected))

    values = [torch.arange(NUM_VALUES, dtype=torch.float32) + r for r in range(num_ranks)]
    mine = place.tensor(values[rank])
    total = mine.clone()
    dist.all_reduce(total)
    summed = torch.stack(values).sum(0)
    check("all_reduce", total, summed)
    outcomes["seconds to the first result"] = round(time.perf_counter() - start, 2)
    gathered = place.tensor(torch.empty(NUM_VALUES * num_ranks))
    dist.all_gather_into_tensor(gathered, mine)
    check("all_gather", gathered, torch.cat(values))
    share = place.tensor(torch.empty(NUM_VALUES // num_ranks))
    dist.reduce_scatter_tensor(share, mine.clone())
    check("reduce_scatter", share, summed.chunk(num_ranks)[rank])
    copy = mine.clone()
    dist.broadcast(copy, 0)
    check("broadcast", copy, values[0])
    received = torch.empty_like(mine)
    operations = [
        dist.P2POp(dist.isend, mine, (rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check("send and recv", received, values[(rank - 1) % num_ranks])
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine)
    check("all_to_all", parts, torch.cat([value.chunk(num_ranks)[rank] for value in values]))
    if place.device == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            overlapped = mine.clone()
            work = dist.all_reduce(overlapped, async_op=True)
        work.wait()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        check("all_reduce on a stream", overlapped, summed)
    return outcomes


def run_uneven(place: RankPlace) -> dict[str, bool]:
    """Return by collective of the library's transport whether its result on unequal ranges is right."""
    fabric, ranks = place.connect(), tuple(range(place.num_ranks))
    bounds = [0, *(sum(range(1, rank + 2)) for rank in ranks)]  # of 1, 2, 3, ... values
    whole = [torch.arange(bounds[-1], dtype=torch.float64) + rank for rank in ranks]
    own, outcomes = slice(bounds[place.rank], bounds[place.rank + 1]), {}
    sums = torch.stack(whole).sum(0)
    for turn in ("new", "known"):  # a collective that is new is announced before it starts
        total, summed, gathered, root = (place.tensor(whole[place.rank], torch.float64) for _ in range(4))
        fabric.all_reduce("norm", total, ranks).wait()
        outcomes[f"all_reduce, {turn}"] = torch.equal(total.cpu(), sums)
        fabric.reduce_scatter("grad", summed, bounds, ranks).wait()
        outcomes[f"reduce_scatter, {turn}"] = torch.equal(summed[own].cpu(), sums[own])
        fabric.all_gather("weight", gathered, bounds, ranks).wait()
        expected = torch.cat([whole[rank][bounds[rank] : bounds[rank + 1]] for rank in ranks])
        outcomes[f"all_gather, {turn}"] = torch.equal(gathered.cpu(), expected)
        fabric.broadcast("init", root, ranks, 1).wait()
        outcomes[f"broadcast, {turn}"] = torch.equal(root.cpu(), whole[1])
        following, before = (place.rank + 1) % place.num_ranks, (place.rank - 1) % place.num_ranks
        fabric.send(following, "x", [place.tensor(whole[place.rank], torch.float64)])
        (received,) = fabric.recv(before, "x")
        outcomes[f"send and recv, {turn}"] = torch.equal(received.cpu(), whole[before])
    fabric.check_same_order(ranks)
    fabric.close()
    return outcomes


def run_mismatch(place: RankPlace) -> dict[str, Any]:
    """Return the error of ranks of which one starts its collectives in another order, and when it came."""
    fabric, ranks = place.connect(), tuple(range(place.num_ranks))
    for _ in range(2):
        _reduce_in_order(fabric, place, "ab", ranks)
    return _error_of(lambda: _reduce_in_order(fabric, place, "ab" if place.rank else "ba", ranks))


def run_killed(place: RankPlace) -> dict[str, Any]:
    """Kill the last rank; return the error of the others, and when it came."""
    fabric, ranks = place.connect(), tuple(range(place.num_ranks))
    for _ in range(2):
        _reduce_in_order(fabric, place, "ab", ranks)
    fabric.barrier(ranks)
    if place.rank == place.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        end = time.monotonic() + TIMEOUT_S  # the wait for a collective on a device does not block
        while time.monotonic() < end:
            _reduce_in_order(fabric, place, "ab", ranks)

    return _error_of(go_on)


def _reduce_in_order(fabric: Fabric, place: RankPlace, labels: str, ranks: tuple[int, ...]) -> None:
    for label in labels:
        fabric.all_reduce(label, place.tensor(torch.ones(4)), ranks).wait()
    fabric.check_same_order(ranks)


def _error_of(run: Callable[[], object]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        run()
    except PeerError as error:
        return {"error": str(error), "seconds": round(time.perf_counter() - start, 2)}
    return {"error": "", "seconds": round(time.perf_counter() - start, 2)}


def run_training(plan: str, device: str, place: RankPlace) -> dict[str, Any]:
    """Return losses of a plan whose ranks are processes, or why it is refused."""
    variables = {
        "RANK": place.rank, "LOCAL_RANK": place.rank,
        "WORLD_SIZE": place.num_ranks, "LOCAL_WORLD_SIZE": place.num_ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.port,
        "COUNTERPOINT_TRANSPORT": "process_group",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in variables.items()})
    if device.startswith("stand_in"):
        importlib.import_module("counterpoint.testing.stand_in_accelerator")  # registers it
    try:
        losses, values = train(SurveyCase("mlp", plan), device)
    except PlanError as error:
        return {"refused": str(error)}
    return {"losses": losses, "values": {name: value.tolist() for name, value in values.items()}}


# How they are started.


def run_ranks(
    context: Any, function: Callable[[RankPlace], Any], num_ranks: int, device: str, timeout_s: float
) -> list:
    """Return what the function returns on each rank: the text of its error; None if its process ended without one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = []
    for rank in range(num_ranks):
        pipe, theirs = context.Pipe()
        place = RankPlace(rank, num_ranks, port, device)
        process = context.Process(target=serve_rank, args=(theirs, function, place))
        process.start()
        theirs.close()
        started.append((process, pipe))
    end = time.monotonic() + timeout_s
    answers = []
    for _, pipe in started:
        answer: Any = f"no answer within {timeout_s:.0f} s"
        with suppress(EOFError):
            if pipe.poll(max(0.0, end - time.monotonic())):
                answer = None
                answer = pipe.recv()
        answers.append(answer)
    for process, pipe in started:
        process.join(3)
        process.kill()
        process.join()
        pipe.close()
    return answers


def serve_rank(pipe: Any, function: Callable[[RankPlace], Any], place: RankPlace) -> None:
    """Run one rank in a process of its own."""
    torch.set_num_threads(1)
    if place.device == "cuda":
        torch.cuda.set_device(0)
    try:
        pipe.send(function(place))
    except Exception as error:  # noqa: BLE001 - an outcome
        pipe.send(f"{type(error).__name__}: {error}")
