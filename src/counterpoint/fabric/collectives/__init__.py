"""Every all-reduce of the books, written once: as data, run on any fabric by one executor.

``schedule.py`` is the form; ``trees.py``, ``butterflies.py``, ``rings.py`` and ``hierarchies.py`` hold the algorithms,
pure functions from numbers of ranks to schedules. ``execute.py`` runs one on a fabric, ``interpret.py`` on arrays in
memory, ``count.py`` reads off what it costs and ``formulas.py`` says so in closed form; ``table.py`` has them all, and
``choose.py`` takes the cheapest.
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
    "AllReduceAlgorithm",
    "AlgorithmChoice",
    "RankTraffic",
    "ChunkLayout",
    "ChunkTransfer",
    "HostLinks",
    "RankSchedule",
    "AllReduceSchedule",
    "choose_algorithm",
    "count_traffic",
    "execute",
    "interpret",
    "rank_schedule",
]
