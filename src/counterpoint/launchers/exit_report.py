"""Report of how a run ended: the first line names the rank at fault, and consequences are folded."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from counterpoint.json_reader import parse_json
from counterpoint.launchers.rank_activity import RankActivity
from counterpoint.terminal_text import escape_line, escape_surrogates, escape_text

ROOT_CAUSE_WAIT_S = 1.0  # wait for the root cause, once a rank has ended that only reports a lost peer
RECORD_WAIT_S = 1.5  # likewise, from its record: under load its process needs seconds to end
EXIT_WAIT_S = 0.25  # wait for other ranks to end by themselves, once the root cause is known
SAME_ERROR_WAIT_FRACTION = 0.25  # of the time that a rank took to fail: others may raise the same error this much later
SAME_ERROR_MAX_WAIT_S = 2.0
MESSAGE_MAX_CHARS = 4000
MAX_NOTES = 4
RECORD_MAX_BYTES = 262144

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
    """The exception that ended a rank's script, or its end without one, written by that rank.

    Args:
        kind: name of the exception's type; empty if the script has ended with exit code 0.
        message: its text.
        location: ``file.py:40``, the last line of the user's own code; empty if there is none.
        is_peer: whether it only says that another rank failed.
        time_s: the host's monotonic clock when it was raised.
        notes: those of the exception, such as the step.
        stop_signal: that has ended its run after a step, if the exception is a ``StoppedBySignal``; else 0.
    """

    kind: str
    message: str
    location: str
    is_peer: bool
    time_s: float
    notes: tuple[str, ...] = ()
    stop_signal: int = 0

    def write(self, path: Path) -> None:
        """Write the record to ``path`` atomically; an existing record stays."""
        if path.exists():
            return
        draft = path.with_suffix(".tmp")
        texts = {name: shorten_text(getattr(self, name)) for name in ("kind", "message", "location")}
        content = {**asdict(self), **texts, "notes": [shorten_text(note) for note in self.notes[:MAX_NOTES]]}
        draft.write_text(json.dumps(content), encoding="utf-8")
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
                tuple(map(str, content["notes"])),
                int(signal.Signals(content["stop_signal"])) if content["stop_signal"] else 0,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def shorten_text(text: str) -> str:
    """Return the start of a text, in which bytes of a file name that were not UTF-8 are escaped, as JSON needs it."""
    return escape_surrogates(text[:MESSAGE_MAX_CHARS])


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
        record: of the end of its script, if any.
        activity: what it did when we stopped it, if that is known.
        host: which runs it; empty for this one.
    """

    rank: int
    pid: int
    returncode: int
    seconds: float
    ended_s: float
    stopped_s: float | None = None
    record: ErrorRecord | None = None
    activity: RankActivity | None = None
    host: str = ""

    @property
    def error(self) -> ErrorRecord | None:
        """The record of its exception; None if it has none."""
        return self.record if self.record is not None and self.record.kind else None

    @property
    def is_early(self) -> bool:
        """Whether it ended with exit code 0, and not because we had stopped it."""
        if self.error is not None or self.stopped_s is None:
            return self.error is None and self.returncode == 0
        return self.record is not None and self.record.time_s < self.stopped_s


def severity(rank_exit: RankExit) -> int:
    """Return how likely the rank failed on its own: 0 certain, 1 probable, 2 reports a lost peer, 3 did not fail."""
    if rank_exit.error is not None and (rank_exit.stopped_s is None or rank_exit.error.time_s < rank_exit.stopped_s):
        return 2 if rank_exit.error.is_peer else 0
    if rank_exit.returncode == 0 or rank_exit.stopped_s is not None:
        return 3
    return 0 if rank_exit.returncode < 0 else 1


def find_root_cause(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose exit explains the others: most certain first, then earliest; None if none failed.

    If the failed ranks only waited for others, it is the one of those that did not wait itself: it had exited
    successfully, something had stopped it, or it did something else. Clocks are not compared: the errors say who waited
    for whom.
    """
    failed = [outcome for outcome in exits if severity(outcome) < 3]
    root_cause = min(
        failed,
        key=lambda rank_exit: (severity(rank_exit), not _mismatch_parties(rank_exit), _failed_s(rank_exit)),
        default=None,
    )
    if root_cause is None or severity(root_cause) < 2 or _mismatch_parties(root_cause):
        return root_cause
    awaited = [
        rank_exit
        for rank_exit in exits
        if severity(rank_exit) == 3 and any(_is_named(rank_exit.rank, waiting.error) for waiting in failed)
    ]
    early = [rank_exit for rank_exit in awaited if rank_exit.is_early]
    absent = [o for o in awaited if o not in early and o.activity is not None and not o.activity.is_waiting]
    return min(
        early or absent,
        key=lambda rank_exit: (not (rank_exit.activity and rank_exit.activity.stopped_by), rank_exit.ended_s),
        default=root_cause,
    )


def wait_for_others_s(exits: Sequence[RankExit], records: Mapping[int, ErrorRecord] | None = None) -> float:
    """Return how many seconds to wait for running ranks before stopping them; infinity unless one has failed.

    If the error is an exception, all ranks may be about to raise it, sooner or later: the longer the first one ran, the
    later the last one. If a rank was killed, or has reported a lost peer, no more of the same kind is expected.

    Args:
        exits: of the ranks that have ended.
        records: of running ranks whose scripts have ended.
    """
    ending = records or {}
    early = {*(o.rank for o in exits if o.is_early), *(rank for rank, record in ending.items() if not record.kind)}
    waiting = [record for record in (*(o.record for o in exits), *ending.values()) if record and record.is_peer]
    if any(_is_named(rank, record) for rank in early for record in waiting):
        return EXIT_WAIT_S
    if find_root_cause(exits) is None:
        return RECORD_WAIT_S if waiting else inf
    causes = [rank_exit for rank_exit in exits if severity(rank_exit) < 2]
    if not causes:
        return ROOT_CAUSE_WAIT_S
    if waiting or any(rank_exit.error is None for rank_exit in causes):
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
    if locations:
        lines.append(", ".join(f"{_format_ranks(numbers)} at {location}" for location, numbers in locations.items()))
        folded = [rank for rank in folded if not any(rank in numbers for numbers in locations.values())]
    if folded:
        wait = "" if severity(root_cause) < 3 and root_cause.error is not None else _describe_wait(others)
        lines.append(f"{_format_ranks(folded)} stopped because of {_format_cause(root_cause)}{wait}")
    return escape_text("\n".join(lines))


def format_stop(
    exits: Sequence[RankExit], received: Sequence[int], killed: Sequence[int], grace_s: float | None
) -> str:
    """Return the report of a run that a signal has stopped; its first line names a rank that failed to stop, if any.

    Args:
        exits: of all ranks.
        received: the signals, in their order.
        killed: the ranks that had to be killed.
        grace_s: the seconds after which they were; None if a second signal asked for it.
    """
    said = (rank_exit.error.message for rank_exit in exits if rank_exit.error and rank_exit.error.stop_signal)
    failed = find_failed_stop(exits, received)
    lines = [escape_text(_format_exit(failed))] if failed else []
    lines += [f"{next(said, f'stopped by {signal.Signals(received[0]).name}')}; all {len(exits)} ranks have ended"]
    frozen = {
        end.rank: end.activity.stopped_by for end in exits if end.activity is not None and end.activity.stopped_by
    }
    if killed:
        verb = "was" if len(killed) == 1 else "were"
        reasons = [f"rank {rank} was stopped by {name}" for rank, name in frozen.items()]
        why = f": {', '.join(reasons)}, and others waited for it" if reasons else "; give more time with --grace"
        lines.append(
            f"{_format_ranks(killed)} had not ended when Ctrl-C came again, and {verb} killed"
            if grace_s is None
            else f"{_format_ranks(killed)} had not ended {grace_s:g} s after the signal and {verb} killed{why}"
        )
    return "\n".join(lines)


def find_failed_stop(exits: Sequence[RankExit], received: Sequence[int]) -> RankExit | None:
    """Return the first rank of a stopped run that had an error of its own instead; None if none had, or after Ctrl-C.

    Its last checkpoint could not be saved, for instance. Ctrl-C saves nothing.

    Args:
        exits: of all ranks.
        received: the signals that have stopped the run.
    """
    if signal.SIGINT in received:
        return None
    failed = [
        rank_exit
        for rank_exit in exits
        if (error := rank_exit.error) and not (error.stop_signal or error.is_peer or error.kind == SystemExit.__name__)
    ]
    return min(failed, key=_failed_s, default=None)


def was_stopped(exits: Sequence[RankExit]) -> bool:
    """Return whether a signal has asked the ranks to stop, and they have; then they are not started again."""
    return any(rank_exit.error is not None and rank_exit.error.stop_signal for rank_exit in exits)


def exit_code(exits: Sequence[RankExit]) -> int:
    """Return the exit code of the run: 0, that of the rank at fault, or 128 + the signal that killed it."""
    root_cause = find_root_cause(exits)
    if root_cause is None:
        return 0
    if root_cause.error is not None and root_cause.error.stop_signal:
        return 128 + root_cause.error.stop_signal  # whatever ended its process once its run had stopped
    if root_cause.returncode < 0:  # after an exception, a signal is only a crash of native code during shutdown
        return 128 - root_cause.returncode if root_cause.error is None and root_cause.stopped_s is None else 1
    return root_cause.returncode or 1


def _same_error(first: RankExit, second: RankExit) -> bool:
    texts = {
        (rank_exit.error.kind, rank_exit.error.message, rank_exit.error.location)
        for rank_exit in (first, second)
        if rank_exit.error is not None
    }
    return first.error is not None and second.error is not None and len(texts) == 1


def _mismatch_parties(rank_exit: RankExit) -> list[int]:
    """Return this rank and the one that started another collective, if its error says so; else an empty list."""
    match = re.match(r"ranks (\d+) and (\d+) disagree\b", rank_exit.error.message) if rank_exit.error else None
    parties = [] if match is None else [int(number) for number in match.groups()]
    return parties if rank_exit.rank in parties else []


def _group_by_location(exits: Sequence[RankExit], root_cause: RankExit) -> dict[str, list[int]]:
    """Return the code locations of the ranks that report the same mismatch, with their ranks."""
    locations: dict[str, list[int]] = {}
    for outcome in exits if _mismatch_parties(root_cause) else ():
        if (
            outcome.error is not None
            and root_cause.error is not None
            and outcome.error.message == root_cause.error.message
        ):
            locations.setdefault(outcome.error.location, []).append(outcome.rank)
    return locations


def _is_named(rank: int, error: ErrorRecord | None) -> bool:
    """Whether an error of another rank names this one."""
    return error is not None and re.search(rf"\branks? (\d+(, | and ))*{rank}\b", error.message) is not None


def _describe_wait(exits: Sequence[RankExit]) -> str:
    """Return what the first of the ranks that reports a lost peer has waited for; empty if none does."""
    waiting = [rank_exit for rank_exit in exits if severity(rank_exit) == 2]
    error = min(waiting, key=_failed_s).error if waiting else None
    return "" if error is None else ", ".join([f": {(error.message.splitlines() or [''])[0]}", *error.notes])


def _failed_s(rank_exit: RankExit) -> float:
    return rank_exit.ended_s if rank_exit.error is None else min(rank_exit.error.time_s, rank_exit.ended_s)


def _format_cause(rank_exit: RankExit) -> str:
    return _format_ranks(_mismatch_parties(rank_exit) or [rank_exit.rank])


def _format_exit(rank_exit: RankExit) -> str:
    who, host = _format_cause(rank_exit), f" on {rank_exit.host}" if rank_exit.host else ""
    run = f"(pid {rank_exit.pid}{host}, after {rank_exit.seconds:.1f} s)"
    if rank_exit.activity is not None:  # a record that it has written since then is a consequence of the stop
        return _format_activity(f"{who} was", rank_exit.activity, run)
    if rank_exit.error is not None:
        first, *rest = rank_exit.error.message.splitlines() or [""]
        kind = escape_line(rank_exit.error.kind)
        text = f"{kind}: {first}" if first else kind
        is_located = rank_exit.error.location and not _mismatch_parties(rank_exit)  # else its ranks are at several
        location = f" at {escape_line(rank_exit.error.location)}" if is_located else ""
        return "\n  ".join([f"{who} failed: {text}{location}", *rest, *rank_exit.error.notes])
    if rank_exit.is_early:
        location = (
            f" at {escape_line(rank_exit.record.location)}" if rank_exit.record and rank_exit.record.location else ""
        )
        return (
            f"{who} ended with exit code 0{location} {run}, but others waited for it; every rank has to do all of the "
            "steps"
        )
    if rank_exit.returncode < 0:
        name, remedy = _describe_signal(-rank_exit.returncode)
        return f"{who} was killed by {name} {run}; {remedy}"
    return f"{who} ended with exit code {rank_exit.returncode} {run}; its last output shows the cause"


def _format_activity(who: str, activity: RankActivity, run: str) -> str:
    """Return the text about a rank that ran while others waited for it in vain."""
    if activity.stopped_by:
        return (
            f"{who} stopped by {activity.stopped_by} for {activity.stopped_s:.0f} s {run}, and others waited for it; "
            "find what stops it: `kill -CONT` lets a stopped process go on"
        )
    location = f"in {activity.location}" if activity.location else "still running"
    text = f"{who} {location} {run}, and others waited for it; it hangs there, or needs a longer timeout"
    return "\n  ".join([text, *activity.frames])


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
