"""A fit with ``run_dir`` leaves the folder that the built-in jobs leave, and a resumed one continues it."""

import json
import re

import pytest
import torch

import counterpoint as cp
from tests.training.trainers import ADAMW, StopAt, dataset, equal_bits, fit, make_trainer, mlp


def steps_in(folder):
    """Return the number and the loss of each step in a run's metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]


def test_one_argument_gives_a_run_its_folder(tmp_path):
    _, history = fit("data(2)", fit_options={"run_dir": tmp_path / "a", "eval_dataset": dataset()})
    names = {re.sub(r"tfevents.*", "tfevents", path.name) for path in (tmp_path / "a").iterdir()}
    assert names == {
        "checkpoints", "events.out.tfevents", "metrics.jsonl", "plan.yaml", "program.txt", "report.html", "trace.json"
    }  # fmt: skip
    assert steps_in(tmp_path / "a") == [(step.step + 1, step.loss) for step in history.steps]
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000004"]


def test_the_loss_of_the_last_step_is_the_same_wherever_it_is_shown(tmp_path, capsys):
    """The progress showed a mean over the last seconds, and the report another one."""
    _, history = fit("data(2)", epochs=3, progress="plain", fit_options={"run_dir": tmp_path})
    loss = history.losses[-1]
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 12/12 loss")]
    assert shown[0].split()[3] == f"{loss:.4g}"
    cards = re.search(r"training loss, last step.{0,80}?([0-9.]+)<", (tmp_path / "report.html").read_text(), re.DOTALL)
    assert cards is not None
    assert float(cards[1]) == pytest.approx(loss, rel=1e-3)


def test_a_resumed_run_continues_its_folder_also_if_it_had_saved_nothing(tmp_path):
    whole, history = fit("data(2)", epochs=2)
    options = {"run_dir": tmp_path, "resume": "auto", "save_every": 3}
    for step in (1, 5):  # before the first checkpoint, and after it
        with pytest.raises(KeyboardInterrupt):
            fit("data(2)", epochs=2, callbacks=[StopAt(step)], fit_options=options)
    result, rest = fit("data(2)", epochs=2, fit_options=options)
    assert [step.step for step in rest.steps] == list(range(3, 8))
    assert equal_bits(result, whole)
    assert steps_in(tmp_path) == [(step.step + 1, step.loss) for step in history.steps]
    again, _ = fit("data(2)", epochs=2, fit_options={"resume": tmp_path})
    assert equal_bits(again, whole)


def test_a_second_fit_of_a_trainer_continues_its_folder(tmp_path):
    with make_trainer("data(2)", progress="off") as trainer:
        for _ in range(2):
            trainer.fit(dataset(), batch_size=12, run_dir=tmp_path)
    assert [step for step, _ in steps_in(tmp_path)] == list(range(1, 9))


def test_a_loop_of_ones_own_leaves_the_same_folder(tmp_path):
    model, losses = mlp(), []
    with cp.parallelize(
        model, ADAMW, torch.nn.functional.cross_entropy, strategy="pipeline(2)", run_dir=tmp_path
    ) as step:
        for inputs, targets in torch.utils.data.DataLoader(dataset(), batch_size=12):
            losses.append(step(inputs, targets))
    assert steps_in(tmp_path) == list(enumerate(losses, 1))
    assert {"plan.yaml", "program.txt", "report.html", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
    with (
        pytest.raises(cp.PlanError, match="already holds a run"),
        cp.parallelize(model, ADAMW, torch.nn.functional.cross_entropy, strategy="solo", run_dir=tmp_path) as step,
    ):
        step(inputs, targets)


def fail_after_an_epoch(folder):
    """Train in a loop under an asynchronous pipeline, and raise an error of the user's own."""
    options = {"strategy": "pipeline(2, schedule=pipedream)", "run_dir": folder}
    with cp.parallelize(mlp(), ADAMW, torch.nn.functional.cross_entropy, **options) as step:
        for inputs, targets in torch.utils.data.DataLoader(dataset(), batch_size=12):
            step(inputs, targets)
        raise ValueError("no more")


def test_a_loop_that_fails_says_so_in_its_report(tmp_path):
    with pytest.raises(ValueError, match="no more"):
        fail_after_an_epoch(tmp_path)
    assert [number for number, _ in steps_in(tmp_path)] == [1, 2, 3]
    assert "ended early: ValueError: no more, after step 3" in (tmp_path / "report.html").read_text()


def test_a_folder_of_another_run_is_refused(tmp_path):
    fit("data(2)", fit_options={"run_dir": tmp_path})
    with pytest.raises(cp.CheckpointError, match=r"holds 1 checkpoints of another run, the last step-00000004"):
        fit("data(2)", fit_options={"run_dir": tmp_path})
    with pytest.raises(cp.PlanError, match=r"already holds a run; each run needs its own"):
        fit("data(2)", fit_options={"run_dir": tmp_path, "checkpoint_dir": tmp_path / "other"})
