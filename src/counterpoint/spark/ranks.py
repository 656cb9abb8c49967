"""Ranks in a barrier stage of Spark, each with the samples of one partition: any plan on Spark's machines."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from counterpoint.errors import LaunchError
from counterpoint.launchers.function import format_value, import_path
from counterpoint.launchers.spark import SparkRankResult, SparkRankSpec, run_task
from counterpoint.spark.failures import translate_spark_errors
from counterpoint.spark.sample_readers import ArrowReader, RowReader, SampleColumn
from counterpoint.spark.samples import check_columns
from counterpoint.spark.settings import warn_insecure_settings
from counterpoint.value_codec import decode_value

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession

SampleReader: TypeAlias = Callable[[Iterable[Any], Path], None]
SCHEMA = "rank int, report string, value binary"
EXECUTOR_STARTUP_S = 20.0  # time that executors may take to register after Spark's start


def run_ranks(
    source: SparkSession | DataFrame | RDD[Any],
    function: Callable[..., Any],
    *,
    ranks: int | None = None,
    args: Sequence[object] = (),
    columns: Sequence[str] = ("features", "label"),
    dtype: str = "float32",
) -> list[Any]:
    """Run a function as ranks in the tasks of one barrier stage, and return the result of each rank.

    A rank is a separate process that its task starts and watches, with the same environment as under any launcher: a
    ``Trainer`` or a plan of ``parallelize`` in it runs over all ranks. If Spark loses an executor or a task, it
    restarts the whole stage, and the function starts again.

    Args:
        source: a session, for ranks without data; or a DataFrame or an RDD, of which each rank gets one partition. The
            function's first argument is then a :class:`counterpoint.spark.shard.SampleShard`.
        function: importable by another process: defined at module level in a file that the executors have.
        ranks: number of ranks; by default the number of partitions of the data, or 1. Data with another number of
            partitions is repartitioned.
        args: as for ``launch``, the same for every rank.
        columns: of a DataFrame: input columns, then the target column.
        dtype: dtype that floating-point values are converted to.

    Raises:
        LaunchError: Spark has too few slots for all ranks, or a rank failed: the first line names it, and the last
            lines of its traceback follow.
        DataError: a column cannot be used.
    """
    from pyspark.sql import DataFrame, SparkSession

    rows: Any = source.rdd if isinstance(source, DataFrame) else source
    context: Any = source.sparkContext if isinstance(source, SparkSession) else rows.context
    settings = dict(context.getConf().getAll())
    warn_insecure_settings(context.master, settings)
    count = ranks or (1 if isinstance(source, SparkSession) else rows.getNumPartitions())
    check_slots(context, count)
    spec = make_rank_spec(function, args, count, int(settings.get("spark.task.cpus", "1")))
    with translate_spark_errors(f"the {count} ranks of {spec.target}"):
        if isinstance(source, SparkSession):
            result_rows = (
                context.parallelize(range(count), count).barrier().mapPartitions(RankTask(spec, None)).collect()
            )
        else:
            data: Any = source if rows.getNumPartitions() == count else source.repartition(count)
            if isinstance(source, DataFrame):
                frame, reader = select_columns(data, columns, dtype)
                result_rows = frame.mapInArrow(ArrowRankTask(RankTask(spec, reader)), SCHEMA, barrier=True).collect()
            else:
                result_rows = data.barrier().mapPartitions(RankTask(spec, RowReader(dtype))).collect()
    return parse_results(result_rows)


def make_rank_spec(function: Callable[..., Any], args: Sequence[object], count: int, cpus: int) -> SparkRankSpec:
    """Return the specification of the ranks, with a new secret key.

    Raises:
        LaunchError: the function or an argument cannot be serialized.
    """
    target = import_path(function)
    if target is None:
        raise LaunchError(
            f"{getattr(function, '__qualname__', function)!r} cannot be imported by another process: it is a lambda, a "
            "bound method, or defined inside a function or a notebook cell; define it at module level in a file, "
            "and ship the file to the executors with spark.addArtifact or addPyFile"
        )
    return SparkRankSpec(
        command=("python", "-m", "counterpoint.spark.task_main"),
        target=target,
        path=tuple(os.path.abspath(entry) for entry in sys.path),  # noqa: PTH100 - an empty entry is the current folder
        args=format_value(list(args), "args"),
        job=f"spark-{secrets.token_hex(6)}",
        num_ranks=count,
        cpus=cpus,
        key=secrets.token_bytes(32),
    )


def check_slots(context: SparkContext, ranks: int) -> None:
    """Check that Spark can run all ranks at the same time.

    Raises:
        LaunchError: it cannot. Soon after Spark's start, executors get time to register first.
    """
    scala: Any = context._jsc.sc()  # noqa: SLF001 - not in PySpark's public API
    jvm: Any = context._jvm  # noqa: SLF001
    clock = jvm.java.lang.System.currentTimeMillis
    profile = scala.resourceProfileManager().defaultResourceProfile()
    slots = int(scala.maxNumConcurrentTasks(profile))
    while slots < ranks and clock() - int(scala.startTime()) < 1000 * EXECUTOR_STARTUP_S:
        time.sleep(0.25)
        slots = int(scala.maxNumConcurrentTasks(profile))
    if slots < ranks:
        raise LaunchError(
            f"{ranks} ranks must run at the same time, but Spark has slots for {slots} tasks "
            f"(master {context.master}, {context.getConf().get('spark.task.cpus', '1')} cores per task); give "
            f"ranks={slots} or fewer, or add executors or cores"
        )


def select_columns(frame: DataFrame, columns: Sequence[str], dtype: str) -> tuple[DataFrame, ArrowReader]:
    """Return a DataFrame of only these columns, Spark's vectors as lists, and the reader for them.

    Raises:
        DataError: a column is missing or not numeric.
        LaunchError: PyArrow or pandas is missing.
    """
    from pyspark.ml.functions import vector_to_array

    missing = [name for name in ("pyarrow", "pandas") if find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"{' and '.join(missing)} cannot be imported, but Spark needs them to pass batches of a DataFrame; pip "
            "install 'counterpoint[spark]'"
        )
    spark_types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    check_columns(spark_types, columns)
    selected = [
        vector_to_array(frame[name]).alias(name) if spark_types[name] == "vector" else frame[name] for name in columns
    ]
    types = ["array<double>" if spark_types[name] == "vector" else spark_types[name] for name in columns]
    sample_columns = tuple(SampleColumn.parse(name, kind, dtype) for name, kind in zip(columns, types, strict=True))
    return frame.select(*selected), ArrowReader(sample_columns)


@dataclass(frozen=True, slots=True)
class RankTask:
    """Function of one task of the barrier stage.

    Args:
        spec: specification of the ranks.
        reader: writes the partition's rows to the rank's folder; None for ranks without data.
    """

    spec: SparkRankSpec
    reader: SampleReader | None

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[int, str, bytes]]:
        """Run the rank, and yield its result as a row."""
        from pyspark import BarrierTaskContext, SparkFiles

        def prepare(folder: Path) -> None:
            if self.reader is not None:
                self.reader(rows, folder)

        yield to_row(run_task(BarrierTaskContext.get(), self.spec, prepare, SparkFiles.getRootDirectory()))


@dataclass(frozen=True, slots=True)
class ArrowRankTask:
    """The same task, from Arrow batches to Arrow batches.

    Args:
        task: from batches to rows.
    """

    task: RankTask

    def __call__(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """Run the rank, and yield its result as one batch."""
        import pyarrow

        ((rank, report, value),) = self.task(batches)
        arrays = [
            pyarrow.array([rank], pyarrow.int32()), pyarrow.array([report]), pyarrow.array([value], pyarrow.binary())
        ]  # fmt: skip
        yield pyarrow.RecordBatch.from_arrays(arrays, ["rank", "report", "value"])


def to_row(result: SparkRankResult) -> tuple[int, str, bytes]:
    """Return the result of a rank as a row of (rank, report as JSON, value)."""
    fields = asdict(result)
    value = fields.pop("value")
    return result.rank, json.dumps(fields), value


def parse_results(rows: Iterable[tuple[int, str, bytes]]) -> list[Any]:
    """Return what each rank returned.

    Raises:
        LaunchError: a rank failed.
    """
    results = [SparkRankResult(**json.loads(report), value=bytes(value)) for _, report, value in sorted(rows)]
    failed = next((result for result in results if result.report), None)
    if failed is not None:
        traceback = results[failed.failed_rank].traceback if failed.failed_rank >= 0 else ""
        details = f"\nthe traceback of rank {failed.failed_rank} ends:\n{traceback}" if traceback else ""
        raise LaunchError(failed.report + details)
    return [decode_value(result.value) for result in results]
