"""What a checkpoint exports is what a plain loop would have, and a plain loop goes on with it exactly."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn, optim
from typer.testing import CliRunner

import counterpoint as cp
from counterpoint.checkpoint import save, step_folders
from counterpoint.cli.main import build_app
from counterpoint.data.sampler import Sampler
from tests.training.trainers import ADAMW, STRATEGIES, build_seeded, dataset, fit, max_difference, mlp

SAVED = 4  # steps of one epoch


def save_run(folder, strategy="data(2)", model=None, **options):
    """Save after each step of an epoch; return what the model has at the end of the second one."""
    fit(strategy, model() if model else mlp(), fit_options={"checkpoint_dir": folder, "save_every": 1}, **options)
    return folder


def continue_plainly(model, optimizer, epoch=1):
    """Train a model in a plain loop, on the batches of an epoch."""
    data = dataset()
    sampler = Sampler(len(data), 12)
    for index in range(sampler.num_batches):
        inputs, targets = data[torch.from_numpy(sampler.batch(epoch, index))]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def two_groups(params):
    """AdamW with and without weight decay, the last parameters first."""
    params = list(params)
    return optim.AdamW([{"params": params[3:], "weight_decay": 0.1}, {"params": params[:3], "lr": 3e-3}], lr=1e-2)


OPTIMIZERS: dict[str, Any] = {
    "adamw": ADAMW,
    "two groups": two_groups,
    "momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "adamax": optim.Adamax,
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "stateless": partial(optim.SGD, lr=1e-2),
}


def load_plain(folder, build_optimizer, model=None):
    """Return a model and its optimizer with exported states."""
    model = model() if model else mlp()
    optimizer = build_optimizer(model.parameters())
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return model, optimizer


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_a_plain_loop_continues_exactly(strategy, tmp_path):
    whole, _ = fit(strategy, epochs=2)
    files = cp.export_checkpoint(save_run(tmp_path / "run", strategy), tmp_path / "plain")
    assert [(file.path.name, file.num_tensors) for file in files] == [("model.pt", 6), ("optimizer.pt", 18)]
    assert max_difference(continue_plainly(*load_plain(tmp_path / "plain", ADAMW)), whole) <= 1e-12


@pytest.mark.long(quick=["stateless"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_exported_in_the_layout_of_torch(name, tmp_path):
    build = OPTIMIZERS[name]
    whole, _ = fit("zero(2, level=2)" if name != "adafactor" else "data(2)", epochs=2, optimizer=build)
    cp.export_checkpoint(save_run(tmp_path / "run", optimizer=build), tmp_path / "plain")
    model, optimizer = load_plain(tmp_path / "plain", build)
    exported = torch.load(tmp_path / "plain" / "optimizer.pt", weights_only=True)
    assert optimizer.state_dict()["param_groups"] == exported["param_groups"]
    assert max_difference(continue_plainly(model, optimizer), whole) <= 1e-12
    plain = mlp()
    own = build(plain.parameters())
    continue_plainly(plain, own, epoch=0)
    mine, theirs = exported["state"], own.state_dict()["state"]
    assert {index: set(state) for index, state in mine.items()} == {
        index: {key for key, value in state.items() if value is not None} for index, state in theirs.items()
    }
    assert exported["param_groups"] == own.state_dict()["param_groups"]


class Tied(nn.Module):
    """A tied weight, a frozen one, and running statistics."""

    def __init__(self):
        super().__init__()
        self.table = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.table.weight
        self.head = nn.Linear(6, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.back(self.norm(self.table(x))))


def test_weights_that_are_tied_are_one_tensor_and_safetensors_has_them_once(tmp_path):
    model = build_seeded(Tied)
    trained, _ = fit("pipeline(2)", model, fit_options={"checkpoint_dir": tmp_path / "run"})
    cp.export_checkpoint(tmp_path / "run", tmp_path / "plain")
    weights = torch.load(tmp_path / "plain" / "model.pt", weights_only=True)
    assert list(weights) == list(trained)
    assert weights["back.weight"].data_ptr() == weights["table.weight"].data_ptr()
    build_seeded(Tied).load_state_dict(weights)
    assert all(torch.equal(weights[name], trained[name]) for name in trained)
    cp.export_checkpoint(tmp_path / "run", tmp_path / "st", file_format="safetensors", contents="weights")
    assert [path.name for path in (tmp_path / "st").iterdir()] == ["model.safetensors"]
    stored = load_file(tmp_path / "st" / "model.safetensors")
    assert stored.keys() == weights.keys() - {"back.weight"}
    assert all(torch.equal(stored[name], trained[name]) for name in stored)


def test_whoever_may_read_a_new_file_may_read_what_is_exported(tmp_path):
    """Safetensors made files that only their owner could read."""
    save_run(tmp_path / "run")
    (tmp_path / "new").touch()
    files = cp.export_checkpoint(tmp_path / "run", tmp_path / "plain", file_format="safetensors")
    assert {file.path.stat().st_mode for file in files} == {(tmp_path / "new").stat().st_mode}


def test_a_run_starts_from_a_plain_state_dict(tmp_path):
    whole, _ = fit("solo", epochs=1)
    start = mlp()
    save_file({name: value.contiguous() for name, value in start.state_dict().items()}, tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert max_difference(fit("zero(2, level=3)", model)[0], whole) <= 1e-12


def test_the_weights_of_replicas_of_their_own_are_their_mean(tmp_path):
    trained, _ = fit("data(2, sync_every=3)", fit_options={"checkpoint_dir": tmp_path / "run"})
    cp.export_checkpoint(tmp_path / "run", tmp_path / "plain")
    weights = torch.load(tmp_path / "plain" / "model.pt", weights_only=True)
    assert max_difference(weights, trained) <= 1e-12


def run_export(*arguments):
    result = CliRunner().invoke(build_app(["export"]), ["export", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_exports_a_step_of_a_run_and_overwrites_nothing(tmp_path):
    save_run(tmp_path / "run" / "checkpoints", "pipeline(2)")
    code, output = run_export(tmp_path / "run", "--output", tmp_path / "plain", "--step", 3)
    assert (code, output.splitlines()[0]) == (
        0, f"step 3 of {tmp_path / 'run' / 'checkpoints' / 'step-00000003'}, saved under pipeline(2)"
    )  # fmt: skip
    assert f"{tmp_path / 'plain' / 'optimizer.pt'}: 18 tensors, " in output
    code, output = run_export(tmp_path / "run", "--output", tmp_path / "plain")
    assert (code, "exists and is not overwritten; give another output folder" in output) == (1, True)
    code, output = run_export(
        tmp_path / "run", "--format", "safetensors", "--weights-only", "--output", tmp_path / "st"
    )
    assert (code, [path.name for path in (tmp_path / "st").iterdir()]) == (0, ["model.safetensors"])


def test_what_is_no_checkpoint_of_a_run_is_answered(tmp_path):
    root = save_run(tmp_path / "run")
    for folder, step, message in [
        (tmp_path / "none", None, r"^.*none does not exist; give a folder with checkpoints$"),
        (root, 9, r"^.* has no checkpoint of step 9; it has those of 2, 3, 4: give another step, or none$"),
        (tmp_path, None, r"^no checkpoint in .*: it has other, run; give a folder with checkpoints"),
        (save(tmp_path / "other", 1, {"x": torch.ones(1)}, {"lr": 1}), None, "is a checkpoint, but not one of a train"),
    ]:
        with pytest.raises(cp.CheckpointError, match=message):
            cp.export_checkpoint(folder, tmp_path / "plain", step=step)
    with pytest.raises(cp.CheckpointError, match=r"^there is no format 'onnx'; give pt, safetensors or deepspeed$"):
        cp.export_checkpoint(root, tmp_path / "plain", file_format="onnx")  # type: ignore[arg-type]  # that is the point
    (tmp_path / "file").touch()
    with pytest.raises(cp.CheckpointError, match=r"cannot be written: .*; give another output folder$"):
        cp.export_checkpoint(root, tmp_path / "file" / "plain")
    shard = step_folders(root)[-1] / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(cp.CheckpointError, match=r"is truncated: .*; nothing was loaded from"):
        cp.export_checkpoint(step_folders(root)[-1], tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
