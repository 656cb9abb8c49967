"""Render progress records (plain JSON objects) as lines, JSON or a terminal bar."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeAlias

from counterpoint.json_reader import parse_json
from counterpoint.terminal_text import escape_line, losing_lines, write_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

ProgressRecord: TypeAlias = Mapping[str, Any]
RELAY_PREFIX = "\x1e"
"""The prefix of a relayed record: RFC 7464's record separator, which no text line starts with."""


class ProgressRenderer(Protocol):
    """Renders progress records."""

    @property
    def redraws(self) -> bool:
        """Whether a new record replaces the previous one, so that frequent records do no harm."""
        ...

    def show(self, record: ProgressRecord) -> None:
        """Render a record."""
        ...

    def write_line(self, text: str) -> None:
        """Write a line that is not a record."""
        ...

    def close(self) -> None:
        """Finish the output."""
        ...


def make_renderer(mode: str, stream: TextIO, clock: Callable[[], float]) -> ProgressRenderer:
    """Return the renderer of a mode; ``auto`` depends on the stream."""
    if mode == "off":
        return LineRenderer(stream, lambda record: None)
    if mode == "json":
        return LineRenderer(stream, format_json)
    if mode == "relay":
        return LineRenderer(stream, lambda record: RELAY_PREFIX + format_json(record), redraws=True)
    if mode == "rich" or (mode == "auto" and can_redraw(stream)):
        return BarRenderer(stream, clock)
    return LineRenderer(stream, format_text)


def can_redraw(stream: TextIO) -> bool:
    """Tell whether the stream is a terminal on which a line can be redrawn."""
    if not stream.isatty():
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal


class LineRenderer:
    """Writes one line for each record, immediately.

    Args:
        stream: output stream.
        format_record: returns the line of a record; None for a record that is not shown.
        redraws: whether the reader draws each record over the previous one.
    """

    def __init__(
        self, stream: TextIO, format_record: Callable[[ProgressRecord], str | None], *, redraws: bool = False
    ) -> None:
        self.stream = stream
        self.format_record = format_record
        self.redraws = redraws

    def show(self, record: ProgressRecord) -> None:
        """Write the record as a line."""
        line = self.format_record(record)
        if line is not None:
            self.write_line(line)

    def write_line(self, text: str) -> None:
        """Write a line and flush."""
        write_line(self.stream, text)

    def close(self) -> None:
        """Flush the stream."""
        with losing_lines():
            self.stream.flush()


class BarRenderer:
    """Draws a bar with figures, redrawn with every step; other records are lines above it.

    It draws only when it is called: there is no thread that could still draw when the run has ended.

    Args:
        stream: a terminal.
        clock: monotonic seconds.
    """

    redraws = True

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich.console import Console

        self.console: Console = Console(file=stream, force_terminal=True, highlight=False)
        self.clock = clock
        self.progress_bar: Progress | None = None
        self.task: TaskID | None = None

    def show(self, record: ProgressRecord) -> None:
        """Redraw the bar, or write a line above it."""
        event = record["event"]
        if event == "step":
            self.update_bar(record)
            return
        text = format_text(record)
        if text is not None:
            self.write_line(text)
        if event == "start":
            self.start_bar(record)
        elif event == "end":
            self.close()

    def write_line(self, text: str) -> None:
        """Write a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def start_bar(self, record: ProgressRecord) -> None:
        """Draw an empty bar."""
        from rich.progress import BarColumn, Progress, TextColumn

        self.progress_bar = Progress(
            TextColumn("{task.fields[position]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self.console,
            auto_refresh=False,
            get_time=self.clock,
            expand=True,
        )
        self.task = self.progress_bar.add_task(
            "", total=record["num_steps"], completed=record["step"], position=format_position(record), figures=""
        )
        self.progress_bar.start()

    def update_bar(self, record: ProgressRecord) -> None:
        """Redraw the bar for a record."""
        if self.progress_bar is not None and self.task is not None:
            self.progress_bar.update(
                self.task,
                completed=record["step"],
                position=format_position(record),
                figures=escape_line(format_metrics(record)),
            )
            self.progress_bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is, and restore the cursor."""
        if self.progress_bar is not None:
            self.progress_bar.stop()
            self.progress_bar = None


def format_json(record: ProgressRecord) -> str:
    """Return the record as one line of JSON; a number that is not finite is null.

    Example:
        >>> format_json({"event": "step", "loss": float("nan")})
        '{"event": "step", "loss": null}'
    """
    return json.dumps({key: to_jsonable(value) for key, value in record.items()})


def to_jsonable(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_relayed(text: str) -> ProgressRecord | None:
    """Return the record that a ``relay`` renderer wrote as this line; None if it is just a line."""
    if not text.startswith(RELAY_PREFIX):
        return None
    try:
        record: ProgressRecord = parse_json(text[len(RELAY_PREFIX) :])
    except ValueError:  # of a program that starts a line with the same character
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


def format_position(record: ProgressRecord) -> str:
    """Return the number of steps that are done, and of all steps if it is known.

    Example:
        >>> format_position({"step": 3, "num_steps": 9}), format_position({"step": 3, "num_steps": None})
        ('3/9', '3')
    """
    return f"{record['step']}" if record["num_steps"] is None else f"{record['step']}/{record['num_steps']}"


def format_text(record: ProgressRecord) -> str | None:
    """Return the record as one line for people, with control characters escaped; None if there is nothing to show."""
    text = describe_record(record)
    return None if text is None else escape_line(text)


def describe_record(record: ProgressRecord) -> str | None:
    """Return what :func:`format_text` shows, before escaping."""
    position = f"step {format_position(record)}"
    match record["event"]:
        case "start":
            return format_headline(record)
        case "step":
            return f"{position} {format_metrics(record)}"
        case "evaluation":
            metrics = " ".join(f"{name} {format_number(value)}" for name, value in record["metrics"].items())
            return f"{position} held-out {metrics}"
        case "slow_rank":
            return f"{position} {record['text']}"
        case "saved":
            return f"{position} saved {record['path']}"
        case "save_failed":
            return (
                f"{position} not saved ({record['num_failed']} failed so far), training continues: {record['reason']}"
            )
        # a PeerError is reported by the rank that failed
        case "end" if record["error"] is not None and not record["error"].startswith("PeerError"):
            has_begun = record["num_steps"] != 0
            return f"{f'{position} ended early' if has_begun else 'ended before the first step'}: {record['error']}"
    return None


def format_headline(record: ProgressRecord) -> str:
    """Return the name, the plan, and the arithmetic of the global batch."""
    ranks, size, micros = record["num_ranks"], record["batch_size"], record["num_micros"]
    name = f"{record['name']}: " if record["name"] else ""
    samples = f"{size // micros} or {size // micros + 1}" if size % micros else f"{size // micros}"
    batch = f"batch {size}" + (f" = {micros} microbatches of {samples}" if micros > 1 else "")
    origin = f", resumed at step {record['step']}" if record["step"] else ""
    if record.get("checkpoint"):
        origin = f", resumed at step {record['step']} from {record['checkpoint']}"
    elif record.get("resume_path"):
        origin = f", starts at step 0: no checkpoint in {record['resume_path']}"
    return f"{name}{record['plan']} on {ranks} rank{'s' if ranks > 1 else ''}, {batch}{origin}"


def format_metrics(record: ProgressRecord) -> str:
    """Return loss, its parts in the last step, throughput, time of a step and time left.

    Example:
        >>> format_metrics({"loss": 2.31, "samples_per_s": 812.4, "step_s": 0.1311, "eta_s": 115.2, "skipped": 0})
        'loss 2.31 812 samples/s step 131 ms eta 1m55s'
    """
    parts = [f"{name} {format_number(value)}" for name, value in record.get("loss_parts", {}).items()]
    figures = [
        f"loss {format_number(record['loss'])}" + (f" ({', '.join(parts)})" if parts else ""),
        f"{format_number(record['samples_per_s'], 3)} samples/s",
        f"step {format_step_time(record['step_s'])}",
        f"eta {format_duration(record['eta_s'])}",
    ]
    return " ".join([*figures, f"skipped {record['skipped']}"] if record["skipped"] else figures)


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits, or all integer digits if they are more.

    Example:
        >>> format_number(0.0123456), format_number(12345.6), format_number(None)
        ('0.01235', '12346', 'nan')
    """
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def format_step_time(seconds: float | None) -> str:
    """Return the time of one step: 0.131 is ``131 ms``."""
    if seconds is None or not math.isfinite(seconds):
        return "? ms"
    return f"{format_number(seconds * 1000, 3)} ms" if seconds < 1 else f"{format_number(seconds, 3)} s"


def format_duration(seconds: float | None) -> str:
    """Return a long time in its two largest units.

    Example:
        >>> format_duration(9.4), format_duration(115), format_duration(3 * 3600 + 125), format_duration(90000)
        ('9s', '1m55s', '3h02m', '1d01h')
    """
    if seconds is None or not math.isfinite(seconds):
        return "?"
    total = round(seconds)
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if total >= size:
            return f"{total // size}{name}{total % size // smaller:02d}{smaller_name}"
    return f"{total}s"
