"""Going on from a cut after everybody has died: the coordinator's log ends with it, and nobody belongs to the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from counterpoint.errors import CheckpointError
from counterpoint.server.book import Book
from counterpoint.server.coordinator import LOG
from counterpoint.server.hosting.folder import lines_of, log_path, part_path, read_state, recovered_log, write_pieces
from counterpoint.server.job import Job
from counterpoint.server.lines import Decision, Resumed
from counterpoint.server.log import pieces


def resume(folder: Path, job: Job) -> int | None:
    """The job can be started from this folder again; returns the cut that it goes on from.

    A server that keeps its shard alone and writes everything down has lost nothing, and goes on from where it was:
    then None is returned. Otherwise everything after the last whole cut is forgotten, tasks included.

    Args:
        folder: of the job, in which nobody works any more.
        job: as it was.

    Raises:
        CheckpointError: there is no whole cut, or a part of it is damaged.
    """
    if job.num_servers == 1 and job.is_logged:
        return None
    lines = recovered_log(folder, LOG)
    book, ends = _played(job, lines)
    if not ends:
        raise CheckpointError(
            f"there is no whole cut in {folder}, and what servers knew died with them; begin anew in an empty folder, "
            "and let a worker ask for checkpoints"
        )
    cut = len(ends) - 1  # they are numbered from 0 in their order
    for shard in range(job.num_shards):
        read_state(part_path(folder, cut, shard))
    kept = [*lines[: ends[-1]], Resumed(cut, book.generation, book.incarnation)]
    write_pieces(log_path(folder, LOG), [piece for line in kept for piece in pieces(line)])
    return cut


def whole_cuts(folder: Path, job: Job) -> list[int]:
    """Return the cuts in the folder of a job that are whole, oldest first; the job may be at work."""
    lines, _ = lines_of(log_path(folder, LOG))
    return list(range(len(_played(job, lines)[1])))


def _played(job: Job, lines: Sequence[Decision]) -> tuple[Book, list[int]]:
    """Return the book after all lines, and after how many each cut was whole."""
    book, ends = Book(job), list[int]()
    for end, line in enumerate(lines, 1):
        book.apply(line)
        if len(book.cuts) > len(ends):
            ends.append(end)
    return book, ends
