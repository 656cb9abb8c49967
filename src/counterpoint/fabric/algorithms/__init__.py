"""Every all-reduce of the books, written once: as data, run on any fabric by one executor.

``schedule.py`` is the form; ``trees.py``, ``butterflies.py``, ``rings.py`` and ``hierarchies.py`` hold the algorithms,
pure functions from numbers of ranks to schedules. ``execute.py`` runs one on a fabric, ``interpret.py`` on arrays in
memory, ``count.py`` reads off what it costs and ``formulas.py`` says so in closed form; ``table.py`` has them all, and
``choose.py`` takes the cheapest.
"""

from counterpoint.fabric.algorithms.choose import Choice, Network, choose
from counterpoint.fabric.algorithms.count import Counts, count
from counterpoint.fabric.algorithms.execute import execute
from counterpoint.fabric.algorithms.interpret import interpret
from counterpoint.fabric.algorithms.schedule import Extent, Move, Row, Schedule, row_of
from counterpoint.fabric.algorithms.table import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Choice",
    "Counts",
    "Extent",
    "Move",
    "Network",
    "Row",
    "Schedule",
    "choose",
    "count",
    "execute",
    "interpret",
    "row_of",
]
