"""What is recorded of a script: its model, its first batches and the optimizer's options, and nothing is trained."""

import textwrap

import pytest
import torch

import counterpoint as cp
from counterpoint.errors import LaunchError
from counterpoint.training.recording import record_script

HEAD = """
import torch, counterpoint as cp
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.zeros(8, dtype=torch.int64))
"""
FIT = """
with cp.Trainer(model, loss=nn.functional.cross_entropy, optimizer=optimizer, strategy="pipeline(2) * data(2)",
                lr_scheduler=lambda it: torch.optim.lr_scheduler.StepLR(it, 1, 0.5)) as trainer:
    trainer.fit(data, batch_size=4, epochs=2, eval_dataset=data, checkpoint_dir=FOLDER, save_every=1)
torch.save(model.state_dict(), FOLDER + ".pt")
"""
LOOP = """
with cp.parallelize(model, optimizer, nn.functional.cross_entropy, strategy="zero3(4)", num_microbatches=2) as step:
    for epoch in range(3):
        x, y = data[:4]
        step(x, y)
        x.zero_()
        optimizer.param_groups[0]["lr"] *= 0.5
"""


def record(folder, text, num_steps=3, which=1):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(HEAD) + text.replace("FOLDER", repr(str(folder / "out"))), encoding="utf-8")
    return record_script(path, [], num_steps=num_steps, which=which)


def learning_rates(run):
    return [step.group_options[0]["lr"] for step in run.steps]


def test_a_fit_is_recorded_and_writes_nothing(tmp_path):
    run = record(tmp_path, FIT)
    assert run.requested_plan.strategy == "pipeline(2) * data(2)"
    assert [tuple(step.inputs.shape) for step in run.steps] == [(4, 3)] * 3
    assert learning_rates(run) == [1.0, 0.5, 0.25]
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_model_is_recorded_as_it_was_before_the_first_step(tmp_path):
    with torch.random.fork_rng(devices=[]):
        run = record(tmp_path, FIT)
        torch.manual_seed(0)
        assert torch.equal(run.model.weight, torch.nn.Linear(3, 2).weight)


def test_an_own_loop_is_recorded_with_the_batches_as_they_were(tmp_path):
    run = record(tmp_path, LOOP, num_steps=2)
    assert (run.requested_plan.strategy, run.requested_plan.num_microbatches) == ("zero3(4)", 2)
    assert learning_rates(run) == [1.0, 0.5]
    assert [float(step.inputs.sum()) > 0 for step in run.steps] == [True, False]


@pytest.mark.parametrize("text", [FIT, LOOP])
def test_a_script_that_takes_fewer_steps_is_stopped_at_the_end_of_its_training(tmp_path, text):
    assert len(record(tmp_path, text, num_steps=50).steps) in {3, 4}
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_another_call_is_recorded_on_request_and_the_first_takes_no_steps(tmp_path):
    run = record(tmp_path, FIT.replace("torch.save(model.state_dict(), FOLDER + '.pt')", "") + LOOP, which=2)
    assert run.requested_plan.strategy == "zero3(4)"
    assert learning_rates(run) == [0.0625, 0.03125, 0.015625], "the first call's scheduler has stepped"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert torch.equal(run.model.weight, torch.nn.Linear(3, 2).weight)


@pytest.mark.parametrize(
    ("text", "which", "message"),
    [
        ("", 1, r"script\.py ended without a call of cp\.Trainer\(\.\.\.\) or cp\.parallelize"),
        ("cp.Trainer(model, loss=print, optimizer=optimizer)", 1, "ended before the first step of call 1 of"),
        (LOOP, 2, r"ended after 1 of these calls, .*, and --which is 2; a script has to train with one of them"),
    ],
)
def test_a_script_that_does_not_train_is_refused_with_what_to_do(tmp_path, text, which, message):
    with pytest.raises(cp.PlanError, match=message):
        record(tmp_path, text, which=which)


def test_accumulated_batches_are_not_recorded_as_one(tmp_path):
    loop = LOOP.replace("step(x, y)", "step.accumulate(x, y), step.accumulate(x, y), step.update()")
    with pytest.raises(LaunchError, match="the step accumulates 2 batches, which cannot be recorded as one"):
        record(tmp_path, loop)
