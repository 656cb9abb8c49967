"""A run that was interrupted continues as if nothing had happened, also under another plan; nothing else continues."""

import re
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.checkpoint import Checkpoint, step_folders
from counterpoint.data.sampler import Sampler
from counterpoint.testing.parity_models import plan_for
from counterpoint.training.checkpointing.save_restore import ResumeConfig, find_checkpoint_together
from tests.covering import each_value_once
from tests.process.forked_ranks import run_forked
from tests.training.trainers import (
    STRATEGIES,
    StopAt,
    batch_norm_mlp,
    build_seeded,
    dataset,
    equal_bits,
    fit,
    list_rank_threads,
    make_trainer,
    max_difference,
    mlp,
    params_of,
    state_of,
)

COSINE = partial(optim.lr_scheduler.CosineAnnealingLR, T_max=8)
ONE_CYCLE = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=10)
SETTINGS = {"lr_scheduler": COSINE, "clip_norm": 0.5}
OPTIMIZERS = {
    "sgd with momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "amsgrad": partial(optim.Adam, lr=1e-2, amsgrad=True),
    "nadam": optim.NAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
}


def interrupted(folder, strategy, model, **options):
    """Interrupt a run after step 3 (of 8, four in an epoch), when step 2 has been saved."""
    with pytest.raises(KeyboardInterrupt):
        fit(strategy, model(), fit_options=saving(folder), epochs=2, callbacks=[StopAt(2)], **options)
    assert [path.name for path in step_folders(folder)] == ["step-00000002"]


def saving(folder):
    return {"checkpoint_dir": folder, "save_every": 2}


def resumed(folder, strategy, model, **options):
    return fit(strategy, model(), fit_options={"resume": folder}, epochs=2, **options)


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES, "pipeline(2) * data(2)", "pipeline(2, schedule=gpipe)",
                                      "zero_bubble(2, chunks_per_stage=2)"])  # fmt: skip
def test_an_interrupted_run_continues_bit_for_bit(strategy, tmp_path):
    whole, history = fit(strategy, batch_norm_mlp(), fit_options=saving(tmp_path / "a"), epochs=2, **SETTINGS)
    interrupted(tmp_path / "b", strategy, batch_norm_mlp, **SETTINGS)
    resume_options = {"resume": tmp_path / "b", **saving(tmp_path / "b")}
    result, rest = fit(strategy, batch_norm_mlp(), fit_options=resume_options, epochs=2, **SETTINGS)
    assert [step.step for step in rest.steps] == list(range(2, 8))
    assert [(step.loss, step.options["lr"]) for step in rest.steps] == [
        (step.loss, step.options["lr"]) for step in history.steps[2:]
    ]
    assert equal_bits(result, whole)


@pytest.mark.long(quick=["nadam-zero(2, level=3)"])
@pytest.mark.parametrize(("name", "strategy"), each_value_once([*OPTIMIZERS], ["zero(2, level=3)", "solo"]))
def test_every_optimizer_keeps_its_state(name, strategy, tmp_path):
    optimizer = OPTIMIZERS[name]
    whole, _ = fit(strategy, epochs=2, optimizer=optimizer)
    interrupted(tmp_path, strategy, mlp, optimizer=optimizer)
    assert equal_bits(resumed(tmp_path, strategy, mlp, optimizer=optimizer)[0], whole)


@pytest.mark.long(quick=["in a sequence"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a sequence"])
def test_milestones_still_stand_where_they_did_after_a_resume(together, tmp_path):
    """A checkpoint held their numbers as texts, so that the rate never dropped."""

    def build(optimizer):
        steps = optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        first = optim.lr_scheduler.ConstantLR(optimizer, total_iters=1)
        return optim.lr_scheduler.SequentialLR(optimizer, [first, steps], [1]) if together else steps

    whole, history = fit("data(2)", epochs=2, lr_scheduler=build)
    interrupted(tmp_path, "data(2)", mlp, lr_scheduler=build)
    result, rest = resumed(tmp_path, "data(2)", mlp, lr_scheduler=build)
    assert [step.options["lr"] for step in rest.steps] == [step.options["lr"] for step in history.steps[2:]]
    assert equal_bits(result, whole)


def test_options_that_a_schedule_changes_in_addition_to_the_learning_rate_continue(tmp_path):
    """OneCycleLR turns the momentum as well; it is set anew only at the end of the next step."""
    settings = {"lr_scheduler": ONE_CYCLE, "optimizer": partial(optim.SGD, lr=0.05, momentum=0.9)}
    whole, _ = fit("data(2)", epochs=2, **settings)
    interrupted(tmp_path, "data(2)", mlp, **settings)
    assert equal_bits(resumed(tmp_path, "data(2)", mlp, **settings)[0], whole)


@pytest.mark.long(quick=["data(2)-pipeline(2)"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data(2)", "zero(4, level=3)"),
        ("zero(4, level=3)", "data(2)"),
        ("data(2)", "pipeline(2)"),
        ("pipeline(2)", "data(2)"),
        ("data(2)", "tensor(2)"),
        ("tensor(2)", "data(2)"),
        ("tensor(2) * data(2)", "pipeline(2) * zero(2, level=2)"),
        ("server(2)", "solo"),
        ("solo", "server(2)"),
        ("zero(2, level=1)", "tensor(2)"),
    ],
)
def test_a_run_continues_under_another_plan(before, after, tmp_path):
    names = params_of(batch_norm_mlp())
    whole, history = fit(before, batch_norm_mlp(), epochs=2, **SETTINGS)
    interrupted(tmp_path, before, batch_norm_mlp, **SETTINGS)
    result, rest = resumed(tmp_path, after, batch_norm_mlp, **SETTINGS)
    assert max_difference(result, whole, names) <= 1e-12
    assert rest.losses == pytest.approx(history.losses[2:], rel=1e-12)


class RecordedDataset(torch.utils.data.Dataset[tuple[torch.Tensor, ...]]):
    """Samples that know in which order they were read."""

    def __init__(self):
        self.samples, self.read = dataset(), []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read.append(index)
        return self.samples[index]


def fit_recorded(strategy, passes=(), **options):
    """Return the weights, the losses, and the samples of the last three batches, which have 12, 12 and 10."""
    data, plan = RecordedDataset(), replace(plan_for(strategy, 12), passes=passes)
    weights, history = fit(plan, data=data, epochs=2, **options)
    return (
        weights,
        history.losses,
        [sorted(data.read[start:stop]) for start, stop in ((-34, -22), (-22, -10), (-10, None))],
    )


@pytest.mark.long(quick=["pipeline"])
@pytest.mark.parametrize("strategy", ["pipeline(2) * zero1(2)", "data(3)", "solo"], ids=["pipeline", "data", "solo"])
def test_shards_whose_state_is_on_disk_continue_in_mid_epoch_under_another_plan(strategy, tmp_path):
    weights, losses, samples = fit_recorded("solo")
    options = {"offload_folder": tmp_path / "states", "callbacks": [StopAt(5)]}
    folder = tmp_path / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        fit_recorded(
            "zero3(4)",
            ("overlap", "offload:state=disk"),
            fit_options={"checkpoint_dir": folder, "save_every": 1},
            **options,
        )
    found, rest, read = fit_recorded(strategy, fit_options={"resume": folder})
    assert read == samples
    assert rest == pytest.approx(losses[5:], rel=1e-12)
    assert max_difference(found, weights) <= 1e-12


@pytest.mark.long
def test_after_an_interruption_the_model_has_the_weights_of_the_last_step():
    for strategy in ["solo", *STRATEGIES]:
        model = mlp()
        with pytest.raises(KeyboardInterrupt):
            fit(strategy, model, callbacks=[StopAt(1)])
        assert equal_bits(state_of(model), fit(strategy, fit_options={"max_steps": 2})[0]), strategy
    assert list_rank_threads() == []


def refused(folder, data=None, model=None, **options):
    """Return why a run does not continue from a folder; its model and the folder are as they were."""
    model, listing = mlp() if model is None else model, sorted(map(str, folder.rglob("*")))
    before, batch_size = state_of(model), options.pop("batch_size", 12)
    with pytest.raises(cp.CheckpointError) as caught:
        fit("data(2)", model, data, batch_size=batch_size, fit_options={"resume": folder}, **options)
    assert equal_bits(state_of(model), before)
    assert sorted(map(str, folder.rglob("*"))) == listing
    assert list_rank_threads() == []
    return str(caught.value)


@pytest.fixture
def saved(tmp_path):
    """A folder with two checkpoints."""
    fit("data(2)", fit_options=saving(tmp_path / "run"))
    return tmp_path / "run"


@pytest.mark.long(quick=["options0-...", "options3-optimizer AdamW, this run has SGD"])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"data": dataset(47)}, "dataset {'num_samples': 46, .*}, this run has {'num_samples': 47, .*}"),
        ({"batch_size": 8}, "batch size 12, this run has 8"),
        ({"seed": 7}, "seed 0, this run has 7"),
        ({"optimizer": partial(optim.SGD, lr=0.1)}, "optimizer AdamW, this run has SGD"),
        ({"optimizer": lambda params: optim.AdamW([{"params": [param]} for param in params])},
         "number of parameter groups 1, this run has 6"),
    ],
)  # fmt: skip
def test_a_run_with_other_samples_or_another_optimizer_does_not_continue(options, what, saved):
    assert re.match(
        rf".* was saved with {what}; a run can only continue with the same samples and optimizer; resume with "
        r"them, or (start a new run|give resume_batch_size='new')$",
        refused(saved, **options),
    )


def test_a_checkpoint_of_another_model_lists_what_differs(saved):
    text = refused(saved, model=batch_norm_mlp())
    assert re.search(r"is a checkpoint of another model: \d+ differences\n", text)
    assert "missing: 1.weight float64[8]" in text
    assert "unexpected: 0.bias float64[8]" in text
    frozen = mlp()
    frozen[0].bias.requires_grad_(False)
    assert "changed: 0.bias is float64[8] in the checkpoint, float64[8] frozen in the model" in refused(
        saved, model=frozen
    )


def test_a_checkpoint_of_a_later_step_than_the_last_is_refused(saved):
    with pytest.raises(
        cp.CheckpointError, match=r"is of step 4, but this run ends at step 3; epochs and steps are counted"
    ):
        fit("data(2)", fit_options={"resume": saved, "max_steps": 3})


def test_frozen_parameters_are_the_saved_ones_under_a_split_too(tmp_path):
    """The ranks of a pipeline hold copies of them."""

    def half_frozen(bias):
        model = mlp()
        model[0].bias.requires_grad_(False).fill_(bias)
        return model

    fit("pipeline(2)", half_frozen(1.0), fit_options=saving(tmp_path))
    whole, _ = fit("pipeline(2)", half_frozen(1.0), epochs=2)
    result, _ = fit("pipeline(2)", half_frozen(0.0), epochs=2, fit_options={"resume": tmp_path})
    assert equal_bits(result, whole)


def flip_a_byte(folder):
    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


def test_a_flipped_byte_is_found_before_anything_is_loaded(saved):
    newest = step_folders(saved)[-1]
    flip_a_byte(newest)
    text = refused(newest)
    assert text.startswith(f"{newest.name}/shard-00000.safetensors is damaged: ")
    assert "nothing was loaded" in text


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(saved):
    older, newest = step_folders(saved)
    flip_a_byte(newest)
    with pytest.warns(RuntimeWarning, match=f"^{newest.name}/.* is damaged: .*; resumed from {older.name} instead$"):
        _, history = fit("data(2)", fit_options={"resume": saved})
    assert [step.step for step in history.steps] == [2, 3]


def test_a_folder_without_checkpoints_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    text = refused(tmp_path)
    assert text == (
        f"no checkpoint in {tmp_path}: it has notes.txt; give a folder with checkpoints: step-…/manifest.json; for a "
        "run that starts where nothing is saved, give it as checkpoint_dir, with resume='auto'"
    )
    assert refused(tmp_path / "none").startswith(f"{tmp_path / 'none'} does not exist; give a folder")


def test_a_new_run_does_not_take_a_step_if_its_folder_has_the_checkpoints_of_another(saved):
    """It failed when it saved the first one, after many steps."""
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(
        cp.CheckpointError, match=r"holds 2 checkpoints of another run, the last step-00000004, which .* resume='auto'$"
    ):
        fit("data(2)", fit_options=saving(saved), callbacks=[StopAt(0)])
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


class Starts(cp.Callback):
    """Keeps how runs started."""

    def __init__(self):
        self.events = []

    def on_start(self, event):
        self.events.append(event)


def test_with_auto_a_run_starts_where_nothing_is_saved_and_continues_where_something_is(tmp_path, capsys):
    whole, _ = fit("data(2)", epochs=2, progress="off")
    options, starts = {"fit_options": {**saving(tmp_path / "a"), "resume": "auto"}, "epochs": 2}, Starts()
    with pytest.raises(KeyboardInterrupt):
        fit("data(2)", callbacks=[StopAt(2), starts], progress="plain", **options)
    result, rest = fit("zero(2, level=3)", callbacks=[starts], progress="plain", **options)
    assert [step.step for step in rest.steps] == list(range(2, 8))
    assert max_difference(result, whole) <= 1e-12
    assert [(start.resume_path, start.checkpoint) for start in starts.events] == [
        (tmp_path / "a", None), (tmp_path / "a", tmp_path / "a" / "step-00000002")
    ]  # fmt: skip
    first, second = [line for line in capsys.readouterr().err.splitlines() if "microbatches" in line]
    assert first.endswith(f", starts at step 0: no checkpoint in {tmp_path / 'a'}")
    assert second.endswith(f", resumed at step 2 from {tmp_path / 'a' / 'step-00000002'}")


def test_with_auto_a_folder_whose_checkpoints_are_all_damaged_is_refused(saved):
    for folder in step_folders(saved):
        flip_a_byte(folder)
    with pytest.raises(cp.CheckpointError, match=r"^all 2 checkpoints in .* are damaged"):
        fit("data(2)", fit_options={"resume": "auto", "checkpoint_dir": saved})


class SecondRank:
    """The world of rank 1, to which rank 0 has sent what it found."""

    rank, num_ranks = 1, 2

    def __init__(self, found):
        self.fabrics, self.world, self.found = [self], self, found

    def run(self, work):
        return [work(self)]

    def gather_values(self, label, value, group):
        return [self.found, value]


def find_on_rank_1(found, config):
    """Return what rank 1 continues from, when rank 0 has sent this."""
    ranks: Any = SecondRank(found)
    return find_checkpoint_together(ranks, config)


def test_rank_0_decides_for_all_what_a_run_continues_from(saved, tmp_path):
    config = ResumeConfig(saved, "start")
    flip_a_byte(step_folders(saved)[-1])  # rank 0 has found that, and takes the one before
    found = find_on_rank_1([True, "step-00000002", ""], config)
    assert found is not None
    assert found.step == 2
    assert find_on_rank_1([False, "", ""], config) is None
    with pytest.raises(cp.CheckpointError, match=r"^damaged$"):
        find_on_rank_1([False, "", "damaged"], config)
    with pytest.raises(
        cp.CheckpointError, match=r"rank 0 continues from .*step-00000002, but on rank 1: .*; all ranks read the same"
    ):
        find_on_rank_1([True, "step-00000002", ""], ResumeConfig(tmp_path / "elsewhere"))


def test_auto_needs_a_folder():
    with pytest.raises(
        cp.PlanError, match=r"^resume='auto' .*; give checkpoint_dir=FOLDER or run_dir=FOLDER as well, or"
    ):
        fit("data(2)", fit_options={"resume": "auto"})
    with pytest.raises(cp.PlanError, match=r"^resume_batch_size='other' is not one of same, new$"):
        fit("data(2)", fit_options={"resume_batch_size": "other"})


class Columns(torch.utils.data.TensorDataset):
    """The same samples as those of another class."""


def test_a_dataset_is_the_same_if_its_samples_are_whatever_its_class_is(saved):
    """The class of a script's dataset is in another module when the script is imported."""
    whole, _ = fit("data(2)", epochs=2)
    result, _ = fit("data(2)", data=Columns(*dataset().tensors), epochs=2, fit_options={"resume": saved})
    assert equal_bits(result, whole)


@pytest.mark.long(quick=["8-3-9-"])
@pytest.mark.parametrize(("batch_size", "first", "num_steps", "reread"), [(8, 3, 9, ""), (18, 1, 5, ", and reads 6")])
def test_on_request_a_run_continues_with_another_batch_size(batch_size, first, num_steps, reread, tmp_path):
    """Two steps of 12 samples are done; of 46 samples, 22 are left in batches of 8, or 28 in batches of 18."""
    interrupted(tmp_path, "data(2)", mlp)
    options = {"fit_options": {"resume": tmp_path, "resume_batch_size": "new"}, "epochs": 2, "batch_size": batch_size}
    with pytest.warns(
        UserWarning,
        match=rf"batch size 12, and this run has {batch_size}, .* continues at batch {first} of epoch 0{reread}",
    ):
        _, history = fit("solo", lr_scheduler=COSINE, **options)
    steps_per_epoch = -(-46 // batch_size)
    assert [step.epoch for step in history.steps] == [0] * (steps_per_epoch - first) + [1] * steps_per_epoch
    assert history.steps[-1].step + 1 == num_steps + 2
    other_model = mlp()
    other_model.load_state_dict(load_file_of(tmp_path))
    assert history.losses[0] == pytest.approx(plain_loss(other_model, batch_size, first), rel=1e-12)


def load_file_of(folder):
    """Return the weights of the newest checkpoint in a folder."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(f"model:{name}") for name in mlp().state_dict()}


def plain_loss(model, batch_size, index):
    """Return the loss of a model on one batch of the first epoch."""
    data = dataset()
    inputs, targets = data[torch.from_numpy(Sampler(len(data), batch_size).batch(0, index))]
    return torch.nn.functional.cross_entropy(model(inputs), targets).item()


def test_a_run_continues_on_a_number_of_ranks_that_does_not_divide_its_batch(tmp_path):
    whole, _ = fit("data(2)", epochs=2)
    interrupted(tmp_path, "data(2)", mlp)
    with make_trainer(cp.Plan.parse("zero(5, level=3)")) as trainer:
        trainer.fit(dataset(), batch_size=12, epochs=2, resume=tmp_path)
        assert max_difference(state_of(trainer.model), whole) <= 1e-12


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    fit("zero(2, level=2)", epochs=2, fit_options={"checkpoint_dir": tmp_path, "save_every": 1, "keep_last": 2})
    assert [path.name for path in step_folders(tmp_path)] == ["step-00000007", "step-00000008"]


def test_saving_by_hand_before_the_first_step_is_refused(tmp_path):
    with pytest.raises(cp.CheckpointError, match=r"^there is nothing to save before the first step; call fit\(...\)"):
        make_trainer("data(2)").save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_copied_checkpoint_folder_is_all_that_is_needed(saved, tmp_path):
    whole, _ = fit("data(2)", epochs=2)
    shutil.copytree(saved, tmp_path / "elsewhere")
    result, _ = fit("data(2)", epochs=2, fit_options={"resume": tmp_path / "elsewhere"})
    assert equal_bits(result, whole)


class Diverging(optim.SGD):
    """An optimizer whose second step leaves a weight that is not finite."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.num_steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.num_steps += 1
        if self.num_steps == 2:
            self.param_groups[0]["params"][-1].data.view(-1)[-1] = float("nan")


@pytest.mark.long(quick=["zero(2, level=3)"])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
def test_weights_that_are_not_finite_are_never_saved(strategy, tmp_path):
    with pytest.raises(
        cp.CheckpointError, match=r"\d.(weight|bias) has values that are not finite, so nothing was saved"
    ):
        fit(strategy, optimizer=Diverging, fit_options={"checkpoint_dir": tmp_path, "save_every": 1})
    assert [path.name for path in step_folders(tmp_path)] == ["step-00000001"]
    assert list_rank_threads() == []


def convolutions():
    """A model whose batch norm may see a single sample, because that has several places."""
    return build_seeded(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3)
        )
    )


def train_convolutions(folder, max_steps):
    """Return the losses of a run that continues in the folder; the last batch has microbatches of one sample."""
    _, history = fit(
        "pipeline(2)", convolutions(), epochs=2, num_microbatches=8, batch_norm="deferred",
        fit_options={"checkpoint_dir": folder, "resume": "auto", "max_steps": max_steps},
    )  # fmt: skip
    return history.losses


@pytest.mark.process
def test_a_run_with_batch_norm_continues_in_processes_that_have_parts_of_the_model(tmp_path):
    """The check of its last batch read buffers that were in other processes."""
    whole = train_convolutions(str(tmp_path / "whole"), 8)
    parts = [run_forked(train_convolutions, ranks=2, args=(str(tmp_path / "parts"), steps)) for steps in (3, 8)]
    assert [*parts[0][1], *parts[1][1]] == pytest.approx(whole, rel=1e-12)
