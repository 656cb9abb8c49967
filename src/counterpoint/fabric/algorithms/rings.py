"""All-reduces around rings: every rank sends to the next one only, and none sends more than ``2n``.

Each chunk is added up on its way around by one rank after the other, and copied from the last of them.

Source:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from __future__ import annotations

from math import isqrt

from counterpoint.fabric.algorithms.schedule import Move, Rounds, Schedule, Verb, beside, placed


def ring(num_ranks: int) -> Schedule:
    """Every chunk goes around twice, once to be added up and once to be copied.

    Cost:
        ``2 (K-1)`` steps of ``n / K`` elements; a rank sends ``2 n (K-1) / K``, the least that is possible.
    """
    return Schedule(num_ranks, num_ranks, ring_reduce_scatter(num_ranks) + ring_all_gather(num_ranks))


def pipelined_ring(num_ranks: int, num_segments: int = 2) -> Schedule:
    """A ring whose chunks travel in segments: while one is on its way, the one before is added.

    Cost:
        ``2 (K-1) s`` steps of ``n / (K s)`` elements, bytes as :func:`ring`; adding is hidden behind the link.

    Source:
        Gibiansky, Bringing HPC techniques to deep learning, 2017; gloo's ``allreduce_ring_chunked``.
    """
    rounds = tuple(
        tuple(
            Move(move.sender, move.receiver, range(at := move.chunks.start * num_segments + segment, at + 1), move.verb)
            for move in moves
        )
        for moves in ring(num_ranks).rounds
        for segment in range(num_segments)
    )
    return Schedule(num_ranks, num_ranks * num_segments, rounds)


def torus(num_ranks: int, num_rows: int | None = None) -> Schedule:
    """Ranks in a grid: rings along the rows share the sum, rings along the columns complete it, the rows gather it.

    Args:
        num_ranks: members; rank ``i * num_columns + j`` stands in row ``i``.
        num_rows: a divisor of ``num_ranks``; by default the largest up to its root. A prime number of ranks has one
            row, which is :func:`ring`.

    Cost:
        ``2 (C-1) + 2 (R-1)`` steps for ``R`` rows of ``C``; a rank sends ``2 n (K-1) / K`` elements.

    Source:
        Mikami et al., Massively distributed SGD, ImageNet/ResNet-50 training in a flash, 2018.
    """
    rows, columns = grid(num_ranks, num_rows)
    across = [[row * columns + column for column in range(columns)] for row in range(rows)]
    down = [[row * columns + column for row in range(rows)] for column in range(columns)]
    share = beside(placed(ring_reduce_scatter(columns), members, scale=rows) for members in across)
    complete = beside(placed(ring(rows).rounds, members, first=part * rows) for part, members in enumerate(down))
    gather = beside(placed(ring_all_gather(columns), members, scale=rows) for members in across)
    return Schedule(num_ranks, num_ranks, share + complete + gather)


def grid(num_ranks: int, num_rows: int | None = None) -> tuple[int, int]:
    """Return the rows and columns of a torus, as square as the number of ranks allows.

    Example:
        >>> grid(12), grid(13)
        ((3, 4), (1, 13))
    """
    rows = num_rows or next(rows for rows in range(isqrt(num_ranks), 0, -1) if num_ranks % rows == 0)
    if num_ranks % rows != 0:
        raise ValueError(f"{num_ranks} ranks do not stand in {rows} rows; give a divisor of {num_ranks}")
    return rows, num_ranks // rows


def ring_reduce_scatter(num_ranks: int) -> Rounds:
    """Each rank has the sum of one chunk, the one with its number."""
    return _around(num_ranks, ahead=-1, verb="add")


def ring_all_gather(num_ranks: int) -> Rounds:
    """Each rank's chunk, the one with its number, is everywhere."""
    return _around(num_ranks, ahead=0, verb="copy")


def _around(num_ranks: int, *, ahead: int, verb: Verb) -> Rounds:
    """Return rounds in which every rank first sends the chunk ``ahead`` of its number, and then what just came."""
    return tuple(
        tuple(
            Move(rank, (rank + 1) % num_ranks, range(chunk := (rank + ahead - turn) % num_ranks, chunk + 1), verb)
            for rank in range(num_ranks)
        )
        for turn in range(num_ranks - 1)
    )
