"""Ranks in the tasks of a Spark barrier stage, and local Spark sessions.

Spark starts all tasks of a barrier stage together and lets them exchange strings (``allGather``). Each task starts one
rank as a process; the tasks exchange where rank 0 is, and then every second or so which ranks have ended, and how. So
nothing but the rendezvous store listens on a port, and one failed rank ends all.
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
MAX_POLL_S = 5.0  # between two exchanges in a long run
POLL_FRACTION = 0.02  # of the run time so far
TRACEBACK = "traceback"
TRACEBACK_LINES = 12


class BarrierTaskContext(Protocol):
    """Context of a task in a barrier stage, as ``pyspark.BarrierTaskContext``."""

    def partitionId(self) -> int:  # noqa: N802 - Spark's name
        """Return the index of the task in its stage."""

    def getTaskInfos(self) -> Sequence[Any]:  # noqa: N802
        """Return the addresses of all tasks."""

    def allGather(self, message: str = "") -> list[str]:  # noqa: N802
        """Return all tasks' messages, by index."""


@dataclass(frozen=True, slots=True)
class SparkRankSpec:
    """What to run in every task; serialized with Spark's closures.

    Args:
        command: of every rank; its folder is appended.
        target: the function to call, as ``module:name`` or ``path.py:name``.
        path: additional module search path.
        args: the function's arguments, from ``format_value``.
        job: name of the run.
        num_ranks: required number of tasks.
        cpus: threads of each rank.
        key: the job's secret; never printed.
    """

    command: tuple[str, ...]
    target: str
    path: tuple[str, ...]
    args: bytes
    job: str
    num_ranks: int
    cpus: int = 1
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class SparkRankResult:
    """Result of a task's rank, for the driver.

    Args:
        rank: which.
        report: why the run failed, the same from all tasks; empty if it did not.
        failed_rank: the rank at fault; -1 for none.
        traceback: the last lines of this rank's, if any.
        value: the result, from ``format_value``; empty if the run failed.
    """

    rank: int
    report: str = ""
    failed_rank: int = -1
    traceback: str = ""
    value: bytes = b""


def run_task(
    context: BarrierTaskContext, spec: SparkRankSpec, prepare: Callable[[Path], None], root: str | None = None
) -> SparkRankResult:
    """Run this task's rank until all ranks have ended.

    Args:
        context: of the task.
        spec: what to run.
        prepare: writes the partition's samples to the rank's folder; a DataError of it ends all tasks.
        root: parent of the rank's temporary folder; None for the system's default.
    """
    rank = context.partitionId()
    with tempfile.TemporaryDirectory(prefix="counterpoint-", dir=root) as name:
        folder, agent = Path(name), RankAgent()
        environment = _rendezvous(context, spec, agent, _prepare_failure(context, spec, prepare, folder))
        if isinstance(environment, str):
            return SparkRankResult(rank, environment)
        _write_inputs(folder, spec)
        exits = _supervise(context, agent, [*spec.command, name], environment, spec.cpus, folder)
        root_cause, report = find_root_cause(exits), format_report(exits)
        value = b"" if report else (folder / f"result-{rank}.value").read_bytes()
        traceback = _read_text_or_empty(folder / TRACEBACK)
        return SparkRankResult(rank, report, -1 if root_cause is None else root_cause.rank, traceback, value)


def _prepare_failure(
    context: BarrierTaskContext, spec: SparkRankSpec, prepare: Callable[[Path], None], folder: Path
) -> str:
    """Prepare the rank's folder; return why the rank cannot start, or an empty string."""
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
    """Return this rank's environment, or why the ranks do not start, the same on all tasks."""
    rank = context.partitionId()
    hosts = [str(info.address).rpartition(":")[0] or str(info.address) for info in context.getTaskInfos()]
    message: list[Any] = [failure, "", 0]
    if rank == 0 and not failure:
        message[1:] = agent.reserve(LOOPBACK if len(set(hosts)) == 1 else None)
    messages = [json.loads(text) for text in context.allGather(json.dumps(message))]
    failed = [number for number, (text, *_) in enumerate(messages) if text]
    if failed:
        return f"rank {failed[0]} could not start: {messages[failed[0]][0]}"
    _, host, port = messages[0]
    local_tasks = [number for number, name in enumerate(hosts) if name == hosts[rank]]
    return RankEnvironment(rank, len(hosts), local_tasks.index(rank), len(local_tasks), host, port, spec.job)


def _write_inputs(folder: Path, spec: SparkRankSpec) -> None:
    """Write the call and the job's key, readable by the owner only, to the rank's folder."""
    (folder / "args.value").write_bytes(spec.args)
    path = [*sys.path, *(place for place in spec.path if place not in sys.path)]
    write_value(folder, "call", {"target": spec.target, "path": path})
    if spec.key:
        write_key(JobKey(spec.key), folder / "key")


def _supervise(
    context: BarrierTaskContext,
    agent: RankAgent,
    command: Sequence[str],
    rank_environment: RankEnvironment,
    cpus: int,
    folder: Path,
) -> list[RankExit]:
    """Run the rank; return how all ranks ended. If one fails, stop this one."""
    key = folder / "key"
    environment = replace(rank_environment, key_file=str(key)) if key.exists() else rank_environment
    began, stop_at_s = time.monotonic(), float("inf")
    stopped_s: float | None = None
    exits: dict[int, RankExit] = {}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(agent.run, command, environment, thread_variables(cpus))
        try:
            while len(exits) < rank_environment.world_size:
                _wait_round(running, began)
                ago_s = None if stopped_s is None else time.monotonic() - stopped_s
                message = [running.result(), ago_s] if running.done() else None
                _collect_exits(exits, context.allGather(json.dumps(message)))
                now_s, exited = time.monotonic(), list(exits.values())
                stop_at_s = min(stop_at_s, now_s + wait_for_others_s(exited))
                if stopped_s is None and stop_at_s <= now_s and not running.done():
                    stopped_s = now_s
                    agent.stop()
        finally:
            if not running.done():
                agent.stop()
    return [exits[rank] for rank in sorted(exits)]


def _wait_round(running: Future[RankExitInfo], began: float) -> None:
    """Wait until the rank has ended, or for the next exchange."""
    elapsed_s = time.monotonic() - began
    try:
        running.result(min(max(POLL_S, POLL_FRACTION * elapsed_s), MAX_POLL_S))
    except NotYetError:
        return


def _collect_exits(exits: dict[int, RankExit], messages: Sequence[str]) -> None:
    """Record the ranks that have ended since the last exchange."""
    now_s = time.monotonic()
    for rank, text in enumerate(messages):
        message = json.loads(text)
        if message is not None and rank not in exits:
            info, ago_s = message
            exits[rank] = to_rank_exit(rank, info, now_s, None if ago_s is None else now_s - ago_s)


def _read_text_or_empty(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIN_JAVA_VERSION = 17
"""The oldest Java version that Spark 4 supports."""

REMEDY = "install one, on Debian with apt-get install openjdk-17-jre-headless, or set JAVA_HOME"


def missing_for_spark() -> str:
    """Return what Spark needs and is missing, and how to get it; empty if nothing is."""
    if find_spec("pyspark") is None:
        return "PySpark is not installed; pip install 'counterpoint[spark]'"
    java = java_path()
    if java is None:
        return f"Java, which Spark needs, is not installed; {REMEDY}"
    completed = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60)
    major = java_major(completed.stderr + completed.stdout)
    if major is None:
        return f"{java} does not say its version: {(completed.stderr + completed.stdout).strip()[:200]!r}; {REMEDY}"
    if major < MIN_JAVA_VERSION:
        return f"{java} is Java {major}, but Spark 4 needs {MIN_JAVA_VERSION} or newer; {REMEDY}"
    return ""


def java_path() -> str | None:
    """Return the Java executable that Spark would use: JAVA_HOME's, else the first on the path."""
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        return str(path) if path.is_file() else None
    return shutil.which("java")


def java_major(text: str) -> int | None:
    """Return the major version from the output of ``java -version``.

    Example:
        >>> java_major('openjdk version "17.0.15" 2025-04-15'), java_major('java version "1.8.0_202"')
        (17, 8)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def start_spark(
    *,
    executors: int = 2,
    cores: int = 1,
    memory_mib: int = 1024,
    name: str = "counterpoint",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with executors on this machine; end it with ``stop()``.

    Args:
        executors: Java processes, each of which starts Python workers.
        cores: concurrent tasks of each.
        memory_mib: of each.
        name: of the application.
        settings: of Spark, which override the defaults.

    Raises:
        LaunchError: PySpark or Java is missing, or too old.
    """
    missing = missing_for_spark()
    if missing:
        raise LaunchError(f"Spark cannot start: {missing}")
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # not reachable from other hosts
    chosen = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{memory_mib}m",
        "spark.executor.memory": f"{memory_mib}m",
        # A barrier stage without enough slots fails after a second instead of ten minutes.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        **(settings or {}),
    }
    builder = SparkSession.builder.master(f"local-cluster[{executors},{cores},{memory_mib}]").appName(name)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
