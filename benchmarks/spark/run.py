"""Training on Spark: two jobs per step and the same plan on ranks; a barrier stage and TorchDistributor."""

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from torch import nn

from counterpoint.launchers.function import launch
from counterpoint.launchers.spark import start_spark
from counterpoint.spark.ranks import run_ranks
from counterpoint.spark.training import train
from counterpoint.spark.training_loop import SparkOptions as Training
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

sys.path.insert(0, str(Path(__file__).parent))

import contenders

HERE = Path(__file__).parent
ROUNDS, RANKS, STEPS = 3, 2, {"small": 200, "large": 20}
JOB_STEPS, JOB_WARM_UP = 12, 3
PLAN, MAX_LOSS_DIFFERENCE = "zero(2, level=1)", 1e-3
COLUMNS = ("model", "how", "ms per step", "over", "call, s")


def run_bigdl(spark, name):
    """Return seconds per step in two jobs, and the last loss."""
    fields = contenders.samples(name)
    rows = spark.sparkContext.parallelize(list(zip(*fields, strict=True)), RANKS)
    ended = [time.perf_counter()]
    options = Training(batch_size=contenders.BATCH, epochs=JOB_STEPS)
    done = train(
        rows, contenders.build(name), loss=nn.functional.cross_entropy, optimizer=contenders.sgd, options=options,
        on_step=lambda _: ended.append(time.perf_counter()),
    )  # fmt: skip
    took = [after - before for before, after in pairwise(ended)]
    return [statistics.median(took[JOB_WARM_UP:]), done.losses[-1]]


def run_local(_spark, name):
    """Return seconds per step of the same plan on ranks of this host, and the last loss."""
    return launch(
        contenders.run_counterpoint,
        ranks=RANKS,
        args=[name, PLAN, STEPS[name]],
        threads_per_rank=1,
        on_line=discard_line,
    )[0]


def run_barrier(spark, name):
    """Return seconds per step of data parallelism in ranks of a barrier stage, and the last loss."""
    return run_ranks(spark, contenders.run_counterpoint, ranks=RANKS, args=[name, f"data({RANKS})", STEPS[name]])[0]


def run_distributor(spark, name):
    """Return seconds per step of DDP in ranks of TorchDistributor, and the last loss."""
    from pyspark.ml.torch.distributor import TorchDistributor

    del spark  # TorchDistributor finds the session
    return TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(
        contenders.run_ddp, name, STEPS[name]
    )


CONTENDERS = {
    "two jobs per step": (run_bigdl, "the same plan on ranks"),
    "the same plan on ranks": (run_local, ""),
    "data(2) in a barrier stage": (run_barrier, ""),
    "DDP, TorchDistributor": (run_distributor, "data(2) in a barrier stage"),
}
"""By contender: its function, and the contender that it is compared with."""


def discard_line(_line):
    """Ignore a line printed by a rank."""


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    import pyspark

    rounds, taken = options.num_rounds(ROUNDS), {}
    models = ("small",) if options.is_quick else tuple(contenders.MODELS)
    paths = [HERE, *map(Path, filter(None, sys.path)), Path(pyspark.__file__).parents[1]]
    spark = start_spark(executors=RANKS, settings={"spark.executorEnv.PYTHONPATH": ":".join(map(str, paths))})
    spark.sparkContext.setLogLevel("OFF")
    try:
        for number in range(rounds):
            options.report_progress(f"round {number + 1} of {rounds}")
            names = list(CONTENDERS)[number % len(CONTENDERS) :] + list(CONTENDERS)[: number % len(CONTENDERS)]
            for name in models:
                for side in names:
                    began = time.perf_counter()
                    step_s, loss = CONTENDERS[side][0](spark, name)
                    taken.setdefault((name, side), []).append((step_s, loss, time.perf_counter() - began))
    finally:
        spark.stop()
    return make_result(taken, models)


def make_result(taken, models):
    """Return the table and the missed bars."""
    rows, missed, figures = [], [], {}
    for (name, side), turns in taken.items():
        beside = CONTENDERS[side][1]
        over = ratio(turns, taken[name, beside]) if beside else None
        figures[f"{name}: {side}"] = {"turns": turns, "over": over}
        step_ms, call_s = (statistics.median(turn[at] for turn in turns) for at in (0, 2))
        shown = f"{over:.2f} of {beside}" if beside else "-"
        rows.append((name, side, f"{1e3 * step_ms:.2f}", shown, f"{call_s:.1f}"))
        if side.startswith("DDP") and not over >= 1:
            missed.append(f"{name}: a step in a barrier stage takes {1 / over:.2f} of one of DDP; at most 1 required")
    for name in models:
        losses = {side: taken[name, side][0][1] for side in list(CONTENDERS)[1:]}
        if max(losses.values()) - min(losses.values()) > MAX_LOSS_DIFFERENCE:
            missed.append(f"{name}: the contenders reach different losses: {losses}")
    over_ms = {
        name: 1e3
        * statistics.median(
            one[0] - other[0]
            for one, other in zip(taken[name, "two jobs per step"], taken[name, "the same plan on ranks"], strict=True)
        )
        for name in models
    }
    note = "; ".join(f"{name} {ms:.0f} ms" for name, ms in over_ms.items())
    return BenchmarkResult(COLUMNS, tuple(rows), tuple(missed), figures, {"overhead of two jobs per step:": note})


def ratio(turns, others):
    """Return the median over rounds of the ratio of two contenders' step times."""
    return statistics.median(own[0] / other[0] for own, other in zip(turns, others, strict=True))
