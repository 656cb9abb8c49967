"""Ranks in the tasks of a barrier stage of Spark: each task starts one as a process, and all tasks hear of every end.

Spark starts the tasks of such a stage together and lets them tell each other texts. That is all that is asked of it:
where rank 0 is, and from then on, every second or so, whose rank has ended and how. So nothing of ours listens beside
the place where ranks meet, and one failed rank ends all of them, whatever the others are at.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as NotYetError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from counterpoint.errors import DataError
from counterpoint.launchers.ending import Outcome, find_culprit, tell, wait_for_others_s
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.ports import LOOPBACK
from counterpoint.launchers.seat import Ended, Seat, outcome_of, seat_variables
from counterpoint.launchers.values import write_value
from counterpoint.server.wire.key import JobKey, write_key

ROUND_S = 0.25
LONGEST_ROUND_S = 5.0  # between two looks at the others, once a run lasts long
ROUND_SHARE = 0.02  # of the time that the run has lasted
TRACEBACK = "traceback"
TRACEBACK_LINES = 12


class Context(Protocol):
    """What Spark tells a task of a barrier stage; ``pyspark.BarrierTaskContext`` is one."""

    def partitionId(self) -> int:  # noqa: N802 - Spark's name
        """Return the task's number in its stage."""

    def getTaskInfos(self) -> Sequence[Any]:  # noqa: N802
        """Return where every task runs."""

    def allGather(self, message: str = "") -> list[str]:  # noqa: N802
        """Return what all tasks say here, by number."""


@dataclass(frozen=True, slots=True)
class Order:
    """What every task is told; it travels as Spark's closures do.

    Args:
        command: of every rank; its folder follows.
        target: what the rank calls, as ``module:name`` or ``path.py:name``.
        path: where else modules are found.
        files: what the rank finds in its folder, by name.
        job: the name of the run.
        num_ranks: how many tasks there must be.
        cpus: threads of each rank.
        key: the job's secret, which is shown to nobody.
    """

    command: tuple[str, ...]
    target: str
    path: tuple[str, ...]
    files: Mapping[str, bytes]
    job: str
    num_ranks: int
    cpus: int = 1
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Told:
    """What a task tells the driver of its rank, once all have ended.

    Args:
        rank: which.
        report: why the run failed; empty if it did not. The same from all.
        culprit: the rank at fault; -1 for none.
        traceback: the last lines of this rank's, if it has one.
        files: the result, as ``write_value`` writes it, by name.
    """

    rank: int
    report: str = ""
    culprit: int = -1
    traceback: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


def run_task(context: Context, order: Order, prepare: Callable[[Path], None], root: str | None = None) -> Told:
    """This task's rank has run and ended, and so have all others.

    Args:
        context: of the task.
        order: what the driver wants.
        prepare: puts the partition's samples into the rank's folder; a DataError of it ends all tasks.
        root: where the rank's folder is made for as long as it runs; None for the system's own place.
    """
    rank = context.partitionId()
    with tempfile.TemporaryDirectory(prefix="counterpoint-", dir=root) as name:
        folder, seat = Path(name), Seat()
        found = _meet(context, order, seat, _failure(context, order, prepare, folder))
        if isinstance(found, str):
            return Told(rank, found)
        _lay_out(folder, order)
        outcomes = _watched(context, seat, [*order.command, name], found, order.cpus, folder)
        culprit, report = find_culprit(outcomes), tell(outcomes)
        results = {path.name: path.read_bytes() for path in sorted(folder.glob(f"result-{rank}.*"))}
        ending = _text(folder / TRACEBACK)
        return Told(rank, report, -1 if culprit is None else culprit.rank, ending, {} if report else results)


def _failure(context: Context, order: Order, prepare: Callable[[Path], None], folder: Path) -> str:
    """Prepare the rank's folder; return what stands against its start, or nothing."""
    num_tasks = len(context.getTaskInfos())
    if num_tasks != order.num_ranks:
        return (
            f"Spark made {num_tasks} tasks of {order.num_ranks} partitions; a rank has one each: call "
            f"repartition({order.num_ranks}) on the data before"
        )
    try:
        prepare(folder)
    except DataError as error:
        return str(error)
    return ""


def _meet(context: Context, order: Order, seat: Seat, failure: str) -> RankEnvironment | str:
    """Return which rank this is and where all meet, or why they do not start, the same on all."""
    rank = context.partitionId()
    hosts = [str(info.address).rpartition(":")[0] or str(info.address) for info in context.getTaskInfos()]
    mine: list[Any] = [failure, "", 0]
    if rank == 0 and not failure:
        mine[1:] = seat.reserve(LOOPBACK if len(set(hosts)) == 1 else None)
    said = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    failed = [number for number, (text, *_) in enumerate(said) if text]
    if failed:
        return f"rank {failed[0]} could not start: {said[failed[0]][0]}"
    _, host, port = said[0]
    near = [number for number, name in enumerate(hosts) if name == hosts[rank]]
    return RankEnvironment(rank, len(hosts), near.index(rank), len(near), host, port, order.job)


def _lay_out(folder: Path, order: Order) -> None:
    """The rank's folder has what it is called with, and the job's key, which only its owner may read."""
    for name, content in order.files.items():
        (folder / name).write_bytes(content)
    path = [*sys.path, *(place for place in order.path if place not in sys.path)]
    write_value(folder, "call", {"target": order.target, "path": path})
    if order.key:
        write_key(JobKey(order.key), folder / "key")


def _watched(
    context: Context, seat: Seat, command: Sequence[str], found: RankEnvironment, cpus: int, folder: Path
) -> list[Outcome]:
    """Run the rank and return how all of them ended, by rank; where one fails, this one is stopped."""
    key = folder / "key"
    told = replace(found, key_file=str(key)) if key.exists() else found
    began, stop_s = time.monotonic(), float("inf")
    stopped_s: float | None = None
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(seat.run, command, told, seat_variables(cpus))
        try:
            while len(outcomes) < found.world_size:
                _pause(running, began)
                ago_s = None if stopped_s is None else time.monotonic() - stopped_s
                mine = [running.result(), ago_s] if running.done() else None
                _hear(outcomes, context.allGather(json.dumps(mine)))
                now_s, ended = time.monotonic(), list(outcomes.values())
                if find_culprit(ended) is not None:
                    stop_s = min(stop_s, now_s + wait_for_others_s(ended, ()))
                if stopped_s is None and stop_s <= now_s and not running.done():
                    stopped_s = now_s
                    seat.stop()
        finally:
            if not running.done():
                seat.stop()
    return [outcomes[rank] for rank in sorted(outcomes)]


def _pause(running: Future[Ended], began: float) -> None:
    """Wait until the rank has ended or it is time to hear of the others."""
    lasted = time.monotonic() - began
    try:
        running.result(min(max(ROUND_S, ROUND_SHARE * lasted), LONGEST_ROUND_S))
    except NotYetError:
        return


def _hear(outcomes: dict[int, Outcome], said: Sequence[str]) -> None:
    """Whoever has ended since the last time is an outcome."""
    now_s = time.monotonic()
    for rank, text in enumerate(said):
        one = json.loads(text)
        if one is not None and rank not in outcomes:
            ended, ago_s = one
            outcomes[rank] = outcome_of(rank, ended, now_s, None if ago_s is None else now_s - ago_s)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
