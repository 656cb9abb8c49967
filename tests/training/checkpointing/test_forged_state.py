"""A wrong value anywhere in the state of a checkpoint is named, and the run continues from the checkpoint before."""

import copy
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import optim

import counterpoint as cp
from counterpoint.checkpoint import Checkpoint, step_folders
from counterpoint.training.batches.stream import StreamRng
from counterpoint.training.checkpointing.train_state import check_train_state
from counterpoint.value_codec import encode_value
from tests.checkpoint.hostile_files import forge
from tests.training.trainers import equal_bits, fit, mlp, params_of

SCHEDULE = partial(optim.lr_scheduler.MultiStepLR, milestones=[2, 4])
OPTIONS = {"lr_scheduler": SCHEDULE, "optimizer": partial(optim.Adam, lr=0.01)}
FORGED: list[object] = [None, True, -1, 2**70, 1.5, "x", [], {}, [[]], {"x": {"x": []}}, [1, "x"], "9" * 5000]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    fit("data(2)", fit_options={"checkpoint_dir": folder, "save_every": 2}, **OPTIONS)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(saved, tmp_path / "copied")


def list_places(value, path=()):
    """Yield the path of each value in JSON; of lists and of mappings of many names, the first one."""
    yield path
    if isinstance(value, dict):
        for name in list(value)[: 2 if len(path) > 2 else None]:
            yield from list_places(value[name], (*path, name))
    elif isinstance(value, list) and value:
        yield from list_places(value[0], (*path, 0))


def forged(state, path, value):
    """Return a state with another value at a path."""
    state = copy.deepcopy(state)
    *holders, last = path
    holder = state
    for name in holders:
        holder = holder[name]
    holder[last] = value
    return state


def test_each_forged_value_is_accepted_or_named_with_the_rule_and_the_remedy(saved):
    newest = Checkpoint.open(step_folders(saved)[-1])
    named = []
    for path in list(list_places(newest.state))[1:]:
        for value in FORGED:
            manifest = replace(newest.manifest, state=forged(newest.state, path, value))
            try:
                check_train_state(replace(newest, manifest=manifest))
            except cp.CheckpointError as error:
                named.append(str(error))
    assert len(named) > 300
    assert all(text.startswith("step-00000004/manifest.json: state.") for text in named)
    assert all(text.endswith(": take another checkpoint, or restore this one from a backup") for text in named)
    assert max(map(len, named)) < 600


NAMED = {
    ("step",): (-1, "state.step is -1, but must be a whole number, 0 or more"),
    ("cursor", "epoch"): ("x", "state.cursor.epoch is 'x', but must be a whole number, 0 or more"),
    ("plan",): (7, "state.plan is 7, but must be a text"),
    ("replicas",): (2**40, "state.replicas is 1099511627776, but the checkpoint has only 18 tensors"),
    ("slices", "0.weight"): ([0, 2**40], "state.slices['0.weight'] is 1099511627776, but the checkpoint has only"),
    ("delayed_grads", "skipped"): (0, "state.delayed_grads.skipped is 0, but must be true or false"),
    ("model", "0.weight"): ("float64[8, 7]", "state.model['0.weight'] is float64[8, 7], but the tensor model:0.weight is"),
    ("optimizer", "param_groups"): ({}, "state.optimizer.param_groups is a dict of 0, but must be a list"),
    ("scalars", "0.weight", "step"): (["x", "float32"], "step'] is a list of 2, but must be a number, null, or [a"),
    ("extra", "options", 0, "params"): ([1], "is a dict of 11, but must be the options of a parameter group, without its"),
    ("extra", "batch_size"): (0, "state.extra.batch_size is 0, but must be a whole number, 1 or more"),
}  # fmt: skip


@pytest.mark.long(quick=["delayed_grads.skipped", "extra.options.0.params"])
@pytest.mark.parametrize("path", NAMED, ids=lambda path: ".".join(map(str, path)))
def test_a_run_continues_from_the_checkpoint_before_one_with_a_forged_state(path, copied):
    value, reason = NAMED[path]
    forge(step_folders(copied)[-1], lambda content: content.update(state=forged(content["state"], path, value)))
    with pytest.warns(RuntimeWarning, match=re.escape(reason) + ".*; resumed from step-00000002 instead"):
        _, history = fit("data(2)", fit_options={"resume": copied}, **OPTIONS)
    assert [step.step for step in history.steps] == [2, 3]


def encoded(value):
    return b64encode(encode_value(value, "a position")).decode()


NAMED_BY_THE_RUN = {
    ("cursor", "batch"): (10**9, "state.cursor.batch is 1000000000, but an epoch has 4 batches"),
    ("extra", "schedule", "step"): (1, "state.extra.schedule has the name 'step', which no scheduler saves"),
    ("extra", "schedule", "gamma"): ("x", "state.extra.schedule.gamma is 'x', but this run has 0.1"),
    ("extra", "schedule", "base_lrs"): ([{}], "state.extra.schedule.base_lrs[0] is a dict of 0, but this run has 0.01"),
    ("extra", "schedule", "x"): ({"(key, value)": 5}, "state.extra.schedule has an invalid mapping"),
    ("extra", "options", 0, "betas"): ([0.9], "state.extra.options[0].betas has 1 values, but this run has 2"),
    ("extra", "schedule", "last_epoch"): (None, "state.extra.schedule.last_epoch is None, but this run has 0"),
    ("extra", "options", 0, "lr"): (True, "state.extra.options[0].lr is True, but this run has 0.01"),
    ("scalars", "0.weight"): ({}, "state.scalars['0.weight'] has no 'step', but this optimizer keeps a Tensor"),
    ("scalars", "0.weight", "step"): (1.5, "state.scalars['0.weight']['step'] is 1.5, but this optimizer keeps a Tensor"),
    ("scalars", "0.weight", "step", 0): (-1.0, "state.scalars['0.weight']['step'] is a list of 2, but this optimizer"),
    ("extra", "data"): ("?", "state.extra.data is not an encoded value"),
    ("extra", "data", ""): (encoded([1]), "state.extra.data is a list of 1, but must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("path", NAMED_BY_THE_RUN, ids=lambda path: ".".join(map(str, path)))
def test_a_value_that_is_none_of_this_run_is_refused_before_anything_is_loaded(path, copied):
    value, reason = NAMED_BY_THE_RUN[path]
    path = tuple(name for name in path if name != "")
    forge(step_folders(copied)[0], lambda content: content.update(state=forged(content["state"], path, value)))
    model = mlp()
    before = params_of(model)
    with pytest.raises(cp.CheckpointError, match=re.escape(f"step-00000002/manifest.json: {reason}")):
        fit("solo", model, fit_options={"resume": step_folders(copied)[0]}, **OPTIONS)
    assert equal_bits(params_of(model), before)


def test_the_state_of_random_numbers_of_a_stream_is_checked():
    rng = StreamRng(1, 0)
    state = rng.state_dict()
    rng.load_state_dict(state)
    for name, wrong in [
        ("python", (3, (1, 2), None)),
        ("torch", torch.zeros(3)),
        ("numpy", {"state": 1}),
        ("torch", "x"),
    ]:
        with pytest.raises(
            cp.CheckpointError, match=r"saved state of a stream's random numbers cannot be restored .*; take another"
        ):
            rng.load_state_dict({**state, name: wrong})
    with pytest.raises(cp.CheckpointError, match="KeyError: 'python'"):
        rng.load_state_dict({})
