"""DeepSpeed configurations: each is read in full, or refused by the name of a key."""

import json
from pathlib import Path
from typing import Any

import pytest

import counterpoint as cp
from counterpoint.compat.deepspeed.config import read_config, resolve_batch_sizes
from counterpoint.compat.deepspeed.config_keys import CONFIG_KEYS, format_config_table
from counterpoint.compat.deepspeed.schedules import resolve_scheduler

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[2] / "docs" / "migration" / "deepspeed.md"
BY_PATH = {key.path: key for key in CONFIG_KEYS}
REFUSED = sorted((FOLDER / "refused").glob("*.json"))
AUTO = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 1e-4,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.01,
    "scheduler.params.total_num_steps": 100,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 1e-4,
    "scheduler.params.warmup_num_steps": 10,
}
DATA = {"strategy": "data(2)", "num_microbatches": 1, "unused_parameters": "zero"}
BF16 = "bf16(norms=compute, output=compute, reduce=bf16)"
FP16 = "fp16(norms=compute, output=compute, reduce=fp16)"
SCALE = cp.DynamicLossScale(init_scale=4096.0, growth_interval=500, hysteresis=2)
PREFETCH = ("overlap", "prefetch")
ZERO3 = DATA | {"strategy": "zero(2, level=3, persistence_threshold=100000)", "passes": PREFETCH}
ARGUMENTS = {
    "plain_sgd": DATA,
    "micro_batch_only": DATA,
    "micro_and_accumulation": DATA | {"num_microbatches": 4, "clip_norm": 0.5},
    "all_three_sizes": DATA | {"num_microbatches": 4},
    "zero1_adam": DATA | {"strategy": "zero(2, level=1)"},
    "zero2_fp16": DATA
    | {"strategy": "zero(2, level=2)", "unused_parameters": "error", "precision": FP16, "loss_scale": SCALE}
    | {"clip_norm": 1.0},
    "static_loss_scale": DATA
    | {"precision": "fp16(norms=compute, output=compute)", "loss_scale": 128.0, "nonfinite": "skip"},
    "zero3_bf16": ZERO3
    | {"strategy": "zero(2, level=3, persistence_threshold=1000000)", "num_microbatches": 4}
    | {"precision": BF16, "nonfinite": "skip"},
    "zero3_without_prefetch": DATA | {"strategy": "zero(2, level=3)"},
    "zero_plus_plus": DATA
    | {"strategy": "zero(2, level=3, quantized_weights=int8, quantized_gradients=int4)", "passes": PREFETCH}
    | {"precision": "bf16(norms=compute, output=compute)"},
    "state_on_nvme": DATA
    | {"strategy": "zero(2, level=3)", "passes": (*PREFETCH, "offload:state=disk"), "offload_folder": "/local_nvme"},
    "weights_on_nvme": DATA
    | {"strategy": "zero(2, level=3)", "passes": (*PREFETCH, "offload:state=disk", "offload:params=disk")}
    | {"offload_folder": "/local_nvme"},
    "state_on_cpu": DATA | {"strategy": "zero(2, level=2)", "passes": ("overlap", "offload:state=host")},
    "autocast_bf16": DATA | {"precision": "bf16(autocast=true)"},
    "autocast_fp16": DATA | {"precision": "fp16(autocast=true, reduce=bf16)", "loss_scale": "dynamic"},
    "sums_in_bf16": DATA | {"precision": "fp32(reduce=bf16)", "loss_scale": 1.0},
    "all_auto": ZERO3 | {"num_microbatches": 2, "precision": BF16, "clip_norm": 1.0},
    "logs": DATA,
    "everything_off": DATA,
    "checkpoints": DATA,
    "one_cycle": DATA,
    "range_test": DATA,
    "torch_scheduler": DATA,
}
SIZE: dict[str, Any] = {"train_batch_size": 8}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "quantized weights that are whole": (
        {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
        "zero_quantized_weights=true is for stage 3, but stage=2; write stage 3, or omit it",
    ),
    "quantized gradients of replicas": (
        {"zero_optimization": {"zero_quantized_gradients": True}},
        "zero_quantized_gradients=true is for stage 3, but stage=0; write stage 3, or omit it",
    ),
    "gradients that are quantized and cast": (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}, "communication_data_type": "fp16"},
        "sends gradients in 4 bits, and communication_data_type='fp16' casts them; omit one of the two",
    ),
    "weights on the host": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device=cpu is not supported: weights stay on the device; on CPUs",
    ),
    "weights that are whole": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/a"}}},
        "offload_param.device=nvme offloads shards of weights, which are whole at stage=2; write stage 3",
    ),
    "weights without folder": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device=nvme needs zero_optimization.offload_param.nvme_path",
    ),
    "two folders": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                "offload_param": {"device": "nvme", "nvme_path": "/b"},
            }
        },
        "nvme_path='/a' and zero_optimization.offload_param.nvme_path='/b' are two folders; ranks have one",
    ),
    "a place for states that is none": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "tape"}}},
        "zero_optimization.offload_optimizer.device='tape' is not none, cpu or nvme",
    ),
    "a disk without a folder": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
        "zero_optimization.offload_optimizer.device=nvme needs zero_optimization.offload_optimizer.nvme_path",
    ),
    "a misspelt key of a section": ({"zero_optimization": {"stag": 2}}, "did you mean 'stage'"),
    "a name without its stage": ({"zero_optimization": {"prefetch_bucket_size": 1}}, "did you mean 'stage3_prefetch_"),
    "a misspelt key": ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
    "a misspelt section": ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization'"),
    "a key outside of its section": ({"stage": 2}, "stage belongs to section zero_optimization"),
    "a key inside a section": ({"fp16": {"gradient_clipping": 1}}, "gradient_clipping belongs to no section"),
    "a value instead of a section": ({"zero_optimization": True}, "zero_optimization=True is not a section"),
    "a text instead of a number": ({"zero_optimization": {"stage": "2"}}, "stage='2' is a str; give a whole number"),
    "a number instead of a truth value": ({"fp16": {"enabled": 1}}, "enabled=1 is a int; give true or false"),
    "a stage that does not exist": ({"zero_optimization": {"stage": 4}}, "stage=4 is not 0, 1, 2 or 3"),
    "two precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are enabled"),
    "an unknown dtype": ({"communication_data_type": "fp8"}, "'fp8' is not one of fp32, fp16, bf16"),
    "a negative number of elements": (
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": -1}},
        "stage3_param_persistence_threshold=-1 is negative; give the most elements",
    ),
    "a negative norm": ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 is negative"),
    "a negative loss scale": ({"fp16": {"enabled": True, "loss_scale": -2}}, "loss_scale=-2 is negative"),
    "a scale beyond float32": ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, "the loss scale of fp16"),
    "a misspelt optimizer": ({"optimizer": {"type": "AdmaW"}}, "did you mean 'AdamW'"),
    "a misspelt parameter": ({"optimizer": {"type": "AdamW", "params": {"wight_decay": 0}}}, "'weight_decay'"),
    "an optimizer of one bit": ({"optimizer": {"type": "OneBitAdam"}}, "compress=onebit"),
    "no bias correction": ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "always corrects"),
    "AMSGrad of the fused Adam": ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "torch_adam"),
    "a norm in the optimizer": ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
    "a misspelt schedule": ({"scheduler": {"type": "WarmUpLR"}}, "did you mean 'WarmupLR'"),
    "a misspelt option of a schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
        "did you mean 'warmup_num_steps'",
    ),
    "a schedule of null steps": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": None}}},
        "scheduler.params.warmup_num_steps of WarmupLR is null; give a value: leave it out for 1000",
    ),
    "a schedule whose length is null": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": None}}},
        "scheduler.params.total_num_steps of WarmupDecayLR is null; give a value: it has no default",
    ),
    "a schedule without its length": ({"scheduler": {"type": "WarmupDecayLR"}}, "has no total_num_steps"),
    "a warm-up of an unknown type": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        "is not log or linear",
    ),
    "a warm-up of less": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, "give 0 or more"),
    "a norm that is not a number": ({"gradient_clipping": float("nan")}, "gradient_clipping=nan is not finite"),
    "a rate that is not a number": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": float("nan")}}},
        "scheduler.params.warmup_max_lr=nan is not finite; give a finite number",
    ),
    "betas beyond all numbers": (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, float("inf")]}}},
        "optimizer.params.betas=[0.9, inf] is not finite",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_configuration_becomes_arguments_of_parallelize(name):
    config = read_config(FOLDER / "configs" / f"{name}.json", num_ranks=2, auto=AUTO if name == "all_auto" else None)
    assert config.arguments == ARGUMENTS[name]


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_what_cannot_be_had_is_refused_by_its_name_with_a_remedy(path):
    with pytest.raises(cp.PlanError) as caught:
        read_config(path, num_ranks=2)
    assert str(caught.value).startswith(f"{path}: {path.stem}=")
    assert str(caught.value).endswith(f" is not supported; {BY_PATH[path.stem].text}")


def keys_of(config, prefix=""):
    """Return the keys of the table that a configuration has."""
    for name, value in config.items():
        if f"{prefix}{name}" in BY_PATH:
            yield f"{prefix}{name}"
        else:
            yield from keys_of(value, f"{prefix}{name}.")


def test_every_key_is_in_one_of_the_files():
    assert {path.stem for path in REFUSED} == {key.path for key in CONFIG_KEYS if key.effect == "refused"}
    files = [json.loads((FOLDER / "configs" / f"{name}.json").read_text()) for name in ARGUMENTS]
    read = {path for config in files for path in keys_of(config)}
    assert not [key.path for key in CONFIG_KEYS if key.effect != "refused" and key.path not in read]


def test_every_key_that_deepspeed_documents_is_known_by_itself_or_by_its_section():
    lines = (FOLDER / "documented_keys.txt").read_text().split("\n")
    paths = [line.split(".") for line in lines if line and not line.startswith("#")]
    unknown = [path for path in paths if not any(".".join(path[:end]) in BY_PATH for end in range(1, len(path) + 1))]
    assert len(paths) > 200
    assert not unknown


def test_every_ignored_key_is_in_the_notices_with_its_reason():
    config = read_config(FOLDER / "configs" / "logs.json", num_ranks=1)
    assert len(config.notices) == 13
    assert "steps_per_print: nothing is logged by this key; pass run_dir= for metrics" in config.notices[0]


def test_the_page_has_the_table_of_all_keys():
    assert format_config_table() in DOCS.read_text(encoding="utf-8")
    assert len(BY_PATH) == len(CONFIG_KEYS)


@pytest.mark.parametrize("title", WRONG)
def test_a_wrong_key_or_value_is_an_error_that_says_what_to_write(title):
    config, message = WRONG[title]
    with pytest.raises(cp.PlanError) as caught:
        read_config(SIZE | config, num_ranks=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((32, 4, None), (32, 4, 4)),
        ((32, None, 4), (32, 4, 4)),
        ((None, 4, 4), (32, 4, 4)),
        ((32, None, None), (32, 16, 1)),
        ((None, 4, None), (8, 4, 1)),
        ((32, 4, 4), (32, 4, 4)),
    ],
)
def test_any_two_batch_sizes_imply_the_third(given, sizes):
    whole, micro, steps = given
    found = resolve_batch_sizes(whole, micro, steps, num_ranks=2)
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == sizes[:2]
    assert found.gradient_accumulation_steps == sizes[2]


@pytest.mark.parametrize(
    "given", [(30, 4, 2), (30, 4, None), (3, None, None), (None, None, 2), (0, 1, 1), (2, 4, None)]
)
def test_batch_sizes_that_contradict_each_other_are_an_error_with_the_numbers(given):
    whole, micro, steps = given
    with pytest.raises(cp.PlanError) as caught:
        resolve_batch_sizes(whole, micro, steps, num_ranks=2)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = [f"{name}={size}" for name, size in zip(names, given, strict=True) if size is not None]
    assert any(number in str(caught.value) for number in numbers) or given == (None, None, 2)


def test_auto_without_a_value_names_every_key_that_needs_one():
    with pytest.raises(cp.PlanError) as caught:
        read_config(FOLDER / "configs" / "all_auto.json", num_ranks=2, auto={"train_batch_size": 16})
    assert all(path in str(caught.value) for path in AUTO if path != "train_batch_size")
    assert "reduce_bucket_size" not in str(caught.value)
    assert "and auto has train_batch_size" in str(caught.value)


def test_a_value_for_a_key_that_is_not_auto_is_an_error():
    with pytest.raises(cp.PlanError, match=r"auto has train_batch_size=16, but the key is 8 in the configuration"):
        read_config(SIZE, num_ranks=2, auto={"train_batch_size": 16})
    with pytest.raises(cp.PlanError, match=r"but the key is not there .* did you mean 'train_batch_size'"):
        read_config({"train_batch_size": "auto"}, num_ranks=2, auto={"train_batch_sizes": 16})


def test_a_file_that_is_not_json_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "ds_config.json"
    for text, message in (("{// comment\n}", "cannot be read as JSON"), ("[1]", "it has a list")):
        path.write_text(text)
        with pytest.raises(cp.PlanError) as caught:
            read_config(str(path), num_ranks=2)
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value)


def test_a_warm_up_has_two_steps_at_least_as_in_deepspeed():
    none, two = (
        resolve_scheduler("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": num_steps}) for num_steps in (0, 2)
    )
    rates = [none.learning_rates(num_updates, [0.1]) for num_updates in range(4)]
    assert rates == [two.learning_rates(num_updates, [0.1]) for num_updates in range(4)]
    assert rates[-1] == [0.5]
