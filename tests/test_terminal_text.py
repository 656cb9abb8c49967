"""Hostile names, paths and error texts: what is printed about them can neither act on a terminal nor fake a line."""

import errno
import io
import os
import re
import time
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from counterpoint.cli.error_handling import with_error_handling
from counterpoint.cli.tables import TableColumn, format_table
from counterpoint.errors import CounterpointError, PlanError
from counterpoint.launchers import OutputLine, write_prefixed
from counterpoint.launchers.exit_report import ErrorRecord, RankExit, format_report
from counterpoint.terminal_text import escape_line, escape_output, escape_text, warn, write_line
from counterpoint.training.reporting.progress_renderers import BarRenderer, make_renderer
from counterpoint.viz.markup import escape

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"net{TITLE}\x9b2J\x1b[1A\x1b[2K\r\u202egnp.exe\u2066\u200f\u2028rank 9 failed\x08\x00\udc80\x7f"
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printed(command):
    """What a command prints, on both streams, whether it raises an error or not."""
    app = typer.Typer()
    app.command()(with_error_handling(command))
    return CliRunner().invoke(app, []).output


def report(kind="ValueError", message="too wide", location="job.py:3"):
    return format_report([RankExit(1, 7, 1, 2.0, 9.0, record=ErrorRecord(kind, message, location, False, 1.0))])


def raise_error():
    error = PlanError(f"there is no layer {HOSTILE}")
    error.add_note(f"report: {HOSTILE}")
    raise error


def progress(**record):
    stream = io.StringIO()
    make_renderer("plain", stream, time.monotonic).show({"num_steps": 9, "step": 3, **record})
    return stream.getvalue()


STEP = {"event": "step", "loss": 1.0, "samples_per_s": 2.0, "step_s": 0.1, "eta_s": 3.0, "skipped": 0}
START = {"event": "start", "name": HOSTILE, "plan": "data(2)", "num_ranks": 2, "batch_size": 8, "num_micros": 1}
EXITS = {
    "error": lambda: str(PlanError(HOSTILE)),
    "error of a command": lambda: printed(raise_error),
    "report: message": lambda: report(message=HOSTILE),
    "report: kind": lambda: report(kind=HOSTILE),
    "report: location": lambda: report(location=HOSTILE),
    "table": lambda: format_table([TableColumn("layer")], [(HOSTILE,)]),
    "progress: start": lambda: progress(**START),
    "progress: resumed": lambda: progress(**START, checkpoint=HOSTILE),
    "progress: parts of the loss": lambda: progress(**STEP, loss_parts={HOSTILE: 1.0}),
    "progress: metric": lambda: progress(event="evaluation", metrics={HOSTILE: 1.0}),
    "progress: slow rank": lambda: progress(event="slow_rank", text=HOSTILE),
    "progress: checkpoint": lambda: progress(event="saved", path=HOSTILE),
    "progress: early end": lambda: progress(event="end", error=f"ValueError: {HOSTILE}"),
    "HTML": lambda: escape(HOSTILE.replace("\r", "")),
}


@pytest.mark.parametrize("name", EXITS)
def test_control_characters_leave_as_escapes(name):
    shown = EXITS[name]()
    assert "net" in shown
    assert not ACTING.findall(shown)


def test_a_warning_is_escaped_and_names_the_line_of_the_caller():
    with pytest.warns(RuntimeWarning) as caught:
        warn(HOSTILE, RuntimeWarning)
    assert not ACTING.findall(str(caught[0].message))
    assert Path(caught[0].filename).name == "test_terminal_text.py"


def test_the_bar_draws_no_name_that_acts_on_the_terminal():
    stream = io.StringIO()
    bar = BarRenderer(stream, time.monotonic)
    bar.show(START | {"num_steps": 9, "step": 0})
    bar.show({"num_steps": 9, "step": 3, **STEP, "loss_parts": {f"a{TITLE}": 1.0}})
    bar.close()
    assert "\x1b]" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


def test_a_name_with_a_newline_stays_in_its_line_of_progress_and_of_a_table():
    forged = "net\nrank 0 failed: forged"
    assert progress(**START | {"name": forged}).count("\n") == 1
    assert format_table([TableColumn("layer")], [(forged,)]).splitlines() == ["layer", r"net\nrank 0 failed: forged"]


def test_a_line_of_an_exceptions_text_cannot_pass_for_a_line_of_the_report():
    lines = report(message="bad\nrank 0 was killed by SIGKILL\x0brank 0 too\x85rank 0 again").splitlines()
    assert lines[0] == "rank 1 failed: ValueError: bad at job.py:3"
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_ranks_own_output_keeps_its_colors_and_nothing_else_of_its_escapes(capsys):
    write_prefixed(OutputLine(1, "out", f"\x1b[31mred{TITLE}\x1b[2J"))
    assert capsys.readouterr().out == "[rank 1] \x1b[31mred\\x1b]0;owned\\x07\\x1b[2J\x1b[0m\n"


def test_a_ranks_progress_bar_is_drawn_over_itself_behind_its_prefix(capsys):
    write_prefixed(OutputLine(1, "err", " 10%\r 20%"))
    assert capsys.readouterr().err == "[rank 1]  10%\r[rank 1]  20%\n"


def test_text_of_any_language_stays_as_it_is():
    text = "größe 模型 שלום 🙂 e\u0301 a\u200db\tc"
    assert escape_text(text) == escape_line(text) == escape_output(text) == escape(text) == text


def test_an_error_keeps_its_text_as_it_was_for_programs():
    error = CounterpointError(HOSTILE)
    assert error.args == (HOSTILE,)
    assert str(CounterpointError(str(error))) == str(error)


def test_nothing_is_warned_of_with_the_standard_filters_twice():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("once", RuntimeWarning)
    assert len(caught) == 1


class Refusing(io.StringIO):
    """Takes no line, for a reason of the system."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def flush(self):
        raise OSError(self.code, os.strerror(self.code))


def test_a_full_disk_behind_the_output_loses_lines_and_stops_nothing():
    stream = Refusing(errno.ENOSPC)
    make_renderer("plain", stream, time.monotonic).show({"num_steps": 9, "step": 3, **STEP})
    write_line(stream, "step 4")
    with pytest.raises(BrokenPipeError):
        write_line(Refusing(errno.EPIPE), "step 4")


def test_characters_that_an_encoding_does_not_have_are_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_line(stream, "perplexité 3 …")
    assert stream.buffer.getvalue() == b"perplexit\\xe9 3 \\u2026\n"
