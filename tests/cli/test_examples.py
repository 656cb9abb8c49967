"""The examples run unchanged."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = ("examples/digits.py", "--print-losses", "--steps", "6")


def example(name):
    """The example as a module; its main part does not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(*command):
    """What the command writes to standard output, from the root of the tree, without the launcher's prefix."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [line.removeprefix("[rank 0] ") for line in result.stdout.splitlines()]


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_a_screen_and_runs_only_when_it_is_asked_to(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert 'if __name__ == "__main__":\n    main(' in text


def test_a_loop_of_ones_own_learns():
    losses = example("own_loop").main("zero3(2)", 20)
    assert losses[-1] < losses[0] / 2


@pytest.mark.long
def test_every_strategy_of_the_comparison_trains_what_one_rank_trains():
    assert max(example("strategies").main().values()) < 1e-12


def test_a_lost_message_is_reported_with_the_broken_rule():
    assert "verifier rule 2 violated: deadlock" in example("read_a_program").main()


def test_the_example_of_the_readme_comes_to_the_same_loss_in_every_start(capsys):
    """Its model was built without a seed, so that two launchers gave two losses."""
    text = (EXAMPLES.parent / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0].replace("epochs=3", "epochs=1, max_steps=3")
    shown = []
    for seed in range(2):
        torch.manual_seed(seed)
        exec(code, {"__name__": "__main__"})
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(
    "launcher",
    [
        ("counterpoint", "run", "-n"),
        ("torch.distributed.run", "--nproc-per-node"),
    ],
    ids=lambda words: words[0],
)
def test_the_digits_have_the_same_losses_alone_and_under_a_launcher(launcher, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", list(DIGITS))
    example("digits").main()
    alone = capsys.readouterr().out.splitlines()
    assert len(alone) == 6
    assert alone == lines("-m", *launcher, "2", *DIGITS)


@pytest.mark.long
@pytest.mark.process
def test_launched_ranks_return_the_same_losses():
    first, second = lines("examples/launch.py")
    assert first.removeprefix("rank 0") == second.removeprefix("rank 1")


def test_a_script_of_horovod_learns_the_digits(capsys):
    assert example("horovod_mnist").main(["--epochs", "1"]) > 0.8
    assert capsys.readouterr().out.startswith("epoch 0: ")


@pytest.mark.long
@pytest.mark.process
def test_a_script_of_horovod_runs_on_ranks():
    reached = lines("-m", "counterpoint", "run", "-n", "2", "examples/horovod_mnist.py", "--epochs", "1")
    assert len(reached) == 1
    assert reached[0].endswith(" % of the held-out digits")


@pytest.mark.long
def test_a_script_of_kvstore_learns_the_digits(capsys):
    assert example("kvstore_digits").main(["--epochs", "1"]) > 0.8
    assert capsys.readouterr().out.startswith("dist_sync with 1 workers: ")
