"""All-reduces: formulas of the literature compared with counts of the schedules."""

from __future__ import annotations

from functools import cache
from math import log2

from benchmarks.published.table import FigureRow, FigureTable
from counterpoint.fabric.collectives import ALGORITHMS, ChunkLayout, count_traffic
from counterpoint.fabric.collectives.execute import num_steps
from counterpoint.world.cluster import Link

LENGTH = 16 * 17 * 2 * 4096  # elements of one byte; all that is shown divides it
LINK, REDUCE_BYTES_PER_S = Link(), 10e9
SHOWN = {
    "binomial_tree": (4, 8, 16),
    "butterfly": (4, 8, 16),
    "halving_doubling": (4, 8, 16),
    "ring": (4, 8, 16, 17),
    "star": (4, 8, 16, 17),
}


def formula(name: str, k: int) -> tuple[float, float, float]:
    """Return the latency rounds, and the buffers sent and reduced on the critical path, as published."""
    levels = log2(k)
    return {
        "binomial_tree": (2 * levels, 2 * levels, levels),
        "butterfly": (levels, levels, levels),
        "halving_doubling": (2 * levels, 2 * (k - 1) / k, (k - 1) / k),
        "ring": (2 * (k - 1), 2 * (k - 1) / k, (k - 1) / k),
        "star": (2 * (k - 1), 2 * (k - 1), k - 1),
    }[name]


@cache
def all_reduce_table() -> FigureTable:
    """Return steps, bytes and seconds."""
    rows = []
    for name, all_ranks in SHOWN.items():
        for k in all_ranks:
            rounds, sent, added = formula(name, k)
            algorithm = ALGORITHMS[name]
            schedule, group, cost = algorithm.schedule(k), algorithm.group(k), algorithm.cost(k, ChunkLayout(LENGTH))
            counts = count_traffic(schedule, ChunkLayout(LENGTH), group=group)
            most = max(counts[rank].sent_bytes for rank in range(k)) / LENGTH
            if name in {"butterfly", "halving_doubling", "ring"}:  # every rank sends what the longest path has
                rows.append(FigureRow((name, str(k), "buffers that a rank sends"), f"{sent:.4f}", most))
            rows.append(FigureRow((name, str(k), "steps"), f"{rounds:.0f}", num_steps(schedule, group)))
            seconds = rounds * LINK.latency_s + LENGTH * (sent / LINK.bytes_per_s + added / REDUCE_BYTES_PER_S)
            rows.append(
                FigureRow((name, str(k), "ms"), f"{1e3 * seconds:.4f}", 1e3 * cost.seconds(LINK, 1, REDUCE_BYTES_PER_S))
            )
    return FigureTable(
        "All-reduces",
        "Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, "
        "sections 3 and 4 (tree, recursive doubling, halving and doubling); Patarasuk and Yuan, Bandwidth "
        "Optimal All-Reduce Algorithms for Clusters of Workstations, JPDC 2009 (ring); `2(K-1)` steps by "
        "definition (star).",
        f"The schedules that the fabric runs, counted for a buffer of {LENGTH:,} bytes; seconds for a latency of "
        "50 us, 1 GB/s on links and 10 GB/s of additions. `counterpoint bench allreduce-table` shows 2 to 17 ranks.",
        ("algorithm", "ranks", "figure"),
        tuple(rows),
    )
