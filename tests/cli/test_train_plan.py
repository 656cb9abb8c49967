"""``counterpoint train --plan FILE``: an edited plan trains, and an impossible one is refused with its line."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.model.model_profile import format_profile
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from tests.model.profiles import build_profile, layer_profile

PLAN = "plan:\n  strategy: {strategy}\n  num_microbatches: {micros}\n  passes: []\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(strategy, micros, *words):
    Path("plan.yaml").write_text(PLAN.format(strategy=strategy, micros=micros), encoding="utf-8")
    short = ("--plan", "plan.yaml", "--steps", "2", "--batch-size", "16", "--progress", "plain", "--folder", "run")
    return CliRunner().invoke(build_app(["train"]), ["train", "digits", "--local", *short, *words])


def test_a_plan_file_says_strategy_microbatches_and_passes(tmp_path):
    result = train("zero(2, level=2)", 2)
    assert result.output.startswith("digits: zero(2, level=2) on 2 ranks, batch 16 = 4 microbatches of 4")
    kept = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())["plan"]
    assert kept == {"strategy": "zero(2, level=2)", "num_microbatches": 2, "passes": []}


def test_the_run_can_be_repeated_without_the_plan_file(tmp_path):
    train("zero(2, level=2)", 2)
    (tmp_path / "plan.yaml").unlink()
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["plan"]
    assert kept == {"strategy": "zero(2, level=2)", "num_microbatches": 2, "passes": [], "num_measured_plans": None}


def test_values_of_a_plan_file_are_shown_with_their_lines():
    lines = train("data(2)", 4, "--show-config").output.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("plan.")] == [
        "plan.yaml:2", "plan.yaml:3", "plan.yaml:4", "default"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "micros", "message"),
    [
        ("datta(2)", 1, "plan.yaml:2: there is no strategy 'datta'; did you mean data?"),
        ("pipeline(40)", 1, "plan.yaml:2: the pipeline has 40 stages, but the model has only"),
        ("data(2)", 3, "plan.yaml:3: a batch of 16 samples cannot be split into the 6 equal microbatches of data(2)"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_line(strategy, micros, message):
    result = train(strategy, micros)
    assert result.exit_code == 1
    assert f"PlanError: {message}" in result.output


def test_a_plan_file_and_a_strategy_exclude_each_other():
    result = train("data(2)", 1, "--strategy", "zero(2)")
    message = "PlanError: --plan plan.yaml has a strategy, and --strategy is zero(2); give one of the two"
    assert (result.exit_code, result.output.strip()) == (1, message)


def test_measuring_needs_a_plan_that_is_left_open():
    result = train("data(2)", 1, "--measure", "2")
    assert "the number of plans that are measured to choose one, but the plan is given" in result.output


def test_a_plan_that_came_with_the_timing_of_another_model_is_refused_before_it_trains(tmp_path):
    timing = build_profile(linear_chain(2), [layer_profile(1.0), layer_profile(1.0)])
    (tmp_path / "plan.profile.json").write_text(format_profile(timing), encoding="utf-8")
    Path("plan.yaml").write_text(Plan.parse("data(2)").to_yaml("plan.profile.json"), encoding="utf-8")
    short = ("--plan", "plan.yaml", "--steps", "1", "--batch-size", "16", "--progress", "plain", "--folder", "run")
    result = CliRunner().invoke(build_app(["train"]), ["train", "digits", "--local", *short])
    assert "plan.yaml:6: the profile is of Chain, but this is another model" in result.output
