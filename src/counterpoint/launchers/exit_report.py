"""Report of how a run ended: the first line names the rank at fault, and consequences are folded."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from counterpoint.errors import StoppedBySignal
from counterpoint.terminal_text import escape_line, escape_text
from counterpoint.value_codec import parse_json

ROOT_CAUSE_WAIT_S = 1.0  # wait for the root cause, if all failed ranks only report a lost peer
EXIT_WAIT_S = 0.25  # wait for other ranks to end by themselves, once the root cause is known
SAME_ERROR_WAIT_FRACTION = 0.25  # of the time that a rank took to fail: others may raise the same error this much later
SAME_ERROR_MAX_WAIT_S = 2.0
MESSAGE_MAX_CHARS = 4000
RECORD_MAX_BYTES = 65536

STOPPED = StoppedBySignal.__name__

REMEDIES = {
    signal.SIGKILL: (
        "unless a user sent it, the kernel ran out of memory: see dmesg, use fewer ranks or smaller batches"
    ),
    signal.SIGTERM: "something outside this run sent it: a scheduler or a person",
    signal.SIGINT: "something outside this run sent it: a scheduler or a person",
}
CRASH_REMEDY = "native code crashed: the stack of every thread is above; run that rank's work in one process to find it"
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The exception that ended a rank, written by that rank.

    Args:
        kind: name of the exception's type.
        message: its text.
        location: ``file.py:40``, the last line of the user's own code; empty if there is none.
        is_peer: whether it only says that another rank failed.
        time_s: the host's monotonic clock when it was raised.
    """

    kind: str
    message: str
    location: str
    is_peer: bool
    time_s: float

    def write(self, path: Path) -> None:
        """Write the record to ``path`` atomically; an existing record stays."""
        if path.exists():
            return
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps({**asdict(self), "message": self.message[:MESSAGE_MAX_CHARS]}), encoding="utf-8")
        draft.rename(path)

    @staticmethod
    def read(path: Path) -> ErrorRecord | None:
        """Return the record at ``path``; None if there is no valid one."""
        try:
            with path.open("rb") as file:
                content = parse_json(file.read(RECORD_MAX_BYTES))
            return ErrorRecord(
                str(content["kind"]),
                str(content["message"]),
                str(content["location"]),
                bool(content["is_peer"]),
                float(content["time_s"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class RankExit:
    """How one rank ended.

    Args:
        rank: which.
        pid: its process.
        returncode: exit code, or minus the signal that killed it.
        seconds: how long it ran.
        ended_s: the host's monotonic clock when the exit was observed.
        stopped_s: when we sent it the first signal, if we did before it ended.
        error: its error record, if any.
    """

    rank: int
    pid: int
    returncode: int
    seconds: float
    ended_s: float
    stopped_s: float | None = None
    error: ErrorRecord | None = None


def severity(rank_exit: RankExit) -> int:
    """Return how likely the rank failed on its own: 0 certain, 1 probable, 2 reports a lost peer, 3 did not fail."""
    if rank_exit.error is not None and (rank_exit.stopped_s is None or rank_exit.error.time_s < rank_exit.stopped_s):
        return 2 if rank_exit.error.is_peer else 0
    if rank_exit.returncode == 0 or rank_exit.stopped_s is not None:
        return 3
    return 0 if rank_exit.returncode < 0 else 1


def find_root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose exit explains the others: most certain first, then earliest; None if none failed.

    If the failed ranks only wait for one that had exited successfully, it is that one: it exited too early.
    """
    failed = [outcome for outcome in exits if severity(outcome) < 3]
    root_cause = min(
        failed,
        key=lambda rank_exit: (severity(rank_exit), not _is_mismatch_party(rank_exit), _failed_s(rank_exit)),
        default=None,
    )
    if root_cause is None or severity(root_cause) < 2:
        return root_cause
    exited_early = [outcome for outcome in exits if _exited_early(outcome, root_cause)]
    return min(exited_early, key=lambda outcome: outcome.ended_s, default=root_cause)


def wait_for_others_s(exits: Sequence[RankExit], records: Iterable[ErrorRecord] = ()) -> float:
    """Return how many seconds to wait for running ranks before stopping them; infinity unless one has failed.

    If the error is an exception, all ranks may be about to raise it, sooner or later: the longer the first one ran, the
    later the last one. If a rank was killed, or has reported a lost peer, no more of the same kind is expected.

    Args:
        exits: of the ranks that have ended.
        records: error records of running ranks.
    """
    if find_root_cause(exits) is None:
        return inf
    causes = [rank_exit for rank_exit in exits if severity(rank_exit) < 2]
    if not causes:
        return ROOT_CAUSE_WAIT_S
    has_peer_error = any(severity(rank_exit) == 2 for rank_exit in exits) or any(record.is_peer for record in records)
    if has_peer_error or any(rank_exit.error is None for rank_exit in causes):
        return EXIT_WAIT_S
    return min(
        max(EXIT_WAIT_S, SAME_ERROR_WAIT_FRACTION * min(rank_exit.seconds for rank_exit in causes)),
        SAME_ERROR_MAX_WAIT_S,
    )


def format_report(exits: Sequence[RankExit]) -> str:
    """Return the report of a failed run, whose first line names the rank at fault; empty if none failed."""
    root_cause = find_root_cause(exits)
    if root_cause is None:
        return ""
    others = [rank_exit for rank_exit in exits if rank_exit is not root_cause]
    independent = [rank_exit for rank_exit in others if severity(rank_exit) == 0]
    same_error = [rank_exit.rank for rank_exit in independent if _same_error(rank_exit, root_cause)]
    folded = [o.rank for o in others if o not in independent and (o.stopped_s is not None or o.returncode != 0)]
    lines = [
        _format_exit(root_cause),
        *(f"also: {_format_exit(rank_exit)}" for rank_exit in independent if rank_exit.rank not in same_error),
    ]
    if same_error:
        lines.append(f"{_format_ranks(same_error)} failed in the same way")
    locations = _group_by_location(exits, root_cause)
    if len(locations) > 1:
        lines.append(", ".join(f"{_format_ranks(numbers)} at {location}" for location, numbers in locations.items()))
        folded = [rank for rank in folded if not any(rank in numbers for numbers in locations.values())]
    if folded:
        lines.append(f"{_format_ranks(folded)} stopped because of rank {root_cause.rank}")
    return escape_text("\n".join(lines))


def format_stop(exits: Sequence[RankExit], number: int, killed: Sequence[int], grace_s: float) -> str:
    """Return the report of a run that a signal has stopped.

    Args:
        exits: of all ranks.
        number: of the signal.
        killed: the ranks that had to be killed.
        grace_s: the seconds after which they were, unless another signal came.
    """
    said = (rank_exit.error.message for rank_exit in exits if rank_exit.error and rank_exit.error.kind == STOPPED)
    lines = [f"{next(said, f'stopped by {signal.Signals(number).name}')}; all {len(exits)} ranks have ended"]
    if killed:
        lines.append(
            f"{_format_ranks(killed)} had not ended {grace_s:g} s after the signal and "
            f"{'was' if len(killed) == 1 else 'were'} killed; give more time "
            "with --grace"
        )
    return "\n".join(lines)


def exit_code(exits: Sequence[RankExit]) -> int:
    """Return the exit code of the run: 0, that of the rank at fault, or 128 + the signal that killed it."""
    root_cause = find_root_cause(exits)
    if root_cause is None:
        return 0
    if root_cause.returncode < 0:  # after an exception, a signal is only a crash of native code during shutdown
        return 128 - root_cause.returncode if root_cause.error is None else 1
    return root_cause.returncode or 1


def _same_error(first: RankExit, second: RankExit) -> bool:
    texts = {
        (rank_exit.error.kind, rank_exit.error.message, rank_exit.error.location)
        for rank_exit in (first, second)
        if rank_exit.error is not None
    }
    return first.error is not None and second.error is not None and len(texts) == 1


def _is_mismatch_party(rank_exit: RankExit) -> bool:
    """Whether its error says that this rank and another started different collectives."""
    match = re.match(r"ranks (\d+) and (\d+) disagree\b", rank_exit.error.message) if rank_exit.error else None
    return match is not None and str(rank_exit.rank) in match.groups()


def _group_by_location(exits: Sequence[RankExit], root_cause: RankExit) -> dict[str, list[int]]:
    """Return the code locations of the ranks that report the same mismatch, with their ranks."""
    locations: dict[str, list[int]] = {}
    for outcome in exits if _is_mismatch_party(root_cause) else ():
        if (
            outcome.error is not None
            and root_cause.error is not None
            and outcome.error.message == root_cause.error.message
        ):
            locations.setdefault(outcome.error.location, []).append(outcome.rank)
    return locations


def _exited_early(rank_exit: RankExit, other: RankExit) -> bool:
    """Whether a rank had exited successfully, and another failed because of it, according to its error."""
    if severity(rank_exit) < 3 or rank_exit.stopped_s is not None or other.error is None:
        return False
    match = re.search(rf"\branks? (\d+(, | and ))*{rank_exit.rank}\b", other.error.message)
    return match is not None and rank_exit.ended_s < _failed_s(other)


def _failed_s(rank_exit: RankExit) -> float:
    return rank_exit.ended_s if rank_exit.error is None else min(rank_exit.error.time_s, rank_exit.ended_s)


def _format_exit(rank_exit: RankExit) -> str:
    who, run = f"rank {rank_exit.rank}", f"(pid {rank_exit.pid}, after {rank_exit.seconds:.1f} s)"
    if rank_exit.error is not None:
        first, *rest = rank_exit.error.message.splitlines() or [""]
        kind = escape_line(rank_exit.error.kind)
        text = f"{kind}: {first}" if first else kind
        location = f" at {escape_line(rank_exit.error.location)}" if rank_exit.error.location else ""
        return "\n  ".join([f"{who} failed: {text}{location}", *rest])
    if rank_exit.returncode < 0:
        name, remedy = _describe_signal(-rank_exit.returncode)
        return f"{who} was killed by {name} {run}; {remedy}"
    if rank_exit.returncode == 0:
        return f"{who} ended with exit code 0 {run}, but others waited for it; every rank has to do all of the steps"
    return f"{who} ended with exit code {rank_exit.returncode} {run}; its last output shows the cause"


def _describe_signal(number: int) -> tuple[str, str]:
    try:
        signal_ = signal.Signals(number)
    except ValueError:
        return f"signal {number}", "something outside this run sent it"
    return signal_.name, CRASH_REMEDY if signal_ in CRASHES else REMEDIES.get(
        signal_, "something outside this run sent it"
    )


def _format_ranks(numbers: Sequence[int]) -> str:
    *front, last = sorted(numbers)
    return f"ranks {', '.join(map(str, front))} and {last}" if front else f"rank {last}"
