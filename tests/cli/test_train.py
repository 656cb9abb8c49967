"""``counterpoint train``, from its arguments to its folder, with all ranks in this process."""

import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from counterpoint.cli.main import build_app

SHORT = ("--batch-size", "16", "--progress", "plain")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*words):
    return CliRunner().invoke(build_app(["train"]), ["train", *map(str, words)])


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_a_run_ends_with_its_figure_and_the_bar_and_names_its_report(tmp_path):
    result = train("digits", "--steps", 3, "--folder", "run", *SHORT)
    assert result.exit_code == 0
    *_, final_metric, report = result.output.splitlines()
    assert final_metric.startswith("held-out accuracy 0.")
    assert final_metric.endswith(", target at least 0.95: not reached")
    assert report == "report: run/report.html"
    assert (tmp_path / report.removeprefix("report: ")).is_file()


def test_the_folder_of_a_run_has_its_name_and_time(tmp_path):
    train("digits", "--steps", 1, *SHORT)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-20")
    assert {"checkpoints", "config.yaml", "metrics.jsonl", "plan.yaml", "program.txt"} <= {
        p.name for p in folder.iterdir()
    }


def test_all_ranks_in_this_process_train_what_the_plan_says(tmp_path):
    result = train("digits", "--local", "--strategy", "data(2)", "--steps", 2, "--folder", "run", *SHORT)
    assert result.output.startswith("digits: data(2, update=sharded) on 2 ranks, batch 16 = 2 microbatches of 8")
    assert yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())["plan"]["strategy"] == "data(2, update=sharded)"


def test_the_kept_configuration_starts_the_same_run_again(tmp_path):
    train("digits", "--steps", 3, "--lr", "0.01", "--seed", 7, "--folder", "one", *SHORT)
    train("--config", "one/config.yaml", "--folder", "two")
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())["training"]["lr"] == 0.01


def test_a_resumed_run_takes_the_steps_that_the_whole_run_took(tmp_path):
    train("digits", "--steps", 4, "--folder", "whole", *SHORT)
    train("digits", "--steps", 2, "--folder", "parts", *SHORT)
    result = train("--resume", "parts", "--steps", 4)
    assert "resumed at step 2" in result.output
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_from_a_single_checkpoint_leaves_the_saved_run_as_it_was(tmp_path):
    train("digits", "--steps", 3, "--save-every", 2, "--folder", "one", *SHORT)
    before = (tmp_path / "one" / "metrics.jsonl").read_bytes()
    result = train("--resume", "one/checkpoints/step-00000002", "--folder", "two")
    assert "resumed at step 2" in result.output
    assert (tmp_path / "one" / "metrics.jsonl").read_bytes() == before
    assert losses(tmp_path / "two") == losses(tmp_path / "one")[2:]


def test_one_command_starts_a_run_and_continues_it(tmp_path):
    command = ["digits", "--folder", "run", "--resume", "auto", *SHORT]
    first, second = (train(*command, "--steps", steps) for steps in (1, 2))
    assert "starts at step 0: no checkpoint in run/checkpoints" in first.output
    assert "resumed at step 1 from run/checkpoints/step-00000001" in second.output
    assert len(losses(tmp_path / "run")) == 2


def test_another_batch_size_is_accepted_where_it_is_asked_for_and_not_later():
    train("digits", "--steps", 1, "--folder", "run", *SHORT)
    result = train("--resume", "run", "--steps", 2, "--batch-size", 8)
    assert "batch size 16, this run has 8; " in result.output
    with pytest.warns(UserWarning, match="batch size 16, and this run has 8, as resume_batch_size='new' asks"):
        result = train("--resume", "run", "--steps", 2, "--batch-size", 8, "--set", "training.resume_batch_size=new")
    assert result.exit_code == 0
    assert "or give resume_batch_size='new'" in train("--resume", "run", "--steps", 3, "--batch-size", 4).output


def test_a_run_whose_folder_was_moved_continues_there(tmp_path):
    train("digits", "--steps", 2, "--folder", "before", *SHORT)
    (tmp_path / "before").rename(tmp_path / "after")
    train("--resume", "after", "--steps", 3)
    assert len(losses(tmp_path / "after")) == 3
    assert not (tmp_path / "before").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digts"], "PlanError: NAME: job is 'digts'; it must be 'text', 'digits' or 'lines'; did you mean digits?"),
        (["--strategy", "dta"], "PlanError: there is no strategy 'dta'; did you mean data?"),
        (["--strategy", "data(2)", "-n", "3"], "PlanError: data(2) needs 2 ranks (data=2), but there are 3"),
        (["digits", "--local", "--strategy", "data(2)", "--batch-size", "7"], "PlanError: a batch of 7 samples"),
        (["digits", "--resume", "nowhere"], "CheckpointError: there is nothing at nowhere to resume from"),
        (["digits", "--resume", "auto"], "PlanError: --resume auto continues the run in --folder, if there is one; giv"),
        (["digits", "--clip-norm", "-1"], "PlanError: --clip-norm: training.clip_norm is -1.0; it must be"),
    ],
)  # fmt: skip
def test_an_impossible_run_is_refused_in_one_message_and_writes_no_files(tmp_path, words, message):
    result = train(*words)
    assert result.exit_code == 1
    assert result.output.startswith(message)
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_trained(tmp_path):
    train("digits", "--steps", 1, "--folder", "run", *SHORT)
    result = train("digits", "--steps", 1, "--folder", "run")
    assert result.exit_code == 1
    assert result.output.startswith("PlanError: the folder run already holds a run")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_trained():
    result = train("digits", "--steps", 1, "--folder", "/proc/nope", *SHORT)
    assert result.exit_code == 1
    what = "CheckpointError: the folder /proc/nope/checkpoints for checkpoints cannot be created: No such file or directory"
    assert f"{what}; choose another path" in result.output
    assert "step 1/1" not in result.output


def test_a_run_does_not_go_back_to_an_earlier_step():
    """It said `step 2/1 saved` and ended well."""
    train("digits", "--steps", 2, "--folder", "run", *SHORT)
    result = train("--resume", "run", "--steps", 1)
    assert result.exit_code == 1
    assert "is of step 2, but this run ends at step 1; epochs and steps are counted from the" in result.output


def test_a_launcher_and_the_command_do_not_both_start_ranks(monkeypatch):
    contract = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**contract, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    result = train("digits", "-n", 3)
    assert result.output.startswith("LaunchError: a launcher has started 2 ranks, and this one is asked for 3")


def test_the_shown_configuration_names_job_file_and_flag(tmp_path):
    (tmp_path / "run.yaml").write_text("training:\n  seed: 5\n")
    lines = train("digits", "--config", "run.yaml", "--steps", 9, "--show-config").output.splitlines()
    table = {line.split()[0]: line.split(maxsplit=1)[1].split(maxsplit=1) for line in lines[1:]}
    assert table["training.batch_size"] == ["64", "job digits"]
    assert table["training.seed"] == ["5", "run.yaml:2"]
    assert table["training.max_steps"] == ["9", "--steps"]


def test_the_schema_is_json():
    assert json.loads(train("--config-schema").output)["title"] == "RunConfig"


def test_a_run_that_cannot_continue_leaves_a_report_with_the_reason(tmp_path):
    result = train("digits", "--lr", "1e30", "--steps", 9, "--folder", "run", *SHORT)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "report: run/report.html"
    assert "DataError" in result.output
    assert "ended early: DataError" in (tmp_path / "run" / "report.html").read_text()
    assert torch.is_grad_enabled()


def test_an_optimizer_for_large_batches_comes_with_its_rate_and_schedule(tmp_path):
    train("digits", "--optimizer", "lamb", "--batch-size", 512, "--epochs", 5, "--folder", "run", "--progress", "off")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rates = [line["lr"] for line in lines if line["event"] == "step"]
    assert (len(rates), max(rates), rates[-1]) == (15, rates[2], 0.0)
    assert rates[2] == pytest.approx(0.02 * 8**0.5)


def test_an_optimizer_for_large_batches_is_refused_where_no_rate_is_known():
    result = train("text", "--optimizer", "lars", "--steps", 1, *SHORT)
    assert result.exit_code != 0
    assert "text has no learning rate for lars, only for none and its default optimizer" in result.output
