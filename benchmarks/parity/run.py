"""Table of strategies and models: difference of each from single-process training."""

import torch

from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult
from counterpoint.testing.parity import TOLERANCE, check_parity, results_of_processes
from counterpoint.testing.parity_models import STRATEGIES

MODELS = ("mlp", "cnn", "gpt")


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    torch.set_num_threads(1)
    cells, models = [], MODELS[:1] if options.is_quick else MODELS
    for strategy in ("solo", *STRATEGIES)[: 3 if options.is_quick else None]:
        options.report_progress(strategy)
        cells += [check_parity(name, strategy) for name in models]
    columns = {name: {found.strategy: found for found in cells if found.model == name} for name in models}
    for num_ranks in (2, 3) if options.processes else ():
        options.report_progress(f"{num_ranks} processes")
        found = results_of_processes(num_ranks)
        columns[f"mlp, {num_ranks} processes"] = {one.strategy: one for one in found}
        cells += found
    rows = list(dict.fromkeys(one.strategy for one in cells))
    return BenchmarkResult(
        columns=("strategy", *columns),
        rows=tuple((row, *(format_cell(column.get(row)) for column in columns.values())) for row in rows),
        missed=tuple(
            f"{one.strategy} on {one.model}, {one.world}: {one.worst:.1e} is above {TOLERANCE:.0e} ({one.expectation})"
            for one in cells
            if not one.worst <= TOLERANCE
        ),
        figures={f"{one.strategy} / {one.model} / {one.world}": one.worst for one in cells},
        notes={"*": "running statistics are the mean over the replicas, weighted by microbatches"},
    )


def format_cell(one):
    if one is None:
        return ""
    return f"{one.worst:.1e}" + (" *" if "running statistics" in one.expectation else "")
