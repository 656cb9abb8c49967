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
from counterpoint.launchers.function import import_path, read_value, write_value
from counterpoint.launchers.spark import SparkRankResult, SparkRankSpec, run_task
from counterpoint.spark.failures import translate_spark_errors
from counterpoint.spark.sample_readers import ArrowReader, RowReader, SampleColumn
from counterpoint.spark.samples import check_columns
from counterpoint.spark.settings import warn_insecure_settings

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession

SampleReader: TypeAlias = Callable[[Iterable[Any], Path], None]
SCHEMA = "rank int, name string, content binary"
EXECUTOR_STARTUP_S = 20.0  # so long after Spark has started its executors may still be on their way


def run_ranks(
    source: SparkSession | DataFrame | RDD[Any],
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
            The function's first argument is then a :class:`counterpoint.spark.shard.SampleShard`.
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

    rows: Any = source.rdd if isinstance(source, DataFrame) else source
    context: Any = source.sparkContext if isinstance(source, SparkSession) else rows.context
    settings = dict(context.getConf().getAll())
    warn_insecure_settings(context.master, settings)
    count = ranks or (1 if isinstance(source, SparkSession) else rows.getNumPartitions())
    check_slots(context, count)
    order = make_rank_spec(function, args, count, int(settings.get("spark.task.cpus", "1")))
    with translate_spark_errors(f"the {count} ranks of {order.target}"):
        if isinstance(source, SparkSession):
            found = context.parallelize(range(count), count).barrier().mapPartitions(RankTask(order, None)).collect()
        else:
            data: Any = source if rows.getNumPartitions() == count else source.repartition(count)
            if isinstance(source, DataFrame):
                frame, laying = select_columns(data, columns, dtype)
                found = frame.mapInArrow(ArrowRankTask(RankTask(order, laying)), SCHEMA, barrier=True).collect()
            else:
                found = data.barrier().mapPartitions(RankTask(order, RowReader(dtype))).collect()
    return parse_results(found, count)


def make_rank_spec(function: Callable[..., Any], args: Sequence[object], count: int, cpus: int) -> SparkRankSpec:
    """Return what the tasks are told, with a key that nobody has had.

    Raises:
        LaunchError: the function or an argument cannot travel.
    """
    target = import_path(function)
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
    return SparkRankSpec(
        command=("python", "-m", "counterpoint.spark.task_main"),
        target=target,
        path=tuple(os.path.abspath(place) for place in sys.path),  # noqa: PTH100 - an empty one is this folder
        files=files,
        job=f"spark-{secrets.token_hex(6)}",
        num_ranks=count,
        cpus=cpus,
        key=secrets.token_bytes(32),
    )


def check_slots(context: SparkContext, ranks: int) -> None:
    """Check that Spark has room for all ranks at once.

    Raises:
        LaunchError: it has not; right after Spark's start only once its executors have had time to come.
    """
    scala: Any = context._jsc.sc()  # noqa: SLF001 - Python has no other way to ask
    jvm: Any = context._jvm  # noqa: SLF001
    clock = jvm.java.lang.System.currentTimeMillis
    profile = scala.resourceProfileManager().defaultResourceProfile()
    slots = int(scala.maxNumConcurrentTasks(profile))
    while slots < ranks and clock() - int(scala.startTime()) < 1000 * EXECUTOR_STARTUP_S:
        time.sleep(0.25)
        slots = int(scala.maxNumConcurrentTasks(profile))
    if slots < ranks:
        raise LaunchError(
            f"{ranks} ranks have to run at once, but Spark has room for {slots} tasks "
            f"(master {context.master}, {context.getConf().get('spark.task.cpus', '1')} cores for each task); give "
            f"ranks={slots} or fewer, or Spark more executors or cores"
        )


def select_columns(frame: DataFrame, columns: Sequence[str], dtype: str) -> tuple[DataFrame, ArrowReader]:
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
    check_columns(kinds, columns)
    chosen = [vector_to_array(frame[name]).alias(name) if kinds[name] == "vector" else frame[name] for name in columns]
    types = ["array<double>" if kinds[name] == "vector" else kinds[name] for name in columns]
    found = tuple(SampleColumn.parse(name, kind, dtype) for name, kind in zip(columns, types, strict=True))
    return frame.select(*chosen), ArrowReader(found)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a task of the stage does.

    Args:
        order: what the driver wants.
        laying: puts the rows of the partition into the rank's folder; None for ranks without data.
    """

    spec: SparkRankSpec
    reader: SampleReader | None

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[int, str, bytes]]:
        """Yield what the driver is told, as files."""
        from pyspark import BarrierTaskContext, SparkFiles

        def prepare(folder: Path) -> None:
            if self.reader is not None:
                self.reader(rows, folder)

        told = run_task(BarrierTaskContext.get(), self.spec, prepare, SparkFiles.getRootDirectory())
        yield from to_file_rows(told)


@dataclass(frozen=True, slots=True)
class ArrowRankTask:
    """The same, from batches to batches.

    Args:
        task: from batches to files.
    """

    task: RankTask

    def __call__(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield one batch of what the driver is told."""
        import pyarrow

        ranks, names, contents = zip(*self.task(batches), strict=True)
        arrays = [
            pyarrow.array(ranks, pyarrow.int32()), pyarrow.array(names), pyarrow.array(contents, pyarrow.binary())
        ]  # fmt: skip
        yield pyarrow.RecordBatch.from_arrays(arrays, ["rank", "name", "content"])


def to_file_rows(result: SparkRankResult) -> list[tuple[int, str, bytes]]:
    """Return what is told as files."""
    plain = {key: value for key, value in asdict(result).items() if key != "files"}
    return [(result.rank, "told", json.dumps(plain).encode()), *((result.rank, *pair) for pair in result.files.items())]


def parse_results(rows: Iterable[Sequence[Any]], count: int) -> list[Any]:
    """Return what each rank returned.

    Raises:
        LaunchError: one failed.
    """
    found: dict[int, dict[str, bytes]] = {}
    for rank, name, content in rows:
        found.setdefault(rank, {})[name] = bytes(content)
    told = [SparkRankResult(**json.loads(found[rank]["told"])) for rank in sorted(found)]
    failed = next((one for one in told if one.report), None)
    if failed is not None:
        ending = told[failed.failed_rank].traceback if failed.failed_rank >= 0 else ""
        more = f"\nthe traceback of rank {failed.failed_rank} ends:\n{ending}" if ending else ""
        raise LaunchError(failed.report + more)
    return [_read_result(found[rank], rank) for rank in range(count)]


def _read_result(files: Mapping[str, bytes], rank: int) -> Any:  # noqa: ANN401 - whatever the function returned
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return read_value(folder, f"result-{rank}")
