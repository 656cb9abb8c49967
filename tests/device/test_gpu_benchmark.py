"""``benchmarks/gpu`` prints its whole table without a GPU, keeps to its limits, and says what is missing."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.gpu import facts, nccl, survey, tests as gpu_tests, throughput
from benchmarks.gpu.checks import Check, format_table, part_verdict, read_checks, write_part
from benchmarks.gpu.run_parts import PARTS, Part, main, measure_part, run_parts, start_process
from benchmarks.gpu.target import make_target
from counterpoint.testing.device_survey import SurveyCase
from tests.forkserver import CONTEXT

pytestmark = pytest.mark.filterwarnings("ignore")
LINES = (
    "bf16 product 32",
    "mlp, 2 plans",
    "waits of the host in a step",
    "pytest -m gpu",
    "zero(2, level=3)",
    "solo | trainer",
    "torch.distributed, 2 ranks",
    "kill -9",
    "pipeline(2) in processes",
    "0.9B, bf16, eager",
    "0.9B, bf16, compiled",
    "0.9B, fp32, eager, peak memory",
    "text, bf16",
    "text, fp16",
    "3 B, state in host memory",
)


@pytest.fixture(autouse=True)
def restore_matmul_precision():
    """Keep the precision of products, which a dry run in this process sets, from later tests: those of rooflines failed."""
    former = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(former)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_dry_run_prints_the_whole_table_without_a_gpu(tmp_path, capsys, monkeypatch):
    (tmp_path / "test_small.py").write_text("def test_one(): pass")
    monkeypatch.setattr(gpu_tests, "DRY", ("-c", os.devnull, str(tmp_path / "test_small.py")))

    def start(part, folder, limit_s):
        measure_part(part, folder, is_dry_run=True, limit_s=limit_s, context=CONTEXT)
        return ""

    assert run_parts(PARTS, tmp_path, start, total_s=10_000) == "PASS"
    table = capsys.readouterr().out
    assert not [part.name for part in PARTS if f"\n{part.name} " not in table]
    assert table.strip() == (tmp_path / "table.txt").read_text().strip()
    assert not [line for line in LINES if f"\n  {line} " not in table]
    assert re.search(r"\n  pipeline\(2\) in processes +\| PASS", table), table  # it was skipped for want of a transport
    assert re.search(r"\n  pytest -m gpu +\| PASS +\| 1 passed in ", table), table
    record = json.loads((tmp_path / "facts.json").read_text())
    assert (record["card"], record["is_dry_run"]) == ("stand_in", True)
    assert {"torch", "python", "date", "driver", "nccl"} <= record.keys()


def test_a_part_that_exceeds_its_limit_is_killed_and_keeps_what_it_has_measured(tmp_path, capsys):
    path, text = str(tmp_path / "slow.json"), json.dumps({"checks": [asdict(Check("first", "PASS"))]})
    script = f"import pathlib, time; pathlib.Path({path!r}).write_text({text!r}); time.sleep(60)"

    def start(part, folder, limit_s):
        assert limit_s == part.limit_s
        return start_process(part, [sys.executable, "-I", "-S", "-c", script], folder, 0.6)

    began = time.monotonic()
    assert run_parts([Part("slow", 20.0, "")], tmp_path, start) == "FAIL"
    assert time.monotonic() - began < 5
    table = capsys.readouterr().out
    assert "  first          | PASS" in table
    assert "  the whole part | FAIL    |          | killed after 1 s; see " in table


@pytest.mark.parametrize(
    ("code", "wrong"), [("import sys; sys.exit(3)", "exit code 3; see "), ("pass", "it has written nothing")]
)
def test_a_part_that_ends_without_a_result_fails(tmp_path, capsys, code, wrong):
    def start(part, folder, limit_s):
        return start_process(part, [sys.executable, "-I", "-S", "-c", code], folder, limit_s)

    assert run_parts([Part("broken", 20.0, "")], tmp_path, start) == "FAIL"
    assert wrong in capsys.readouterr().out


def test_parts_share_the_time_of_all(tmp_path):
    limits = []

    def start(part, folder, limit_s):
        limits.append(round(limit_s))
        write_part(folder / f"{part.name}.json", {}, [Check("x", "PASS")])
        return ""

    outcome = run_parts([Part("a", 20.0, ""), Part("b", 500.0, ""), Part("c", 9.0, "")], tmp_path, start, total_s=100)
    assert (outcome, limits) == ("PASS", [20, 100, 9])
    assert run_parts([Part("a", 20.0, "")], tmp_path, start, total_s=1) == "FAIL"
    assert sum(part.limit_s for part in PARTS if part.is_default) < 540


def test_a_part_that_does_not_exist_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "survey", "speed"])
    assert "there is no part speed; give some of facts, survey, tests" in capsys.readouterr().err


def test_an_error_of_a_part_is_a_line_of_the_table(tmp_path):
    measure_part(Part("x", 1.0, "benchmarks.gpu.facts:nothing"), tmp_path, is_dry_run=True, limit_s=1.0)
    (check,) = read_checks(tmp_path / "x.json")
    assert (check.verdict, check.reason[:14]) == ("FAIL", "AttributeError")


def test_a_part_ends_as_its_worst_check():
    def worst(*marks):
        return part_verdict([Check("x", mark) for mark in marks])

    assert worst("PASS", "SKIP", "-", "FAIL") == "FAIL"
    assert worst("SKIP", "PASS", "-") == "PASS"
    assert worst("SKIP", "-") == "SKIP"
    assert worst("-") == "-"
    table = format_table({"a": [Check("b", "FAIL", "3 of 4", "5 are wanted")]}, {"a": 2.0}).splitlines()
    assert [row.split("|")[-1].strip() for row in table[2:]] == ["", "5 are wanted"]
    assert [row.split("|")[1].strip() for row in table[2:]] == ["FAIL", "FAIL"]


def write_speeds(folder, card, date, speed):
    folder.mkdir()
    figures = {"product": (speed, "TFLOP/s"), "launch": (10.0, "us")}
    checks = [Check(name, "-", figures={"value": value, "unit": unit}) for name, (value, unit) in figures.items()]
    write_part(folder / "facts.json", {"card": card, "date": date}, checks)


def test_a_speed_is_compared_with_the_newest_one_of_the_same_card(tmp_path):
    write_speeds(tmp_path / "a", "X", "2026-01-01", 100.0)
    write_speeds(tmp_path / "b", "X", "2026-02-01", 50.0)
    write_speeds(tmp_path / "c", "Y", "2026-03-01", 9.0)
    earlier = facts.newest_result("X", tmp_path)
    speeds = [facts.compare("product", value, "TFLOP/s", earlier) for value in (44.0, 46.0, 90.0)]
    latencies = [facts.compare("launch", value, "us", earlier) for value in (12.0, 10.5, 5.0)]
    assert [check.verdict for check in (*speeds, *latencies)] == ["FAIL", "PASS", "PASS"] * 2
    assert facts.compare("copy", 1.0, "TB/s", earlier).verdict == "SKIP"
    assert facts.newest_result("Z", tmp_path) == {}


def test_the_results_of_an_h100_can_be_compared_with():
    assert facts.newest_result("NVIDIA H100 80GB HBM3")["values"]["bf16 product 8192"] == 741


def crash_or_hang(case, device):
    if case.plan == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if case.plan == "hangs":
        signal.pause()
    return {"case": str(case), "outcome": "same", "device": device}


@pytest.mark.long
@pytest.mark.process
def test_a_case_that_crashes_or_hangs_is_one_line_and_the_next_one_runs():
    worker = survey.CaseWorker(CONTEXT, crash_or_hang, "x")
    try:
        results = [
            worker.run(SurveyCase("m", plan), 0.4 if plan == "hangs" else 20.0)
            for plan in ("a", "crashes", "b", "hangs", "c")
        ]
    finally:
        worker.end()
    assert [result["outcome"] for result in results] == ["same", "crashes", "same", "hangs", "same"]
    assert results[1] == {"case": "m | crashes", "outcome": "crashes", "error": "the process ended with exit code -9"}
    assert results[3]["error"] == "killed after 0 s"


def test_a_case_with_other_numbers_or_an_error_fails_its_model(monkeypatch):
    results = [
        {"case": "mlp | solo", "outcome": "same", "difference": 0.0},
        {"case": "mlp | x", "outcome": "differs", "difference": 0.1},
    ]
    check = survey.check_of("mlp", results)
    assert (check.verdict, check.measured, check.reason) == ("FAIL", "1 same, 1 differs", "mlp | x: 0.1")
    assert survey.run_case(SurveyCase("gpt", "pipeline(2, schedule=pipedream)"), "cpu")["outcome"] == "refused"
    monkeypatch.setattr(survey, "TOLERANCE", -1.0)
    assert survey.run_case(SurveyCase("mlp", "solo"), "stand_in:0")["outcome"] == "differs"


def test_more_waits_than_ranks_fail():
    few, many = (
        {"case": "mlp | data(2)", "waits": {"a.py:1": 2}},
        {"case": "mlp | data(2)", "waits": {"a.py:1": 2, "b.py:1": 1}},
    )
    assert survey.check_waits([few]).verdict == "PASS"
    assert survey.check_waits([few, many]).verdict == "FAIL"


def test_nccl_is_judged_by_every_rank():
    right = {"all_reduce": True, "seconds to the first result": 0.1}
    assert nccl.check_results("x", [right, right]).verdict == "PASS"
    assert nccl.check_results("x", [right, {**right, "all_reduce": False}]).reason == "rank 1: ['all_reduce']"
    assert nccl.check_results("x", [right, None]).verdict == "FAIL"
    named = {"error": "rank 1 has ended", "seconds": 0.5}
    assert nccl.check_error("x", [named], "rank 1 has ended", 2.0).verdict == "PASS"
    assert nccl.check_error("x", [{**named, "seconds": 3.0}], "rank 1 has ended", 2.0).verdict == "FAIL"
    assert nccl.check_error("x", [{**named, "error": ""}], "rank 1 has ended", 2.0).verdict == "FAIL"


def test_memory_is_judged_by_its_prediction():
    row, target = throughput.ROWS[3], make_target(is_dry_run=True)
    assert throughput.check_memory(row, 100, None, target).verdict == "-"
    assert throughput.check_memory(row, 100, 105, target).verdict == "-"
    target = replace(target, is_dry_run=False)
    assert throughput.check_memory(row, 100, 105, target).verdict == "PASS"
    assert throughput.check_memory(row, 100, 120, target).verdict == "FAIL"
