"""``initialize``: forward, backward and step train what one plain loop trains on the samples of all ranks."""

import subprocess
import sys
from argparse import ArgumentParser
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import counterpoint as cp
import counterpoint.compat.deepspeed as deepspeed
from tests.compat.deepspeed import training_scenarios as training
from tests.compat.deepspeed.rank_processes import on_ranks, once_on_ranks

CASES = [(name, stage) for name in training.REFERENCES for stage in training.STAGES]


def require_equal(found, expected):
    (params, norms), (expected_params, expected_norms) = found, expected
    assert params == pytest.approx(expected_params, rel=1e-12, abs=1e-12)
    assert norms == pytest.approx(expected_norms, rel=1e-12)


@pytest.mark.parametrize(("name", "stage"), [*CASES, ("adamw", 3)])
def test_one_rank_trains_what_a_plain_loop_trains(name, stage):
    sections, reference = training.REFERENCES[name]
    require_equal(training.train(training.config_of(stage, **sections), make=name), training.alone(1, **reference))


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_two_ranks_train_what_a_plain_loop_trains_on_the_samples_of_both(name, stage):
    expected = training.alone(2, **training.REFERENCES[name][1])
    for results in once_on_ranks(training.train_all):
        require_equal(results[f"{name} at stage {stage}"], expected)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_from_stage_1_on_a_rank_has_the_state_of_its_share_only():
    (*first, numel), (*second, _) = on_ranks(training.state_sizes)
    assert first[0] == second[0] == numel
    assert [one + other for one, other in zip(first[1:], second[1:], strict=True)] == [numel, numel]
    assert abs(first[1] - second[1]) <= 1


@pytest.mark.process
@pytest.mark.timeout(120)
def test_all_ranks_begin_with_the_weights_of_rank_0():
    assert on_ranks(training.started_from_other_weights) == [training.values(training.Net())] * 2


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "autocast"])
def test_narrow_precisions_train_equally_on_ranks_and_near_float32(precision):
    wide, _ = training.alone(2, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    first, second = (results[precision] for results in once_on_ranks(training.all_in_half))
    assert first == second
    for params, num_skipped, _ in first:
        assert num_skipped == 0
        assert params != pytest.approx(wide, abs=1e-7)
        assert params == pytest.approx(wide, abs=0.01)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_loss_scale_that_overflows_skips_the_step_and_halves_itself():
    untrained = training.values(training.Net(torch.float32))
    for results in once_on_ranks(training.all_in_half):
        assert results["scale of 2**30"] == [[untrained, 2, 2.0**28]] * 2


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_continues_on_any_number_of_ranks_at_any_stage(stage, tmp_path):
    straight, _ = on_ranks(partial(training.save_in_between, str(tmp_path), stage))
    on_one = training.load_and_continue(str(tmp_path), 0)
    on_two = on_ranks(partial(training.load_and_continue, str(tmp_path), 1))
    assert [on_one, *on_two] == [pytest.approx(straight, rel=1e-12, abs=1e-12)] * 3
    (tmp_path / "global_step2" / "optimizer-1-of-2.state").unlink()
    with pytest.raises(cp.CheckpointError, match=r"optimizer-1-of-2.state, the state of rank 1 of 2; copy all"):
        training.load_and_continue(str(tmp_path), 0)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_checkpoint_of_one_rank_continues_on_two(tmp_path):
    microbatches = {"gradient_accumulation_steps": 4}
    config = training.config_of(0, training.ADAMW, scheduler=training.CYCLE) | microbatches
    engine = make_engine(config)
    for step in range(4):
        for rank in range(2):
            for microbatch in range(2):
                inputs, targets = training.batch(rank, step, microbatch)
                engine.backward(nn.functional.cross_entropy(engine(inputs), targets))
                engine.step()
        if step == 1:
            engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    found = on_ranks(partial(training.load_and_continue, str(tmp_path), 2))
    assert found == [pytest.approx(training.values(engine.module), rel=1e-12, abs=1e-12)] * 2


def make_engine(config=None, **arguments):
    sections = training.config_of(0, training.ADAMW) if config is None else config
    return deepspeed.initialize(model=training.Net(), config=sections, **arguments)[0]


def backward(engine, factor=1.0):
    inputs, targets = training.batch(0, 0, 0)
    return engine.backward(factor * nn.functional.cross_entropy(engine(inputs), targets))


def test_only_the_step_at_the_boundary_updates():
    engine = make_engine()
    before, seen = training.values(engine), []
    for _ in range(2):
        seen.append(engine.is_gradient_accumulation_boundary())
        backward(engine)
        engine.step()
        seen.append((engine.micro_steps, engine.global_steps, training.values(engine) == before))
    assert seen == [False, (1, 0, True), True, (2, 1, False)]
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 3)
    assert engine.get_lr() == [0.05]


def test_backward_divides_the_loss_by_the_microbatches():
    engine = make_engine()
    inputs, targets = training.batch(0, 0, 0)
    loss = nn.functional.cross_entropy(engine(inputs), targets)
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
    whole = torch.autograd.grad(nn.functional.cross_entropy(engine(inputs), targets), engine.last.bias)[0]
    assert engine.last.bias.grad.tolist() == pytest.approx((whole / 2).tolist())


def test_a_step_without_backward_is_an_error():
    engine = make_engine()
    backward(engine)
    engine.step()
    with pytest.raises(cp.DataError, match="after 1 microbatches without a backward"):
        engine.step()
    with pytest.raises(cp.DataError, match=r"save_checkpoint\(\) was called after 1 of 2 microbatches"):
        engine.save_checkpoint("unused")
    with pytest.raises(cp.DataError, match=r"a loss that has the shape \(3,\) and requires_grad=True; it takes"):
        engine.backward(torch.ones(3, requires_grad=True))


def test_a_step_of_the_optimizer_itself_is_an_error():
    engine = make_engine()
    before = training.values(engine)
    backward(engine)
    with pytest.raises(cp.DataError, match=r"AdamW.step\(\) was called by the script, .* call step\(\) of the model"):
        engine.optimizer.step()
    assert training.values(engine) == before


def test_a_checkpoint_of_another_model_or_tag_is_an_error(tmp_path):
    engine = make_engine()
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.save_checkpoint(tmp_path, tag="first")
    with pytest.raises(cp.CheckpointError, match="does not fit the model, its optimizer or its schedule: one of both"):
        make_engine(training.config_of(0, training.ADAMW, scheduler=training.CYCLE)).load_checkpoint(tmp_path)
    with pytest.raises(cp.CheckpointError, match=r"second/model.state cannot be read"):
        engine.load_checkpoint(tmp_path, "second")
    with pytest.raises(cp.CheckpointError, match=r"tag='../first' is not a name of a folder"):
        engine.save_checkpoint(tmp_path, tag="../first")
    with pytest.raises(cp.CheckpointError, match=r"client_state.*function, which cannot be encoded"):
        engine.save_checkpoint(tmp_path, client_state={"work": backward})
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "first")


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_are():
    engine = make_engine(training.config_of(0, training.ADAMW) | {"gradient_accumulation_steps": 1})
    before = training.values(engine)
    backward(engine, torch.nan)
    with pytest.raises(cp.DataError, match="step 0 cannot be applied: the norm of its gradient is nan at loss scale 1"):
        engine.step()
    backward(engine)
    engine.step()
    assert engine.global_steps == 1
    assert not any(torch.isnan(param).any() for param in engine.parameters())
    assert training.values(engine) != before


def test_optimizers_and_schedules_of_the_script_are_used():
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _, used, loader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1),
        training_data=torch.utils.data.TensorDataset(torch.arange(7)),
        config=training.config_of(),
    )
    assert used is optimizer
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert loader is not None
    assert [len(part) for (part,) in loader] == [3, 3, 1]
    assert isinstance(make_engine(optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).optimizer, torch.optim.SGD)


def test_a_script_finds_its_configuration_in_its_arguments(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}')
    parser = deepspeed.add_config_arguments(ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    deepspeed.init_distributed("nccl")
    assert deepspeed.initialize(args, training.Net())[0].train_batch_size() == 4


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "initialize() got no model"),
    "no configuration": ({"config": None}, "initialize() got no configuration"),
    "no optimizer": ({"config": training.config_of()}, "got no optimizer, and the configuration has none"),
    "an argument that does not exist": ({"modle": 1}, "initialize() has no argument 'modle'"),
    "a topology": ({"mpu": object()}, "initialize(mpu=...) is not supported; write the plan"),
    "parameters of another model": ({"optimizer": training.adamw(training.Net())}, "is not one of the model's"),
}


@pytest.mark.parametrize("title", WRONG)
def test_a_wrong_argument_is_an_error_that_says_what_to_pass(title):
    arguments, message = WRONG[title]
    given: dict[str, Any] = {"model": training.Net(), "config": training.config_of(0, training.ADAMW)} | arguments
    with pytest.raises(cp.PlanError) as caught:
        deepspeed.initialize(**given)
    assert message in str(caught.value)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_what_two_ranks_cannot_do_is_refused_with_a_remedy():
    for found in on_ranks(training.refused):
        assert "stage=3 on 2 ranks frees weights" in found["stage 3"]
        assert "cp.parallelize(model, optimizer, loss, **read_config(...).arguments)" in found["stage 3"]
        assert "LAMB may compute norms or more of whole parameters" in found["an optimizer of whole parameters"]
        assert "AdamW has state of whole parameters, from earlier steps" in found["an optimizer with state"]
        assert "zero.Init on 2 ranks would shard weights" in found["zero.Init"]
        assert "unused.weight got no gradient in this step" in found["an unused parameter"]


def test_contexts_of_zero_do_nothing_where_weights_are_whole():
    with deepspeed.zero.Init():
        engine = make_engine()
    with deepspeed.zero.GatheredParameters(engine.parameters(), modifier_rank=0):
        engine.last.bias.data.zero_()
    assert engine.module.last.bias.tolist() == [0, 0, 0]


def test_a_method_that_is_missing_says_what_to_do_instead():
    engine = make_engine()
    with pytest.raises(AttributeError, match="DeepSpeedModel has no train_batch; pipelines are plans"):
        engine.train_batch(iter(()))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'lost'"):
        assert engine.lost


def test_reading_a_configuration_does_not_import_torch():
    code = "import sys; from counterpoint.compat.deepspeed import read_config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("place", "is_taken"), [({"device": "cpu"}, True), ({"device": "nvme", "nvme_path": "/disk"}, False)]
)
def test_state_on_disk_needs_a_program_and_state_on_the_host_is_there(place, is_taken):
    config = training.config_of(1) | {"zero_optimization": {"stage": 1, "offload_optimizer": place}}
    model = nn.Linear(2, 2)

    def start():
        return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)

    if is_taken:
        assert start()[0] is not None
    else:
        with pytest.raises(cp.PlanError, match=r"is the pass offload:state=disk, which programs have"):
            start()
