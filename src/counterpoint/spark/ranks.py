"""Ranks in a barrier stage of Spark, each with the samples of one partition: any plan, on Spark's machines."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from counterpoint.errors import LaunchError
from counterpoint.launchers.barrier import Order, Told, run_task
from counterpoint.launchers.function import can_reach
from counterpoint.launchers.values import read_value, write_value
from counterpoint.spark.columns import Column, FromArrow, FromRows
from counterpoint.spark.failures import translated
from counterpoint.spark.samples import require_columns
from counterpoint.spark.settings import warn_of_open

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession

Laying: TypeAlias = Callable[[Iterable[Any], Path], None]
SCHEMA = "rank int, name string, content binary"
REGISTERED_S = 20.0  # so long after Spark has started its executors may still be on their way


def run_ranks(
    on: SparkSession | DataFrame | RDD[Any],
    function: Callable[..., Any],
    *,
    ranks: int | None = None,
    args: Sequence[object] = (),
    columns: Sequence[str] = ("features", "label"),
    dtype: str = "float32",
) -> list[Any]:
    """Run a function as ranks in the tasks of one barrier stage, and return what each returned, by rank.

    A rank is a process of its own, started and watched by its task, which knows its place as under any launcher: a
    ``Trainer`` in it, or a plan of ``parallelize``, runs over all of them. Where Spark loses an executor, or a task,
    it starts the whole stage again, and the function begins anew.

    Args:
        on: a session, for ranks without data; or a DataFrame or an RDD, whose partitions the ranks have one each.
            The function's first argument is then a :class:`counterpoint.spark.shard.Shard`.
        function: one that another process can import: defined at the top of a file that the executors have.
        ranks: how many; by default as many as the data have partitions, or 1. Where they have others, they are dealt
            out anew.
        args: JSON values and tensors, the same for every rank.
        columns: of a DataFrame: those of the inputs, and that of the target last.
        dtype: what floating-point numbers are brought to.

    Raises:
        LaunchError: there is no room for all ranks at once, or one failed: the first line names it, and the last lines
            of its traceback follow.
        DataError: a column cannot be used.
    """
    from pyspark.sql import DataFrame, SparkSession

    rows: Any = on.rdd if isinstance(on, DataFrame) else on
    context: Any = on.sparkContext if isinstance(on, SparkSession) else rows.context
    settings = dict(context.getConf().getAll())
    warn_of_open(context.master, settings)
    count = ranks or (1 if isinstance(on, SparkSession) else rows.getNumPartitions())
    require_slots(context, count)
    order = order_of(function, args, count, int(settings.get("spark.task.cpus", "1")))
    with translated(f"the {count} ranks of {order.target}"):
        if isinstance(on, SparkSession):
            found = context.parallelize(range(count), count).barrier().mapPartitions(Task(order, None)).collect()
        else:
            data: Any = on if rows.getNumPartitions() == count else on.repartition(count)
            if isinstance(on, DataFrame):
                frame, laying = arrow_columns(data, columns, dtype)
                found = frame.mapInArrow(ArrowTask(Task(order, laying)), SCHEMA, barrier=True).collect()
            else:
                found = data.barrier().mapPartitions(Task(order, FromRows(dtype))).collect()
    return results_of(found, count)


def order_of(function: Callable[..., Any], args: Sequence[object], count: int, cpus: int) -> Order:
    """Return what the tasks are told, with a key that nobody has had.

    Raises:
        LaunchError: the function or an argument cannot travel.
    """
    target = can_reach(function)
    if target is None:
        raise LaunchError(
            f"{getattr(function, '__qualname__', function)!r} cannot be found by another process: it is a lambda, a "
            "method of an object, or defined inside a function or a notebook cell; define it at the top of a file, "
            "and give that to the executors with spark.addArtifact or addPyFile"
        )
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as name:
        folder = Path(name)
        write_value(folder, "args", list(args))
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Order(
        command=("python", "-m", "counterpoint.spark.callee"),
        target=target,
        path=tuple(os.path.abspath(place) for place in sys.path),  # noqa: PTH100 - an empty one is this folder
        files=files,
        job=f"spark-{secrets.token_hex(6)}",
        num_ranks=count,
        cpus=cpus,
        key=secrets.token_bytes(32),
    )


def require_slots(context: SparkContext, ranks: int) -> None:
    """Check that Spark has room for all ranks at once.

    Raises:
        LaunchError: it has not; right after Spark's start only once its executors have had time to come.
    """
    scala: Any = context._jsc.sc()  # noqa: SLF001 - Python has no other way to ask
    jvm: Any = context._jvm  # noqa: SLF001
    clock = jvm.java.lang.System.currentTimeMillis
    profile = scala.resourceProfileManager().defaultResourceProfile()
    slots = int(scala.maxNumConcurrentTasks(profile))
    while slots < ranks and clock() - int(scala.startTime()) < 1000 * REGISTERED_S:
        time.sleep(0.25)
        slots = int(scala.maxNumConcurrentTasks(profile))
    if slots < ranks:
        raise LaunchError(
            f"{ranks} ranks have to run at once, but Spark has room for {slots} tasks "
            f"(master {context.master}, {context.getConf().get('spark.task.cpus', '1')} cores for each task); give "
            f"ranks={slots} or fewer, or Spark more executors or cores"
        )


def arrow_columns(frame: DataFrame, columns: Sequence[str], dtype: str) -> tuple[DataFrame, FromArrow]:
    """Return a DataFrame of these columns alone, Spark's vectors as lists, and what lays them down.

    Raises:
        DataError: there is no such column, or it has no numbers.
        LaunchError: PyArrow or pandas is missing.
    """
    from pyspark.ml.functions import vector_to_array

    missing = [name for name in ("pyarrow", "pandas") if find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"{' and '.join(missing)} cannot be imported, but Spark passes batches of a DataFrame through them; pip "
            "install 'counterpoint[spark]'"
        )
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    require_columns(kinds, columns)
    chosen = [vector_to_array(frame[name]).alias(name) if kinds[name] == "vector" else frame[name] for name in columns]
    types = ["array<double>" if kinds[name] == "vector" else kinds[name] for name in columns]
    found = tuple(Column.parse(name, kind, dtype) for name, kind in zip(columns, types, strict=True))
    return frame.select(*chosen), FromArrow(found)


@dataclass(frozen=True, slots=True)
class Task:
    """What a task of the stage does.

    Args:
        order: what the driver wants.
        laying: puts the rows of the partition into the rank's folder; None for ranks without data.
    """

    order: Order
    laying: Laying | None

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[int, str, bytes]]:
        """Yield what the driver is told, as files."""
        from pyspark import BarrierTaskContext, SparkFiles

        def prepare(folder: Path) -> None:
            if self.laying is not None:
                self.laying(rows, folder)

        told = run_task(BarrierTaskContext.get(), self.order, prepare, SparkFiles.getRootDirectory())
        yield from written(told)


@dataclass(frozen=True, slots=True)
class ArrowTask:
    """The same, from batches to batches.

    Args:
        task: from batches to files.
    """

    task: Task

    def __call__(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield one batch of what the driver is told."""
        import pyarrow

        ranks, names, contents = zip(*self.task(batches), strict=True)
        arrays = [
            pyarrow.array(ranks, pyarrow.int32()), pyarrow.array(names), pyarrow.array(contents, pyarrow.binary())
        ]  # fmt: skip
        yield pyarrow.RecordBatch.from_arrays(arrays, ["rank", "name", "content"])


def written(told: Told) -> list[tuple[int, str, bytes]]:
    """Return what is told as files."""
    plain = {key: value for key, value in asdict(told).items() if key != "files"}
    return [(told.rank, "told", json.dumps(plain).encode()), *((told.rank, *pair) for pair in told.files.items())]


def results_of(rows: Iterable[Sequence[Any]], count: int) -> list[Any]:
    """Return what each rank returned.

    Raises:
        LaunchError: one failed.
    """
    found: dict[int, dict[str, bytes]] = {}
    for rank, name, content in rows:
        found.setdefault(rank, {})[name] = bytes(content)
    told = [Told(**json.loads(found[rank]["told"])) for rank in sorted(found)]
    failed = next((one for one in told if one.report), None)
    if failed is not None:
        ending = told[failed.culprit].traceback if failed.culprit >= 0 else ""
        more = f"\nthe traceback of rank {failed.culprit} ends:\n{ending}" if ending else ""
        raise LaunchError(failed.report + more)
    return [_result(found[rank], rank) for rank in range(count)]


def _result(files: Mapping[str, bytes], rank: int) -> Any:  # noqa: ANN401 - whatever the function returned
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return read_value(folder, f"result-{rank}")
