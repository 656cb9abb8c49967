"""What a run shows: a bar on a terminal, few lines in a file, and the same figures in both."""

import contextlib
import io
import json
import math
import os
import pty
import threading

import pytest

from counterpoint.errors import PlanError
from counterpoint.training.callbacks.callback import EvaluationEnd, RunEnd
from counterpoint.training.callbacks.progress import ProgressCallback, ThroughputMeter
from counterpoint.training.reporting.progress_renderers import format_duration, make_renderer, parse_relayed
from tests.training.callback_events import PLAN, Clock, make_run_start, make_step_end

HEADLINE = f"digits: {PLAN} on 4 ranks, batch 64 = 4 microbatches of 16"


def shown(mode, *, seconds=0.125, num_steps=100, error=None, stream=None):
    """The output after a run whose clock moves with its steps."""
    stream = io.StringIO() if stream is None else stream
    clock = Clock()
    progress = ProgressCallback(mode, name="digits", stream=stream, clock=clock)
    progress.on_start(make_run_start(num_steps))
    for number in range(num_steps):
        clock.now += seconds
        progress.on_step(make_step_end(number, seconds=seconds))
    progress.on_end(RunEnd(num_steps, error))
    return stream.getvalue() if isinstance(stream, io.StringIO) else ""


class Terminal:
    """A pseudo terminal of 100 columns that is read all the time, as a real one is."""

    def __init__(self):
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self.chunks = []
        self.reader = threading.Thread(target=self.read_on)
        self.reader.start()

    def read_on(self):
        with contextlib.suppress(OSError):  # how a pseudo terminal says that it has been closed
            while chunk := os.read(self.master, 4096):
                self.chunks.append(chunk)

    def text(self):
        """Close it, and return what was written to it."""
        if not self.stream.closed:
            self.stream.close()
            self.reader.join()
            os.close(self.master)
        return b"".join(self.chunks).decode()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    made = Terminal()
    yield made
    made.text()


def test_a_file_gets_the_first_and_the_last_step_and_one_line_every_five_seconds():
    lines = shown("auto").splitlines()
    assert lines[0] == HEADLINE
    assert [line.split()[1] for line in lines[1:]] == ["1/100", "41/100", "81/100", "100/100"]


def test_a_line_tells_loss_throughput_time_of_a_step_and_time_left():
    line = shown("plain").splitlines()[1]
    assert line == "step 1/100 loss 2 512 samples/s step 125 ms eta 12s"


def test_a_slow_run_shows_every_step_and_no_step_twice():
    lines = shown("plain", seconds=10, num_steps=3).splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["1/3", "2/3", "3/3"]


def test_a_terminal_gets_a_bar_that_is_drawn_over_itself_and_gives_the_cursor_back(terminal):
    shown("auto", stream=terminal.stream)
    text = terminal.text()
    assert text.startswith(HEADLINE)
    assert text.count("\n") == 2, "the headline and the finished bar"
    assert "100/100 " in text
    assert "loss 2 512 samples/s" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_an_evaluation_is_printed_above_the_bar_and_stays(terminal):
    progress = ProgressCallback("auto", stream=terminal.stream, clock=Clock())
    progress.on_start(make_run_start(2))
    progress.on_step(make_step_end(0))
    progress.on_evaluation(EvaluationEnd(1, {"accuracy": 0.75}))
    progress.on_end(RunEnd(1))
    assert "step 1/2 held-out accuracy 0.75\r\n" in terminal.text()


def test_a_terminal_that_cannot_redraw_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown("auto", stream=terminal.stream)
    assert terminal.text().splitlines()[1].startswith("step 1/100 loss")


def test_json_is_one_object_per_line_and_a_number_that_is_none_is_null():
    stream = io.StringIO()
    progress = ProgressCallback("json", stream=stream, clock=Clock())
    progress.on_start(make_run_start(1))
    progress.on_step(make_step_end(0, loss=math.nan, skip_reason="loss is nan"))
    progress.on_end(RunEnd(1))
    start, one, end = map(json.loads, stream.getvalue().splitlines())
    assert (start["event"], start["plan"], start["batch_size"]) == ("start", PLAN, 64)
    assert (one["event"], one["step"], one["loss"], one["skipped"]) == ("step", 1, None, 1)
    assert (end["event"], end["error"]) == ("end", None)


def test_off_shows_nothing():
    assert shown("off") == ""


def test_an_unknown_mode_is_refused_with_all_that_there_are():
    with pytest.raises(PlanError, match="no progress mode 'tqdm'; the modes are auto, rich, plain, json, relay, off"):
        ProgressCallback("tqdm")  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("out of range\nsee below"), "ValueError: out of range"),
        (KeyboardInterrupt(), "interrupted by Ctrl-C"),
        (SystemExit("stopped by SIGTERM"), "stopped by SIGTERM"),
    ],
)
def test_an_early_end_is_shown_with_its_reason_in_one_line(error, message):
    assert shown("plain", error=error).splitlines()[-1] == f"step 100/100 ended early: {message}"


def test_an_end_before_the_run_has_begun_does_not_count_steps():
    """It said step 0/0, or step 10/0 of a run that was to be resumed."""
    stream = io.StringIO()
    ProgressCallback("plain", stream=stream, clock=Clock()).on_end(RunEnd(10, ValueError("another batch size")))
    assert stream.getvalue() == "ended before the first step: ValueError: another batch size\n"


def test_what_is_relayed_to_another_process_looks_there_as_it_would_here():
    stream = io.StringIO()
    view = make_renderer("plain", stream, Clock())
    for line in shown("relay", seconds=10, num_steps=3).split("\n")[:-1]:
        record = parse_relayed(line)
        assert record is not None
        view.show(record)
    assert stream.getvalue() == shown("plain", seconds=10, num_steps=3)
    for line in ("step 1/3 loss 2", "\x1e", "\x1e{", "\x1e[]", '\x1e{"event": 1}'):
        assert parse_relayed(line) is None


def test_a_skipped_step_is_counted_and_leaves_the_loss_a_number():
    meter = ThroughputMeter()
    for event in (make_step_end(0, loss=4.0), make_step_end(1, loss=math.nan, skip_reason="loss is nan")):
        meter.add(event)
    assert (meter.loss, meter.skipped) == (4.0, 1)


def test_the_pace_follows_the_last_seconds_and_forgets_the_first_steps():
    meter = ThroughputMeter()
    meter.add(make_step_end(0, seconds=2.0))
    for number in range(1, 200):
        meter.add(make_step_end(number, seconds=0.1))
    assert meter.step_s == pytest.approx(0.1, rel=0.01)
    assert meter.samples_per_s == pytest.approx(640, rel=0.01)


def test_before_the_first_step_nothing_is_known_and_nothing_fails():
    assert all(map(math.isnan, (ThroughputMeter().loss, ThroughputMeter().samples_per_s, ThroughputMeter().step_s)))
    assert format_duration(math.nan) == "?"
