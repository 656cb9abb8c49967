"""Which rank is slow, and since which step."""

import io
import json
import math

import counterpoint as cp
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.training.callbacks.callback import RunEnd, SlowRank
from counterpoint.training.callbacks.progress import ProgressCallback
from counterpoint.training.callbacks.run_folder import RunFolder
from counterpoint.training.callbacks.slow_ranks import SlowRankDetector
from counterpoint.training.callbacks.step_reporter import StepReporter
from tests.training.callback_events import make_run_start
from tests.training.trainers import fit


def changes(times_of_step, num_steps):
    """Return what a detector finds, with the step at which it does."""
    detector = SlowRankDetector()
    return [(step, change) for step in range(num_steps) for change in detector.add(step, times_of_step(step))]


def test_a_rank_that_becomes_slow_is_named_with_its_first_slow_step_and_when_it_ends():
    found = changes(lambda step: {0: 0.035, 1: 0.186 if 20 <= step < 40 else 0.036, 2: 0.034}, 60)
    assert found == [
        (27, SlowRank(1, 20, None, 0.186, 0.0345)),
        (47, SlowRank(1, 20, 40, 0.036, 0.0345)),
    ]
    assert str(found[0][1]) == "rank 1 is slow since step 21: busy 186 ms of a step, the others 34.5 ms"
    assert str(found[1][1]) == "rank 1 was slow from step 21 to 40"


def test_a_rank_that_becomes_slower_still_is_named_again():
    found = changes(lambda step: {0: 0.01, 1: 0.02 if step < 30 else 0.15}, 60)
    assert found == [(7, SlowRank(1, 0, None, 0.02, 0.01)), (37, SlowRank(1, 30, None, 0.15, 0.01))]


def test_single_slow_steps_small_differences_and_lone_ranks_are_nothing_to_say():
    assert not changes(lambda step: {0: 0.1, 1: 0.9 if step % 5 == 0 else 0.1}, 100)
    assert not changes(lambda step: {0: 0.100, 1: 0.120}, 100)
    assert not changes(lambda step: {0: 0.001, 1: 0.002}, 100)
    assert not changes(lambda step: {0: float(step)}, 100)


class Listener(cp.Callback):
    """Keeps what is said of slow ranks."""

    def __init__(self):
        self.slow = []

    def on_slow_rank(self, event):
        self.slow.append(event)


def report_steps(callbacks, num_ranks=2):
    """Report twenty steps, in which rank 1 is slow from the third on; return those after which one is to be traced."""
    reporter = StepReporter(callbacks, num_ranks)
    due = []
    for step in range(20):
        result = StepResult(1.0, 4, math.nan, 1.0, "", busy_s=((0, 0.01), (1, 0.05 if step >= 2 else 0.01)))
        reporter.report(step, result, epoch=0, num_samples=4, seconds=0.1, options={"lr": 0.1})
        due += [step] if reporter.is_trace_due else []
    return due


def test_a_slow_rank_is_in_callbacks_progress_metrics_and_report_and_the_next_step_is_traced(tmp_path):
    listener, output = Listener(), io.StringIO()
    callbacks = [RunFolder(tmp_path), ProgressCallback("plain", stream=output), listener]
    for callback in callbacks:
        callback.on_start(make_run_start(20))
    assert report_steps(callbacks) == [9]
    for callback in callbacks:
        callback.on_end(RunEnd(20))
    assert listener.slow == [SlowRank(1, 2, None, 0.05, 0.01)]
    text = "rank 1 is slow since step 3: busy 50 ms of a step, the others 10 ms"
    assert f"step 10/20 {text}" in output.getvalue().splitlines()
    assert text in (tmp_path / "report.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rank"], line["since_step"]) for line in lines if line["event"] == "slow_rank"] == [
        (10, 1, 2)
    ]
    assert lines[1]["busy_s"] == {"0": 0.01, "1": 0.01}


def test_ranks_that_take_turns_in_one_process_are_not_called_slow():
    listener = Listener()
    assert report_steps([listener], num_ranks=1) == []
    assert not listener.slow


def test_every_step_of_a_fit_has_the_busy_time_of_each_rank():
    _, history = fit("zero(2, level=3)")
    assert all(set(step.busy_s) == {0, 1} for step in history.steps)
    assert all(0 < busy_s < step.seconds for step in history.steps for busy_s in step.busy_s.values())
