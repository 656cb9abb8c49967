"""The table of strategies and models: how far each is from the solo run."""

import torch

from counterpoint.testing.claims import Options, Result
from counterpoint.testing.parity import BAR, cell, cells_on_processes
from counterpoint.testing.subjects import STRATEGIES

MODELS = ("mlp", "cnn", "gpt")


def measure(options: Options) -> Result:
    torch.set_num_threads(1)
    cells = []
    for strategy in ("solo", *STRATEGIES):
        options.tell(strategy)
        cells += [cell(name, strategy) for name in MODELS]
    columns = {name: {found.strategy: found for found in cells if found.subject == name} for name in MODELS}
    for num_ranks in (2, 3) if options.processes else ():
        options.tell(f"{num_ranks} processes")
        found = cells_on_processes(num_ranks)
        columns[f"mlp, {num_ranks} processes"] = {one.strategy: one for one in found}
        cells += found
    rows = list(dict.fromkeys(one.strategy for one in cells))
    return Result(
        columns=("strategy", *columns),
        rows=tuple((row, *(shown(column.get(row)) for column in columns.values())) for row in rows),
        missed=tuple(
            f"{one.strategy} on {one.subject}, {one.world}: {one.worst:.1e} is above {BAR:.0e} ({one.law})"
            for one in cells
            if not one.worst <= BAR
        ),
        figures={f"{one.strategy} / {one.subject} / {one.world}": one.worst for one in cells},
        notes={"*": "running statistics are the mean over the replicas of each one's own, weighted by microbatches"},
    )


def shown(one):
    if one is None:
        return ""
    return f"{one.worst:.1e}" + (" *" if "running statistics" in one.law else "")
