"""The folder of a run: complete after it, readable at every moment, one run's and no other's."""

import errno
import html
import json
import math
import os
import re
import struct
from dataclasses import asdict, replace
from fractions import Fraction

import pytest
import yaml

from counterpoint.errors import PlanError
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.profiler.torch_build import find_speed_costs, read_torch_build
from counterpoint.program.instruction import Backward
from counterpoint.program.text import parse_program
from counterpoint.training.callbacks.callback import RunEnd
from counterpoint.training.callbacks.run_folder import RunFolder
from counterpoint.training.reporting.calibration import calibrate, simulate_calibrated
from counterpoint.training.reporting.run_report import DownsampledSeries
from counterpoint.training.reporting.tensorboard import TensorBoardWriter, crc32c
from tests.model.profiles import build_profile, layer_profile
from tests.training.callback_events import PLAN, Clock, make_run_start, make_step_end, make_trace_recorded, send_events


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def event_records(path):
    """Every message of an event file, its checksums verified."""
    data, messages = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        for part, at in ((data[:8], 8), (data[12 : 12 + length], 12 + length)):
            crc = crc32c(part)
            assert struct.unpack_from("<I", data, at)[0] == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
        messages.append(data[12 : 12 + length])
        data = data[16 + length :]
    return messages


def test_a_finished_run_leaves_every_file_and_no_draft(tmp_path):
    send_events(RunFolder(tmp_path / "run", config="job: digits\n", clock=Clock()))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    events = names - {"config.yaml", "metrics.jsonl", "plan.yaml", "program.txt", "report.html", "trace.json"}
    assert len(names) == 7
    assert events == {"events.out.tfevents.0.000000.counterpoint"}


def test_plan_and_program_can_be_read_back(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    assert str(Plan.from_yaml((tmp_path / "plan.yaml").read_text())) == PLAN
    assert parse_program((tmp_path / "program.txt").read_text()).num_ranks == 4


def test_a_plan_that_was_split_by_a_profile_has_it_next_to_it(tmp_path):
    timing = build_profile(linear_chain(2), [layer_profile(1.0, 2.0), layer_profile(1.0, 2.0)])
    RunFolder(tmp_path).write_plan(replace(Plan.parse("pipeline(2, balance=(1,1))"), profile=timing))
    assert (tmp_path / "plan.profile.json").exists()
    assert Plan.from_file(tmp_path / "plan.yaml").profile == timing


def test_metrics_have_a_line_for_every_step_and_evaluation(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    result = lines(tmp_path)
    assert [(line["event"], line["step"]) for line in result] == [
        ("build", 0), *(("step", number) for number in (1, 2, 3, 4)), ("evaluation", 4), ("end", 4)
    ]  # fmt: skip
    assert result[2]["loss"] == 0.5
    assert result[1]["grad_norm"] is None, "nan is not JSON"
    assert result[5]["metrics"] == {"accuracy": 0.75}


def test_a_line_is_on_disk_as_soon_as_its_step_is_done(tmp_path):
    folder = RunFolder(tmp_path, clock=Clock())
    folder.on_start(make_run_start())
    folder.on_step(make_step_end(0))
    assert [line["event"] for line in lines(tmp_path)] == ["build", "step"]
    folder.on_end(RunEnd(1))


def test_metrics_and_report_say_what_rank_0_computes_with_and_what_of_it_costs_speed(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    build = read_torch_build()
    costs = list(find_speed_costs(build))
    line = lines(tmp_path)[0]
    assert (line["text"], line["build"]) == (str(build), json.loads(json.dumps(asdict(build))))
    assert [(cost["cause"], cost["rule"], cost["remedy"]) for cost in line["speed_costs"]] == [
        (cost.cause, cost.rule, cost.remedy) for cost in costs
    ]
    report = html.unescape((tmp_path / "report.html").read_text())
    assert "Built with" in report
    assert "\n".join([str(build), *(f"{cost.grade}: {cost}" for cost in costs)]) in report


def test_a_run_that_is_resumed_elsewhere_says_so_from_that_step_on(tmp_path, monkeypatch):
    send_events(RunFolder(tmp_path, clock=Clock()))
    here = read_torch_build()
    there = replace(here, version="9.9.9", is_debug=True)
    monkeypatch.setattr("counterpoint.profiler.torch_build.read_torch_build", lambda: there)
    folder = RunFolder(tmp_path, clock=Clock())
    folder.on_start(make_run_start(4, first_step=2))
    folder.on_end(RunEnd(2))
    builds = [(line["step"], line["text"]) for line in lines(tmp_path) if line["event"] == "build"]
    assert builds == [(0, str(here)), (2, str(there))]
    report = folder.report_path.read_text()
    assert "torch 9.9.9" in report
    assert "torch is a debug build" in report
    assert str(here) not in html.unescape(report)


def test_tensorboard_finds_the_curves_of_steps_and_evaluations(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    version, *messages = event_records(next(tmp_path.glob("events.*")))
    assert version.endswith(b"brain.Event:2")
    assert sum(b"train/loss" in message for message in messages) == 4
    second = messages[1]
    assert second[9:11] == b"\x10\x02", "step 2"
    assert b"train/loss\x15" + struct.pack("<f", 0.5) in second
    assert b"held_out/accuracy\x15" + struct.pack("<f", 0.75) in messages[-1]


def test_a_resumed_run_tells_tensorboard_that_later_steps_are_void(tmp_path):
    TensorBoardWriter(tmp_path, Clock(), first_step=7).close()
    _, restart = event_records(next(tmp_path.glob("events.*")))
    assert restart[9:] == b"\x10\x08" + b"\x3a\x02\x08\x01", "session log: start, from step 8 on"


def test_the_checksum_is_crc32c():
    assert crc32c(b"\x00" * 32) == 0x8A9136AA, "RFC 3720, appendix B.4"


def test_the_trace_has_the_measured_and_the_simulated_ranks_side_by_side(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"{source} rank {rank}" for source in ("measured", "simulated") for rank in range(4)}


def test_the_simulator_gives_back_a_step_that_it_made_itself():
    start = make_run_start()
    measured = make_trace_recorded(start).trace
    assert simulate_calibrated(start.compiled, measured).step_s == pytest.approx(measured.step_s)


def test_an_instruction_that_was_not_measured_costs_what_its_like_cost():
    start = make_run_start()
    costs = calibrate(start.compiled.model, make_trace_recorded(start).trace)
    assert costs.lookup(("forward", (99,))) == pytest.approx(1.0)
    assert costs.lookup(("push", (0,))) == 0.0
    whole = costs.compute_s(Backward(0, 0), Fraction(1))
    assert costs.compute_s(Backward(0, 0, part="weight"), Fraction(1)) == whole / 2 > 0


def test_the_report_of_a_run_that_failed_says_why_and_where(tmp_path):
    send_events(RunFolder(tmp_path, title="my run", clock=Clock()), error=ValueError("the loss is <nan>"))
    text = (tmp_path / "report.html").read_text()
    assert "<title>my run</title>" in text
    assert "ended early: ValueError: the loss is &lt;nan&gt;, after step 4 of 4" in text
    assert lines(tmp_path)[-1] == {"event": "end", "step": 4, "error": "ValueError: the loss is <nan>"}


def test_a_report_seen_while_the_run_continues_does_not_say_that_it_is_finished(tmp_path):
    clock = Clock()
    folder = RunFolder(tmp_path, clock=clock)
    folder.on_start(make_run_start(10))
    clock.now = 31.0
    folder.on_step(make_step_end(0))
    assert "killed, or still running; this page was written after step 1 of 10" in folder.report_path.read_text()
    folder.on_end(RunEnd(10))
    assert "still running" not in folder.report_path.read_text()


def test_another_run_does_not_write_into_the_folder_of_the_first(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(PlanError, match="already holds a run"):
        RunFolder(tmp_path).on_start(make_run_start())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_resumed_run_continues_where_its_checkpoint_was_and_forgets_what_came_after(tmp_path):
    send_events(RunFolder(tmp_path, clock=Clock()))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    folder = RunFolder(tmp_path, clock=Clock())
    folder.on_start(make_run_start(4, first_step=2))
    folder.on_step(make_step_end(2, loss=9.0))
    folder.on_end(RunEnd(3))
    assert [(line["event"], line["step"], line.get("loss")) for line in lines(tmp_path)] == [
        ("build", 0, None), ("step", 1, 1.0), ("step", 2, 0.5), ("build", 2, None), ("step", 3, 9.0), ("end", 3, None)
    ]  # fmt: skip
    assert folder.summary.loss.all_points() == ((1, 1.0), (2, 0.5), (3, 9.0))


def test_the_configuration_is_kept_as_it_was_given(tmp_path):
    send_events(RunFolder(tmp_path, config="job: digits\n", clock=Clock()))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"job": "digits"}
    assert "job: digits" in (tmp_path / "report.html").read_text()


def test_a_run_that_ended_before_it_began_leaves_nothing(tmp_path):
    RunFolder(tmp_path / "run").on_end(RunEnd(0, ValueError("no data")))
    assert not (tmp_path / "run").exists()


def test_a_long_curve_keeps_its_ends_and_its_mean_in_bounded_memory():
    curve = DownsampledSeries(max_points=8)
    for x in range(1, 1001):
        curve.add(x, float(x))
    curve.add(1001, math.nan)
    points = curve.all_points()
    assert len(points) <= 8
    assert points[-1][0] == 1000
    assert curve.points[0] == (curve.stride, (curve.stride + 1) / 2)


def test_a_folder_from_elsewhere_has_no_name_through_which_a_file_of_this_user_is_written(tmp_path):
    """It wrote to where ``.report.html.tmp`` led."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("years of work")
    run.mkdir()
    names = ("plan.yaml", "program.txt", "trace.json", "report.html", "metrics.jsonl")
    for name in (*names[:-1], *(f".{name}.tmp" for name in names), "events.out.tfevents.0.000000.counterpoint"):
        (run / name).symlink_to(precious)
    send_events(RunFolder(run, clock=Clock()))
    assert precious.read_text() == "years of work"
    assert not [name for name in names if (run / name).is_symlink()]


class Disk:
    """Takes as many bytes as there is room for, as ``os.write`` does."""

    def __init__(self, monkeypatch):
        self.room, self.write = 10**6, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.write(descriptor, data[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_costs_records_and_no_step_and_what_is_written_can_be_read(tmp_path, monkeypatch):
    folder, disk = RunFolder(tmp_path, clock=Clock()), Disk(monkeypatch)
    folder.on_start(make_run_start())
    folder.on_step(make_step_end(0))
    disk.room = 20
    with pytest.warns(RuntimeWarning, match=r"could not be written to .*: No space left on device; training continues"):
        folder.on_step(make_step_end(1))
    folder.on_step(make_step_end(2))
    disk.room = 10**6
    folder.on_step(make_step_end(3))
    with pytest.warns(RuntimeWarning, match=r"[4-9] records of the run could not be written to"):
        folder.on_end(RunEnd(4))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 4, 4]
    steps = [message for message in event_records(next(tmp_path.glob("events.*"))) if b"train/loss" in message]
    assert [message[10] for message in steps] == [1, 4]
    assert (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_or_is_no_path_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("metrics.jsonl")
    for folder, reason in (
        (tmp_path, "Too many levels"),
        (tmp_path / ("a" * 300), "too long"),
        (tmp_path / "a\0", "null"),
    ):
        with pytest.raises(PlanError, match=f"the folder .* cannot be .*: .*{reason}"):
            RunFolder(folder).on_start(make_run_start())


def test_names_with_bytes_that_are_not_utf8_are_shown_and_end_no_run(tmp_path):
    name = os.fsdecode(b"run-\xff")
    folder = RunFolder(tmp_path / name, clock=Clock())
    send_events(folder)
    folder.events = TensorBoardWriter(tmp_path / name, Clock())
    folder.write_scalars(1, "held_out", {name: 1.0})
    folder.events.close()
    assert re.search(r"<title>run-.+</title>", folder.report_path.read_text())
