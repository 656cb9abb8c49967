"""Ranks in the tasks of a barrier stage of Spark: each task starts one as a process, and all tasks hear of every end.

Spark starts the tasks of such a stage together and lets them tell each other texts. That is all that is asked of it:
where rank 0 is, and from then on, every second or so, whose rank has ended and how. So nothing of ours listens beside
the place where ranks meet, and one failed rank ends all of them, whatever the others are at.

Starting Spark from a script: what has to be installed, and a session of a few executors on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as NotYetError
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from counterpoint.errors import DataError, LaunchError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.exit_report import RankExit, find_root_cause, format_report, wait_for_others_s
from counterpoint.launchers.function import write_value
from counterpoint.launchers.ports import LOOPBACK
from counterpoint.launchers.rank_agent import RankAgent, RankExitInfo, thread_variables, to_rank_exit
from counterpoint.rpc.job_key import JobKey, write_key

POLL_S = 0.25
MAX_POLL_S = 5.0  # between two looks at the others, once a run lasts long
POLL_FRACTION = 0.02  # of the time that the run has lasted
TRACEBACK = "traceback"
TRACEBACK_LINES = 12


class BarrierTaskContext(Protocol):
    """What Spark tells a task of a barrier stage; ``pyspark.BarrierTaskContext`` is one."""

    def partitionId(self) -> int:  # noqa: N802 - Spark's name
        """Return the task's number in its stage."""

    def getTaskInfos(self) -> Sequence[Any]:  # noqa: N802
        """Return where every task runs."""

    def allGather(self, message: str = "") -> list[str]:  # noqa: N802
        """Return what all tasks say here, by number."""


@dataclass(frozen=True, slots=True)
class SparkRankSpec:
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
class SparkRankResult:
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
    failed_rank: int = -1
    traceback: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


def run_task(
    context: BarrierTaskContext, spec: SparkRankSpec, prepare: Callable[[Path], None], root: str | None = None
) -> SparkRankResult:
    """This task's rank has run and ended, and so have all others.

    Args:
        context: of the task.
        order: what the driver wants.
        prepare: puts the partition's samples into the rank's folder; a DataError of it ends all tasks.
        root: where the rank's folder is made for as long as it runs; None for the system's own place.
    """
    rank = context.partitionId()
    with tempfile.TemporaryDirectory(prefix="counterpoint-", dir=root) as name:
        folder, seat = Path(name), RankAgent()
        found = _rendezvous(context, spec, seat, _prepare_failure(context, spec, prepare, folder))
        if isinstance(found, str):
            return SparkRankResult(rank, found)
        _write_inputs(folder, spec)
        outcomes = _supervise(context, seat, [*spec.command, name], found, spec.cpus, folder)
        culprit, report = find_root_cause(outcomes), format_report(outcomes)
        results = {path.name: path.read_bytes() for path in sorted(folder.glob(f"result-{rank}.*"))}
        ending = _read_text_or_empty(folder / TRACEBACK)
        return SparkRankResult(rank, report, -1 if culprit is None else culprit.rank, ending, {} if report else results)


def _prepare_failure(
    context: BarrierTaskContext, spec: SparkRankSpec, prepare: Callable[[Path], None], folder: Path
) -> str:
    """Prepare the rank's folder; return what stands against its start, or nothing."""
    num_tasks = len(context.getTaskInfos())
    if num_tasks != spec.num_ranks:
        return (
            f"Spark made {num_tasks} tasks of {spec.num_ranks} partitions; a rank has one each: call "
            f"repartition({spec.num_ranks}) on the data before"
        )
    try:
        prepare(folder)
    except DataError as error:
        return str(error)
    return ""


def _rendezvous(
    context: BarrierTaskContext, spec: SparkRankSpec, agent: RankAgent, failure: str
) -> RankEnvironment | str:
    """Return which rank this is and where all meet, or why they do not start, the same on all."""
    rank = context.partitionId()
    hosts = [str(info.address).rpartition(":")[0] or str(info.address) for info in context.getTaskInfos()]
    mine: list[Any] = [failure, "", 0]
    if rank == 0 and not failure:
        mine[1:] = agent.reserve(LOOPBACK if len(set(hosts)) == 1 else None)
    said = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    failed = [number for number, (text, *_) in enumerate(said) if text]
    if failed:
        return f"rank {failed[0]} could not start: {said[failed[0]][0]}"
    _, host, port = said[0]
    near = [number for number, name in enumerate(hosts) if name == hosts[rank]]
    return RankEnvironment(rank, len(hosts), near.index(rank), len(near), host, port, spec.job)


def _write_inputs(folder: Path, spec: SparkRankSpec) -> None:
    """The rank's folder has what it is called with, and the job's key, which only its owner may read."""
    for name, content in spec.files.items():
        (folder / name).write_bytes(content)
    path = [*sys.path, *(place for place in spec.path if place not in sys.path)]
    write_value(folder, "call", {"target": spec.target, "path": path})
    if spec.key:
        write_key(JobKey(spec.key), folder / "key")


def _supervise(
    context: BarrierTaskContext,
    agent: RankAgent,
    command: Sequence[str],
    found: RankEnvironment,
    cpus: int,
    folder: Path,
) -> list[RankExit]:
    """Run the rank and return how all of them ended, by rank; where one fails, this one is stopped."""
    key = folder / "key"
    told = replace(found, key_file=str(key)) if key.exists() else found
    began, stop_s = time.monotonic(), float("inf")
    stopped_s: float | None = None
    outcomes: dict[int, RankExit] = {}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(agent.run, command, told, thread_variables(cpus))
        try:
            while len(outcomes) < found.world_size:
                _wait_round(running, began)
                ago_s = None if stopped_s is None else time.monotonic() - stopped_s
                mine = [running.result(), ago_s] if running.done() else None
                _collect_exits(outcomes, context.allGather(json.dumps(mine)))
                now_s, ended = time.monotonic(), list(outcomes.values())
                if find_root_cause(ended) is not None:
                    stop_s = min(stop_s, now_s + wait_for_others_s(ended, ()))
                if stopped_s is None and stop_s <= now_s and not running.done():
                    stopped_s = now_s
                    agent.stop()
        finally:
            if not running.done():
                agent.stop()
    return [outcomes[rank] for rank in sorted(outcomes)]


def _wait_round(running: Future[RankExitInfo], began: float) -> None:
    """Wait until the rank has ended or it is time to hear of the others."""
    lasted = time.monotonic() - began
    try:
        running.result(min(max(POLL_S, POLL_FRACTION * lasted), MAX_POLL_S))
    except NotYetError:
        return


def _collect_exits(outcomes: dict[int, RankExit], messages: Sequence[str]) -> None:
    """Whoever has ended since the last time is an outcome."""
    now_s = time.monotonic()
    for rank, text in enumerate(messages):
        one = json.loads(text)
        if one is not None and rank not in outcomes:
            ended, ago_s = one
            outcomes[rank] = to_rank_exit(rank, ended, now_s, None if ago_s is None else now_s - ago_s)


def _read_text_or_empty(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIN_JAVA_VERSION = 17
"""The oldest Java that Spark 4 runs on."""

REMEDY = "install one, on Debian with apt-get install openjdk-17-jre-headless, or set JAVA_HOME"


def missing_for_spark() -> str:
    """Return what is missing for Spark to start, and how to get it; empty where nothing is."""
    if find_spec("pyspark") is None:
        return "there is no PySpark; pip install 'counterpoint[spark]'"
    java = java_path()
    if java is None:
        return f"there is no Java, which Spark runs on; {REMEDY}"
    found = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60)
    major = java_major(found.stderr + found.stdout)
    if major is None:
        return f"{java} does not say its version: {(found.stderr + found.stdout).strip()[:200]!r}; {REMEDY}"
    if major < MIN_JAVA_VERSION:
        return f"{java} is Java {major}, but Spark 4 needs {MIN_JAVA_VERSION} or newer; {REMEDY}"
    return ""


def java_path() -> str | None:
    """Return the Java that Spark would take: that of JAVA_HOME, else the first on the path."""
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        return str(path) if path.is_file() else None
    return shutil.which("java")


def java_major(text: str) -> int | None:
    """Return the major version in what ``java -version`` prints.

    Example:
        >>> java_major('openjdk version "17.0.15" 2025-04-15'), java_major('java version "1.8.0_202"')
        (17, 8)
    """
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def start_spark(
    *,
    executors: int = 2,
    cores: int = 1,
    memory_mib: int = 1024,
    name: str = "counterpoint",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with executors of their own on this machine; end it with ``stop()``.

    Args:
        executors: processes of Java, each of which starts Python workers.
        cores: tasks that each runs at once.
        memory_mib: of each.
        name: what Spark calls it.
        settings: of Spark, which count before those that are made here.

    Raises:
        LaunchError: PySpark or Java is missing, or too old.
    """
    missing = missing_for_spark()
    if missing:
        raise LaunchError(f"Spark cannot start: {missing}")
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else can reach its ports
    chosen = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{memory_mib}m",
        "spark.executor.memory": f"{memory_mib}m",
        # Too few slots for a stage that needs all at once are an error after a second, not after ten minutes.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        **(settings or {}),
    }
    builder = SparkSession.builder.master(f"local-cluster[{executors},{cores},{memory_mib}]").appName(name)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
