"""Configuration of a run: nothing is ignored, and every value has an origin."""

import json
import re

import pytest

from counterpoint.cli.config import (
    PlanSection,
    RunConfig,
    SourcedValue,
    TrainingSection,
    apply_job_defaults,
    build_config,
    default_layer,
    file_layer,
    format_sources,
    json_schema,
    merge_layers,
    set_layer,
)
from counterpoint.cli.rank_main import fill_from_job, job_defaults, num_epochs
from counterpoint.errors import PlanError
from counterpoint.jobs.registry import JOBS, find_job


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def refused(layers):
    with pytest.raises(PlanError) as caught:
        build_config(merge_layers([default_layer(), *layers]))
    return str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2E4", 2e4), ("1.5e-3", 1.5e-3), (".5", 0.5)])
def test_a_number_may_have_an_exponent_and_no_point(text, value, tmp_path):
    file = file_layer(written(tmp_path, f"training:\n  lr: {text}\n"))
    for layer in (file, set_layer([f"training.lr={text}"])):
        assert build_config(merge_layers([default_layer(), layer])).training.lr == value
    assert set_layer(["plan.strategy='1e-3'"])["plan.strategy"].value == "1e-3"


def test_a_file_says_the_same_as_python(tmp_path):
    path = written(tmp_path, "job: digits\nplan:\n  strategy: zero3\n  passes: [overlap]\ntraining:\n  epochs: 3\n")
    expected = RunConfig(
        job="digits", plan=PlanSection(strategy="zero3", passes=("overlap",)), training=TrainingSection(epochs=3)
    )
    assert build_config(merge_layers([default_layer(), file_layer(path)])) == expected


def test_a_configuration_survives_its_file(tmp_path):
    config = RunConfig(job="lines", training=TrainingSection(lr=0.5, clip_norm=1.0))
    path = written(tmp_path, config.to_yaml())
    assert build_config(merge_layers([default_layer(), file_layer(path)])) == config


def test_the_jobs_that_a_file_may_name_are_those_of_the_table():
    assert set(json.loads(json_schema())["properties"]["job"]["enum"]) == set(JOBS)


def test_the_schema_refuses_what_the_command_refuses():
    result = json.loads(json_schema())
    assert result["additionalProperties"] is False
    assert all(section["additionalProperties"] is False for section in result["$defs"].values())
    assert "Learning rate" in result["$defs"]["TrainingSection"]["properties"]["lr"]["description"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training:\n  batchsize: 3\n", "run.yaml:2: training.batchsize is not a key of a run; did you mean"),
        ("batch_size: 3\n", "run.yaml:1: batch_size is not a key of a run; did you mean training.batch_size?"),
        ("job: text\njob: digits\n", "run.yaml:2: job is given twice; give it once"),
        ("training: 3\n", "run.yaml:1: training must be a mapping of keys to values"),
        ("a: [1\n", "run.yaml:2: the file is not YAML: while parsing a flow sequence"),
    ],
)  # fmt: skip
def test_a_file_with_a_mistake_is_refused_at_its_line(tmp_path, text, message):
    with pytest.raises(PlanError) as caught:
        file_layer(written(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_is_reported_by_its_name(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.yaml cannot be read: No such file"):
        file_layer(tmp_path / "nowhere.yaml")


def test_a_section_whose_keys_are_all_commented_out_is_empty(tmp_path):
    assert file_layer(written(tmp_path, "training:\n  # epochs: 3\n")) == {}


def test_a_value_of_the_wrong_type_is_reported_with_its_source(tmp_path):
    path = written(tmp_path, "training:\n  epochs: many\n")
    assert "run.yaml:2: training.epochs is 'many'; it must be a valid integer" in refused([file_layer(path)])


def test_a_value_that_is_not_allowed_is_reported_with_the_nearest_one():
    message = refused([set_layer(["output.progress=plian"])])
    assert message.startswith("--set: output.progress is 'plian'; it must be 'auto', 'rich', 'plain'")
    assert message.endswith("did you mean plain?")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.epochs", "is not an assignment; write --set KEY=VALUE"),
        ("training.epoch=3", "did you mean training.epochs?"),
        ("training=3", "training is not a key of a run"),
    ],
)
def test_an_assignment_that_means_nothing_is_refused(assignment, message):
    with pytest.raises(PlanError) as caught:
        set_layer([assignment])
    assert message in str(caught.value)


def test_later_layers_win_and_each_value_says_who_gave_it(tmp_path):
    path = written(tmp_path, "training:\n  seed: 1\n  clip_norm: 1.0\n  batch_size: 8\n")
    flags = {"training.batch_size": SourcedValue(32, "--batch-size")}
    layer = merge_layers([default_layer(), file_layer(path), set_layer(["training.clip_norm=2.0"]), flags])
    lines = format_sources(layer, build_config(layer)).splitlines()
    assert lines[0] == "# default < job < file < --set < flags"
    table = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert table["training.batch_size"] == ["32", "--batch-size"]
    assert table["training.clip_norm"] == ["2.0", "--set"]
    assert table["training.seed"] == ["1", f"{path}:2"]
    assert table["training.nonfinite"] == ["error", "default"]


def test_every_value_there_is_has_a_line_of_its_own():
    layer = default_layer()
    assert len(format_sources(layer, build_config(layer)).splitlines()) == 1 + len(layer)


def test_a_job_fills_in_options_that_were_not_given():
    layer = apply_job_defaults(
        merge_layers([default_layer(), set_layer(["training.lr=0.5"])]), job_defaults(find_job("digits")), "job digits"
    )
    assert layer["training.batch_size"] == SourcedValue(64, "job digits")
    assert layer["training.lr"] == SourcedValue(0.5, "--set")


def test_steps_that_were_asked_for_are_not_cut_off_by_the_jobs_epochs():
    config = fill_from_job(RunConfig(job="digits", training=TrainingSection(max_steps=1000)))
    assert config.training.epochs is None
    assert num_epochs(config, 1438) == 44, "44 epochs of 23 batches are the first with 1000"


def test_who_says_how_long_lifts_what_an_earlier_layer_said(tmp_path):
    path = written(tmp_path, "training:\n  epochs: 3\n")
    layer = merge_layers([default_layer(), file_layer(path), set_layer(["training.max_steps=7"])])
    assert (layer["training.epochs"].value, layer["training.max_steps"].value) == (None, 7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("plan.measure", "plan.num_measured_plans"),
        ("launch.deadline_s", "launch.timeout_s"),
        ("output.keep", "output.keep_last"),
        ("output.save_by", "output.checkpoint_mode"),
    ],
)
def test_a_key_with_an_earlier_name_is_refused_with_its_present_one(tmp_path, old, new):
    section, _, key = old.partition(".")
    message = f"{old} is not a key of a run; {old} is now called {new}"
    with pytest.raises(PlanError, match=f"^--set: {re.escape(message)}$"):
        set_layer([f"{old}=2"])
    with pytest.raises(PlanError, match=rf"run\.yaml:2: {re.escape(message)}$"):
        file_layer(written(tmp_path, f"{section}:\n  {key}: 2\n"))
    assert new in default_layer()


@pytest.mark.parametrize(("old", "new"), [("run", "synchronous"), ("stage", "per_stage")])
def test_a_value_with_an_earlier_name_is_refused_with_its_present_one(old, new):
    key = "output.checkpoint_mode"
    assert refused([set_layer([f"{key}={old}"])]).endswith(f"; {key}={old} is now called {key}={new}")
    assert build_config(merge_layers([default_layer(), set_layer([f"{key}={new}"])])).output.checkpoint_mode == new
