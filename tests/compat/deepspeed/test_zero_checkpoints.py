"""Checkpoints that DeepSpeed 0.19.8 has saved on two ranks (``zero_checkpoints``) are read whole, and training goes on.

Each is of :class:`TiedNet` after three steps of :func:`batch_of`. ``CONTINUED`` has the losses of the next three steps
in DeepSpeed itself, of rank 0 and rank 1.
"""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import counterpoint as cp
import counterpoint.compat.deepspeed as deepspeed
from counterpoint.cli.main import build_app
from counterpoint.compat.deepspeed.start import open_fabric
from counterpoint.compat.deepspeed.zero_files import find_zero_folder, read_zero_checkpoint
from counterpoint.errors import CheckpointError
from tests.compat.deepspeed.rank_processes import on_ranks

SAVED = Path(__file__).parent / "zero_checkpoints"
NAMES = ["s1fp32", "s2fp32", "s3fp32", "s3bf16", "s2fp16"]
CONTINUED = [
    [1.3561902046203613, 1.1997333765029907, 0.9776294231414795],
    [1.207747220993042, 1.0733834505081177, 0.963623046875],
]
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.05}}


class TiedNet(nn.Module):
    """A tied weight, a frozen layer and a buffer."""

    scale: torch.Tensor

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.mid, self.frozen = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.again, self.last = nn.Linear(7, 7), nn.Linear(7, 3)
        self.again.weight = self.mid.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.zeros(7))

    def forward(self, x):
        hidden = self.mid(torch.tanh(self.first(x)))
        return self.last(self.frozen(torch.tanh(self.again(hidden)) * self.scale))


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def groups_of(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def saved(name):
    return read_zero_checkpoint(find_zero_folder(SAVED / name))


def config_of(stage):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "scheduler": SCHEDULER,
        "zero_optimization": {"stage": stage},
    }


def continue_engine(stage, name):
    """Return the losses of a script of DeepSpeed's that continues from one of its checkpoints here."""
    model, rank = TiedNet(), open_fabric().rank
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config_of(stage))
    _, client_state = engine.load_checkpoint(SAVED / name)
    assert client_state == {"note": "hello", "epoch": 2}
    losses = []
    for step in range(engine.global_steps, engine.global_steps + 3):
        inputs, targets = batch_of(rank, step)
        loss = F.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def continue_from_stage_3():
    return [continue_engine(stage, "s3fp32") for stage in (0, 1, 2)]


def test_all_stages_have_the_same_bits():
    first, *others = (saved(name) for name in NAMES[:3])
    for other in others:
        assert [group.names for group in other.groups] == [group.names for group in first.groups]
        for name, weight in (first.trained | first.frozen | first.buffers).items():
            assert torch.equal((other.trained | other.frozen | other.buffers)[name], weight)
        for name, state in first.states.items():
            assert all(torch.equal(other.states[name][key], value) for key, value in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_float32_ones(name):
    checkpoint = saved(name)
    assert {value.dtype for value in (checkpoint.trained | checkpoint.frozen).values()} == {torch.float32}
    assert checkpoint.run["aliases"] == {"again.weight": "mid.weight"}
    exact = saved("s1fp32").trained
    assert all((weight - exact[key]).abs().max() < 5e-3 for key, weight in checkpoint.trained.items())


def test_the_loss_scale_continues():
    assert saved("s2fp16").run["loss_scale"] == (16.0, 3, 2)


@pytest.mark.process
@pytest.mark.long
def test_a_script_continues_with_the_losses_of_deepspeed():
    for rank, losses in enumerate(on_ranks(continue_from_stage_3)):
        for of_stage in losses:
            assert of_stage == pytest.approx(CONTINUED[rank], abs=2e-6)


@pytest.mark.parametrize("strategy", ["zero(2, level=3)", "data(2)"])
def test_an_imported_checkpoint_continues_under_any_plan(strategy, tmp_path):
    deepspeed.import_checkpoint(SAVED / "s3fp32", tmp_path)
    model = TiedNet()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.05)
    config = deepspeed.read_config(config_of(3), num_ranks=2)
    scheduler, losses = config.make_scheduler(optimizer), []
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=strategy) as step:
        for number in range(step.load(tmp_path, scheduler=scheduler), 6):
            inputs, targets = (torch.cat(pair) for pair in zip(batch_of(0, number), batch_of(1, number), strict=True))
            losses.append(float(step(inputs, targets)))
            scheduler.step()
    expected = [sum(pair) / 2 for pair in zip(*CONTINUED, strict=True)]
    assert losses == pytest.approx(expected, abs=2e-6)


def test_the_command_imports_and_the_import_exports(tmp_path):
    run = CliRunner().invoke(build_app(["import"]), ["import", str(SAVED / "s2fp32"), "--output", str(tmp_path / "in")])
    assert run.exit_code == 0, run.output
    assert "step-00000003" in run.output
    cp.export_checkpoint(tmp_path / "in", tmp_path / "plain")
    model = TiedNet()
    model.load_state_dict(torch.load(tmp_path / "plain" / "model.pt", weights_only=True))
    assert torch.equal(model.again.weight, saved("s2fp32").trained["mid.weight"])
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.05)
    optimizer.load_state_dict(torch.load(tmp_path / "plain" / "optimizer.pt", weights_only=True))
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def test_another_order_of_groups_is_refused():
    model = TiedNet()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model)[::-1], config=config_of(1))
    with pytest.raises(CheckpointError, match=r"group 0 of the optimizer has first.bias.*saved were \['first.weight'"):
        engine.load_checkpoint(SAVED / "s2fp32")


def copy_of(name, tmp_path):
    return Path(shutil.copytree(SAVED / name, tmp_path / "copy"))


@pytest.mark.parametrize(("name", "file", "message"), [
    ("s2fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "the optimizer files of 1 ranks, and its first one is of 2"),
    ("s3fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt", "has 1 model files, but stage 3 on 2 ranks has 2"),
    ("s2fp32", "mp_rank_00_model_states.pt", "has no .*model_states.pt of DeepSpeed"),
])  # fmt: skip
def test_a_missing_file_is_named(name, file, message, tmp_path):
    folder = copy_of(name, tmp_path)
    (folder / "global_step3" / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        read_zero_checkpoint(find_zero_folder(folder))


class Unknown:
    """A class that a script has put into its client state."""


def test_objects_of_other_classes_are_refused(tmp_path):
    path = copy_of("s2fp32", tmp_path) / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "helper": Unknown()}, path)
    with pytest.raises(CheckpointError, match=r"has an object of .*Unknown, which is not read.*client_state"):
        read_zero_checkpoint(path.parent)


@pytest.mark.parametrize(("file", "message"), [
    ("layer_00-model_states.pt", "is of a pipeline"),
    ("mp_rank_01_model_states.pt", "is of tensor parallelism"),
    ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "is of tensor parallelism"),
])  # fmt: skip
def test_other_parallelism_is_refused_by_name(file, message, tmp_path):
    folder = copy_of("s2fp32", tmp_path) / "global_step3"
    (folder / file).touch()
    with pytest.raises(CheckpointError, match=message):
        read_zero_checkpoint(folder)


def test_a_truncated_file_is_named(tmp_path):
    path = copy_of("s2fp32", tmp_path) / "global_step3" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt cannot be read.*copy the file again"):
        read_zero_checkpoint(path.parent)


def test_shards_of_another_size_are_an_error(tmp_path):
    path = copy_of("s2fp32", tmp_path) / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    content["param_shapes"][0]["last.weight"] = torch.Size([30, 70])
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"cannot be put together: ValueError: last.weight ends at element"):
        read_zero_checkpoint(path.parent)


@pytest.fixture
def exported(tmp_path):
    """The folder of a universal checkpoint; DeepSpeed 0.19.8 continues from it at stages 1 and 2 with ``CONTINUED``."""
    deepspeed.import_checkpoint(SAVED / "s2fp32", tmp_path / "in")
    with pytest.warns(
        RuntimeWarning, match=r"does not restore .*frozen.weight.*; at stage 3 the options of the 2 groups"
    ):
        cp.export_checkpoint(tmp_path / "in", tmp_path / "out", file_format="deepspeed")
    return tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()


def test_a_universal_checkpoint_has_the_bits_of_each_parameter(exported):
    original = saved("s2fp32")
    for name, weight in original.trained.items():
        stored = {path.stem: torch.load(path, weights_only=True) for path in (exported / "zero" / name).iterdir()}
        assert stored.pop("step") == 3.0
        assert stored.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
        for key, value in {**original.states[name], "fp32": weight}.items():
            assert key == "step" or torch.equal(stored[key]["param"], value)


def test_a_universal_checkpoint_has_the_counts_the_schedule_and_the_options(exported):
    model = torch.load(exported / "mp_rank_00_model_states.pt", weights_only=True)
    counts = [model[key] for key in ("global_steps", "buffer_names", "shared_params")]
    assert counts == [3, ["scale"], {"again.weight": "mid.weight"}]
    assert model["lr_scheduler"]["last_batch_iteration"] == 2
    TiedNet().load_state_dict(model["module"])
    options = torch.load(exported / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["weight_decay"] for group in options["param_groups"]] == [0.1, 0.0]


def test_a_universal_checkpoint_is_not_imported_but_says_what_is(exported):
    with pytest.raises(CheckpointError, match="is a universal checkpoint: give the folder that"):
        read_zero_checkpoint(exported)


def test_what_deepspeed_does_not_have_is_not_exported(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with cp.parallelize(model, optimizer, F.mse_loss, strategy="solo") as step:
        step(torch.ones(4, 2), torch.zeros(4, 1))
        step.save(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"optimizer state exp_avg, .*momentum_buffer, step from Adam's"):
        cp.export_checkpoint(tmp_path / "in", tmp_path / "out", file_format="deepspeed")
    with pytest.raises(CheckpointError, match="for the weights alone give pt"):
        cp.export_checkpoint(tmp_path / "in", tmp_path / "out", file_format="deepspeed", contents="weights")


def test_an_export_to_deepspeed_overwrites_nothing(exported):
    with pytest.raises(CheckpointError, match="global_step3 exists and is not overwritten"):
        cp.export_checkpoint(exported.parents[1] / "in", exported.parent, file_format="deepspeed")


class UnusualNet(nn.Linear):
    """Has a parameter of the name of a path, or one that the forward does not use."""

    def __init__(self, name, *, is_used):
        super().__init__(2, 1)
        self.name, self.is_used = name, is_used
        self.register_parameter(name, nn.Parameter(torch.ones(1)))

    def forward(self, x):
        return super().forward(x) + (getattr(self, self.name) if self.is_used else 0.0)


@pytest.mark.parametrize(
    ("name", "is_used", "text"),
    [
        ("up/on", True, "the parameter .up/on., but"),
        ("spare", False, "no optimizer state of spare, which no gradient"),
    ],
)
def test_parameters_that_deepspeed_cannot_have_are_named(tmp_path, name, is_used, text):
    model = UnusualNet(name, is_used=is_used)
    optimizer = torch.optim.Adam(model.parameters())
    with cp.parallelize(model, optimizer, F.mse_loss, strategy="solo", unused_parameters="skip") as step:
        step(torch.ones(4, 2), torch.zeros(4, 1))
        step.save(tmp_path / "in")
    with pytest.raises(CheckpointError, match=text):
        cp.export_checkpoint(tmp_path / "in", tmp_path / "out", file_format="deepspeed")


def test_files_of_other_ranks_are_named(tmp_path):
    folder = copy_of("s2fp32", tmp_path) / "global_step3"
    path = next(folder.glob("*zero_pp_rank_1_*optim_states.pt"))
    path.rename(folder / path.name.replace("rank_1", "rank_2"))
    with pytest.raises(CheckpointError, match=r"has the optimizer files .*rank_2.* but one of each rank is read"):
        read_zero_checkpoint(folder)
