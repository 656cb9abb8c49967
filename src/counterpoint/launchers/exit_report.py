"""Why a run ended, told by its root cause: the first line names the rank at fault, consequences are folded."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT_CAUSE_WAIT_S = 1.0  # how long to wait for the cause when those that failed only blame a peer
EXIT_WAIT_S = 0.25  # how long for others to end by themselves when the cause is known
SAME_ERROR_WAIT_FRACTION = 0.25  # of the time that a rank took to fail: so much later others may come to the same place
SAME_ERROR_MAX_WAIT_S = 2.0
MESSAGE_MAX_CHARS = 4000
RECORD_MAX_BYTES = 65536

REMEDIES = {
    signal.SIGKILL: "if nobody sent it, the kernel ran out of memory: see dmesg, use fewer ranks or smaller batches",
    signal.SIGTERM: "something outside this run sent it: a scheduler or a person",
    signal.SIGINT: "something outside this run sent it: a scheduler or a person",
}
CRASH_REMEDY = "native code crashed: the stack of every thread stands above; run that rank's work alone to find it"
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The exception that ended a rank, as it was written down by that rank.

    Args:
        kind: name of the exception's type.
        message: its text.
        place: ``file.py:40``, the last line of the user's own code; empty where there is none.
        is_peer: whether it only says that another rank failed.
        time_s: the host's monotonic clock when it was raised.
    """

    kind: str
    message: str
    place: str
    is_peer: bool
    time_s: float

    def write(self, path: Path) -> None:
        """The record is at ``path``, whole; the first one stays."""
        if path.exists():
            return
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps({**asdict(self), "message": self.message[:MESSAGE_MAX_CHARS]}), encoding="utf-8")
        draft.rename(path)

    @staticmethod
    def read(path: Path) -> ErrorRecord | None:
        """Return the record at ``path``, or None where the rank wrote none that can be read."""
        try:
            content = json.loads(path.read_bytes()[:RECORD_MAX_BYTES])
            return ErrorRecord(
                str(content["kind"]),
                str(content["message"]),
                str(content["place"]),
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
        ended_s: the host's monotonic clock when that was seen.
        stopped_s: when we sent it the first signal, if we did before it ended.
        error: what it wrote down, if anything.
    """

    rank: int
    pid: int
    returncode: int
    seconds: float
    ended_s: float
    stopped_s: float | None = None
    error: ErrorRecord | None = None


def severity(rank_exit: RankExit) -> int:
    """Return how surely the rank failed on its own: 0 surely, 1 probably, 2 it blames a peer, 3 it did not fail."""
    if rank_exit.error is not None and (rank_exit.stopped_s is None or rank_exit.error.time_s < rank_exit.stopped_s):
        return 2 if rank_exit.error.is_peer else 0
    if rank_exit.returncode == 0 or rank_exit.stopped_s is not None:
        return 3
    return 0 if rank_exit.returncode < 0 else 1


def find_root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose end explains the others': surest first, earliest first; None when none failed.

    Where those that failed only wait for one that had ended well, it is that one: it ended too early.
    """
    failed = [outcome for outcome in exits if severity(outcome) < 3]
    found = min(failed, key=lambda one: (severity(one), not _is_mismatch_party(one), _failed_s(one)), default=None)
    if found is None or severity(found) < 2:
        return found
    early = [outcome for outcome in exits if _exited_early(outcome, found)]
    return min(early, key=lambda outcome: outcome.ended_s, default=found)


def wait_for_others_s(exits: Sequence[RankExit], said: Sequence[ErrorRecord]) -> float:
    """Return how many seconds a failed run waits for its living ranks before it stops them.

    An exception may be about to come to all ranks, which reach the same place sooner or later: the longer it took the
    first, the later the last. Where one was killed, or somebody has noticed that another is gone, no more of the same
    kind is to come.

    Args:
        outcomes: the ranks that have ended; one of them failed.
        said: the errors that living ranks have written down.
    """
    causes = [outcome for outcome in exits if severity(outcome) < 2]
    if not causes:
        return ROOT_CAUSE_WAIT_S
    blames = any(severity(outcome) == 2 for outcome in exits) or any(record.is_peer for record in said)
    if blames or any(outcome.error is None for outcome in causes):
        return EXIT_WAIT_S
    return min(
        max(EXIT_WAIT_S, SAME_ERROR_WAIT_FRACTION * min(outcome.seconds for outcome in causes)), SAME_ERROR_MAX_WAIT_S
    )


def format_report(exits: Sequence[RankExit]) -> str:
    """Return the report of a failed run; its first line names the rank at fault. Empty when none failed."""
    culprit = find_root_cause(exits)
    if culprit is None:
        return ""
    others = [outcome for outcome in exits if outcome is not culprit]
    own = [outcome for outcome in others if severity(outcome) == 0]
    alike = [outcome.rank for outcome in own if _same_error(outcome, culprit)]
    folded = [o.rank for o in others if o not in own and (o.stopped_s is not None or o.returncode != 0)]
    lines = [_format_exit(culprit), *(f"also: {_format_exit(outcome)}" for outcome in own if outcome.rank not in alike)]
    if alike:
        lines.append(f"{_format_ranks(alike)} failed in the same way")
    stood = _group_by_location(exits, culprit)
    if len(stood) > 1:
        lines.append(", ".join(f"{_format_ranks(numbers)} stood at {place}" for place, numbers in stood.items()))
        folded = [rank for rank in folded if not any(rank in numbers for numbers in stood.values())]
    if folded:
        lines.append(f"{_format_ranks(folded)} stopped because of rank {culprit.rank}")
    return "\n".join(lines)


def exit_code(exits: Sequence[RankExit]) -> int:
    """Return the exit code of the whole run: 0, the culprit's own, or 128 + the signal that killed it."""
    culprit = find_root_cause(exits)
    if culprit is None:
        return 0
    if culprit.returncode < 0:  # after an exception, a signal is only native code that crashes on its way out
        return 128 - culprit.returncode if culprit.error is None else 1
    return culprit.returncode or 1


def _same_error(one: RankExit, other: RankExit) -> bool:
    texts = {(o.error.kind, o.error.message, o.error.place) for o in (one, other) if o.error is not None}
    return one.error is not None and other.error is not None and len(texts) == 1


def _is_mismatch_party(rank_exit: RankExit) -> bool:
    """Tell whether its error says that this rank and another were about to do different things."""
    found = re.match(r"ranks (\d+) and (\d+) disagree\b", rank_exit.error.message) if rank_exit.error else None
    return found is not None and str(rank_exit.rank) in found.groups()


def _group_by_location(exits: Sequence[RankExit], root_cause: RankExit) -> dict[str, list[int]]:
    """Return where the ranks stood that tell of the same disagreement, by the place."""
    stood: dict[str, list[int]] = {}
    for outcome in exits if _is_mismatch_party(root_cause) else ():
        if (
            outcome.error is not None
            and root_cause.error is not None
            and outcome.error.message == root_cause.error.message
        ):
            stood.setdefault(outcome.error.place, []).append(outcome.rank)
    return stood


def _exited_early(rank_exit: RankExit, other: RankExit) -> bool:
    """Tell whether a rank had ended well, and another failed because of it, as its error says."""
    if severity(rank_exit) < 3 or rank_exit.stopped_s is not None or other.error is None:
        return False
    names = re.search(rf"\branks? (\d+(, | and ))*{rank_exit.rank}\b", other.error.message)
    return names is not None and rank_exit.ended_s < _failed_s(other)


def _failed_s(rank_exit: RankExit) -> float:
    return rank_exit.ended_s if rank_exit.error is None else min(rank_exit.error.time_s, rank_exit.ended_s)


def _format_exit(rank_exit: RankExit) -> str:
    who, run = f"rank {rank_exit.rank}", f"(pid {rank_exit.pid}, after {rank_exit.seconds:.1f} s)"
    if rank_exit.error is not None:
        first, *rest = rank_exit.error.message.splitlines() or [""]
        text = f"{rank_exit.error.kind}: {first}" if first else rank_exit.error.kind
        place = f" at {rank_exit.error.place}" if rank_exit.error.place else ""
        return "\n  ".join([f"{who} failed: {text}{place}", *rest])
    if rank_exit.returncode < 0:
        name, remedy = _describe_signal(-rank_exit.returncode)
        return f"{who} was killed by {name} {run}; {remedy}"
    if rank_exit.returncode == 0:
        return f"{who} ended with exit code 0 {run}, but others waited for it; every rank has to do all of the steps"
    return f"{who} ended with exit code {rank_exit.returncode} {run}; what it wrote last says why"


def _describe_signal(number: int) -> tuple[str, str]:
    try:
        found = signal.Signals(number)
    except ValueError:
        return f"signal {number}", "something outside this run sent it"
    return found.name, CRASH_REMEDY if found in CRASHES else REMEDIES.get(found, "something outside this run sent it")


def _format_ranks(numbers: Sequence[int]) -> str:
    *front, last = sorted(numbers)
    return f"ranks {', '.join(map(str, front))} and {last}" if front else f"rank {last}"
