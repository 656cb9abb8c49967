"""All-reduce algorithms of the literature as data: countable, with costs in closed form, and executable on any fabric.

``schedule.py`` is the representation, ``algorithms.py`` the algorithms, which map a number of ranks to a schedule;
``execute.py`` counts a schedule's traffic and runs it in memory or on a fabric, ``formulas.py`` has costs in closed
form, ``table.py`` lists all algorithms, ``choose.py`` measures links and selects the cheapest, ``adasum.py`` is the
Adasum reduction, and ``gloo_channel.py`` a raw gloo channel for benchmarks. The transports use their own collectives;
of this package they use the grouping of ranks by host.
"""

from counterpoint.fabric.collectives.choose import AlgorithmChoice, HostLinks, choose_algorithm
from counterpoint.fabric.collectives.execute import RankTraffic, count_traffic, execute, interpret
from counterpoint.fabric.collectives.schedule import (
    AllReduceSchedule,
    ChunkLayout,
    ChunkTransfer,
    RankSchedule,
    rank_schedule,
)
from counterpoint.fabric.collectives.table import ALGORITHMS, AllReduceAlgorithm

__all__ = [
    "ALGORITHMS",
    "AlgorithmChoice",
    "AllReduceAlgorithm",
    "AllReduceSchedule",
    "ChunkLayout",
    "ChunkTransfer",
    "HostLinks",
    "RankSchedule",
    "RankTraffic",
    "choose_algorithm",
    "count_traffic",
    "execute",
    "interpret",
    "rank_schedule",
]
