"""`parity`, `plan`, `profile` and `show` on scripts of users: any layout, and nothing trained but what was asked."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.plan.plan import Plan
from tests.house.source import ROOT

TRAIN = """
import argparse

import torch
import counterpoint as cp
from nets_of_project.small import Net
from settings_of_project import SEED

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--norm", action="store_true")
    options = parser.parse_args()
    print("training with width", options.width)
    torch.manual_seed(SEED)
    model = Net(options.width, options.norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    trainer = cp.Trainer(model, loss=torch.nn.functional.cross_entropy, optimizer=optimizer, strategy="pipeline(2)")
    trainer.fit(data, batch_size=16, epochs=10, checkpoint_dir="checkpoints")
    torch.save(model.state_dict(), "trained.pt")

if __name__ == "__main__":
    main()
"""
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width, norm):
        middle = nn.BatchNorm1d(width) if norm else nn.Tanh()
        super().__init__(nn.Linear(6, width), middle, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of several files, in whose folder nothing else may be written."""
    (tmp_path / "src" / "nets_of_project").mkdir(parents=True)
    (tmp_path / "src" / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "src" / "settings_of_project.py").write_text("SEED = 3\n", encoding="utf-8")
    (tmp_path / "src" / "nets_of_project" / "small.py").write_text(NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    for name in [name for name in sys.modules if name.endswith("_of_project") or "_of_project." in name]:
        del sys.modules[name]


def run(*words):
    return CliRunner().invoke(build_app(words), list(words))


@pytest.mark.long
def test_parity_of_a_project_compares_its_own_plan_and_the_usual_ones(project):
    shown = run("parity", "src/train.py", "--float64", "--", "--width", "8")
    assert (shown.exit_code, shown.stderr) == (0, "training with width 8\n")
    lines = shown.stdout.splitlines()
    assert lines[0] == "Net, 3 steps of 16 samples in float64"
    assert lines[1] == "largest relative differences from a plain PyTorch loop; equal means at most 1e-12"
    assert [line.split("  ")[0] for line in lines[4:10]] == [
        "solo", "data(2)", "zero3(2)", "pipeline(2)", "pipeline(2) * data(2)", "tensor(2)"
    ]  # fmt: skip
    assert lines[-1] == "6 of 6 plans train as a plain PyTorch loop does"


def test_parity_fails_where_a_plan_differs_and_says_what_differs(project):
    words = ("--strategies", "solo, data(2)", "--steps", "2", "--float64", "--json", "--", "--width", "8", "--norm")
    shown = run("parity", "src/train.py", *words)
    assert shown.exit_code == 1
    report = json.loads(shown.stdout)
    assert [(plan["plan"], plan["is_equal"]) for plan in report["plans"]] == [("solo", True), ("data(2)", False)]
    assert report["plans"][1]["causes"][0].startswith("batch norm (1): each microbatch is normalized by its own")


def test_parity_fails_where_a_plan_that_was_asked_for_is_refused(project):
    shown = run("parity", "src/train.py", "--strategies", "pipeline(9),solo", "--", "--width", "8")
    assert shown.exit_code == 1
    assert "pipeline(9) cannot train this model: PlanError: " in shown.stdout


def test_show_shows_the_plan_of_the_script_on_its_own_model(project):
    shown = run("show", "src/train.py", "--", "--width", "8")
    assert shown.exit_code == 0
    assert shown.stdout.startswith(
        "plan          pipeline(2) + overlap\nranks         2 (stage=2)\nmicrobatches  8, 8 in"
    )
    assert "model         3 blocks with 620 B of parameters" in shown.stdout
    assert "rules 1 to 8 hold" in shown.stdout


def test_show_shows_another_plan_for_the_script(project):
    shown = run("show", "src/train.py", "--strategy", "zero3", "-n", "4", "--yaml", "--", "--width", "8")
    assert shown.exit_code == 0
    assert str(Plan.from_yaml(shown.stdout)) == "zero(4, level=3)"


def test_plan_ranks_plans_for_the_model_and_batch_of_the_script(project):
    shown = run("plan", "src/train.py", "-n", "2", "--json", "--", "--width", "8")
    assert shown.exit_code == 0
    plans = {plan["plan"]: plan["num_microbatches"] for plan in json.loads(shown.stdout)["plans"]}
    assert {"data(2)", "pipeline(2)", "tensor(2)"} <= plans.keys()
    assert all(16 % count == 0 for count in plans.values())


def test_plan_compares_plans_in_the_precision_of_the_script(project):
    in_bf16 = TRAIN.replace('strategy="pipeline(2)"', 'strategy="pipeline(2)", precision="bf16"')
    (project / "src" / "train.py").write_text(in_bf16, encoding="utf-8")
    shown = run("plan", "src/train.py", "-n", "2", "--", "--width", "8")
    assert "16 samples in a step, computed in bf16; predicted" in shown.stdout
    refused = run("plan", "src/train.py", "-n", "2", "--precision", "fp16", "--", "--width", "8")
    assert refused.exit_code == 1
    assert "--precision is fp16, but train.py gives precision=bf16" in " ".join(refused.output.split())


def test_profile_measures_the_layers_of_the_script(project):
    shown = run("profile", "src/train.py", "--roofline", "--", "--width", "8")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Net on counted, not run; microbatches of 16\n")


def test_profile_counts_the_gradients_of_the_script_by_power_of_two(project):
    shown = run("profile", "src/train.py", "--gradients", "--", "--width", "8")
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0
    assert lines[0] == "Net on cpu, gradients of 16 samples in float32"
    rows = [line.split()[:3] for line in lines[3:9]]
    assert rows[0] == ["activations", "Linear", str(16 * (8 + 8 + 3))]
    assert rows[-1][:2] == ["weights", "all"] or rows[-2][:2] == ["weights", "all"]
    assert lines[-2].startswith("fp16: ")
    assert lines[-1] == "bf16: has the range of float32, so that no gradient becomes zero without a loss scale"


@pytest.mark.parametrize("command", ["parity", "plan -n 2", "profile", "profile --gradients", "show"])
def test_a_script_without_training_is_refused_by_every_command(project, command):
    name, *words = command.split()
    shown = run(name, "src/settings_of_project.py", *words)
    assert shown.exit_code == 1
    assert shown.stderr.startswith("PlanError: src/settings_of_project.py ended without a call of cp.Trainer(...) or")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "data(2)", "--", "--width", "8"), "--width 8 are arguments of a script, but data(2) is not a script"),
        (("show", "data(2)", "--strategy", "solo"), "--strategy solo is for a script; data(2) is the plan to show"),
        (("show", "src/train.py", "--blocks", "3"), "src/train.py has a model of its own, and --blocks is 3"),
        (("plan", "digits", "-n", "2", "--", "more"), "more are arguments of a script, but digits is not a script"),
    ],
)
def test_options_that_are_not_for_what_is_named_are_refused(project, words, message):
    shown = run(*words)
    assert (shown.exit_code, shown.stderr.startswith(f"PlanError: {message}")) == (1, True)


@pytest.mark.long(quick=["profile --gradients-...", "show-..."])
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("parity --strategies data(2),pipeline(2) --steps 2", "2 of 2 plans train as a plain PyTorch loop does"),
        ("plan -n 2", "was chosen: "),
        ("profile --roofline", "Sequential on counted, not run; microbatches of 32"),
        ("profile --gradients", "Sequential on cpu, gradients of 32 samples in float32"),
        ("show", "plan          data(2, update=sharded)"),
    ],
)
def test_commands_take_a_recipe_on_a_stream_and_write_nothing(command, expected, tmp_path):
    name, *words = command.split()
    arguments = ("--folder", str(tmp_path / "run"))
    shown = run(name, str(ROOT / "examples" / "recipes" / "streaming.py"), *words, "--", *arguments)
    assert (shown.exit_code, expected in shown.stdout) == (0, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["carried_state.py", "detection.py"])
def test_show_cuts_batches_whose_samples_do_not_lie_along_dim_0(recipe):
    shown = run("show", str(ROOT / "examples" / "recipes" / recipe))
    assert (shown.exit_code, "rules 1 to 8 hold" in shown.stdout) == (0, True)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("script", ["own_loop.py", "digits.py"])
def test_an_example_trains_the_same_under_its_plan(script):
    words = ["parity", f"examples/{script}", "--float64", "--strategies", "data(2), pipeline(2)", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "counterpoint", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 plans train as a plain PyTorch loop does")
