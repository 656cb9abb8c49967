"""Read a DeepSpeed configuration as the arguments of ``cp.parallelize`` and ``cp.Trainer``; nothing here needs torch.

::

    ds_config.json -> every "auto" replaced -> every key looked up in CONFIG_KEYS -> values by path -> DeepSpeedConfig
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoint.compat.deepspeed.config_keys import CONFIG_KEYS, ConfigKey
from counterpoint.compat.deepspeed.names import suggest_name
from counterpoint.compat.deepspeed.optimizers import OptimizerConfig, resolve_optimizer
from counterpoint.compat.deepspeed.schedules import SchedulerConfig, resolve_scheduler
from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_file
from counterpoint.json_reader import parse_json_file
from counterpoint.model.precision import Precision
from counterpoint.optim.validation import require_counts, shorten
from counterpoint.runtime.loss.loss_scale import DynamicLossScale
from counterpoint.strategies.zero import Zero

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import ParamsT

MAX_CONFIG_BYTES = 2**24
BY_PATH = {key.path: key for key in CONFIG_KEYS}
DTYPE_NAMES = {
    "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
    "bfloat16": "bf16",
}  # fmt: skip
"""DeepSpeed's names of dtypes, also after ``torch.``, and those of plans."""
QUANTIZED_WEIGHTS = "zero_optimization.zero_quantized_weights"
QUANTIZED_GRADIENTS = "zero_optimization.zero_quantized_gradients"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The batch sizes of a configuration, of which ``train_batch_size`` is the product with the number of ranks.

    Args:
        train_batch_size: samples of one step, over all ranks.
        train_micro_batch_size_per_gpu: samples of one microbatch on one rank.
        gradient_accumulation_steps: microbatches of one step on one rank.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration becomes.

    Args:
        arguments: keyword arguments of ``cp.parallelize`` and ``cp.Trainer``: the strategy, the number of microbatches
            and the options that the configuration gives.
        batch_sizes: all three of them.
        stage: of ZeRO, 0 to 3.
        optimizer: None if the script makes it.
        scheduler: None if the script makes it.
        notices: the keys of the configuration that change nothing here, each with the reason.
        drops_last_batch: whether the loader of ``initialize`` leaves out a last batch that is smaller.
        values: of every key that changes what is computed, by its path, with defaults; all three batch sizes.
    """

    arguments: Mapping[str, Any]
    batch_sizes: BatchSizes
    stage: int
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    notices: tuple[str, ...]
    drops_last_batch: bool
    values: Mapping[str, Any]

    def make_optimizer(self, params: ParamsT) -> Optimizer:
        """Return the configured optimizer of some parameters, or of groups of them.

        Raises:
            PlanError: the configuration has none, or torch's has no such parameter.
        """
        from counterpoint.compat.deepspeed.torch_objects import make_optimizer

        if self.optimizer is None:
            raise PlanError("the configuration has no optimizer; add one, or make it in the script")
        return make_optimizer(self.optimizer, params)

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the configured schedule of an optimizer's learning rates, to be stepped after each update.

        Raises:
            PlanError: the configuration has none, or torch's has no such parameter.
        """
        from counterpoint.compat.deepspeed.torch_objects import make_scheduler

        if self.scheduler is None:
            raise PlanError("the configuration has no scheduler; add one, or make it in the script")
        return make_scheduler(self.scheduler, optimizer)


def read_config(
    config: Mapping[str, Any] | str | PathLike[str],
    *,
    num_ranks: int,
    auto: Mapping[str, Any] | None = None,
) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration as arguments of ``cp.parallelize`` and ``cp.Trainer``.

    Every key is mapped, ignored with a notice because it changes no number here, or refused by name. The table of keys
    is in ``docs/migration/deepspeed.md``.

    Args:
        config: the configuration, or the path of its JSON file.
        num_ranks: how many ranks train.
        auto: the values of keys that the configuration gives as ``"auto"``: ``{"optimizer.params.lr": 1e-3}``.

    Raises:
        PlanError: a key is unknown (the message has the nearest one), has a value of another type, asks for something
            that is not supported, or is ``"auto"`` without a value; or the batch sizes contradict each other.

    Example:
        >>> config = read_config(
        ...     {
        ...         "train_batch_size": 16,
        ...         "gradient_accumulation_steps": 2,
        ...         "zero_optimization": {"stage": 2},
        ...         "bf16": {"enabled": True},
        ...         "gradient_clipping": 1.0,
        ...     },
        ...     num_ranks=4,
        ... )
        >>> config.batch_sizes.train_micro_batch_size_per_gpu
        2
        >>> for name, value in config.arguments.items():
        ...     print(f"{name}={value!r}")
        strategy='zero(4, level=2)'
        num_microbatches=2
        unused_parameters='zero'
        precision='bf16(norms=compute, output=compute, reduce=bf16)'
        clip_norm=1.0

    Source:
        https://www.deepspeed.ai/docs/config-json/
    """
    require_counts(num_ranks=num_ranks)
    if isinstance(config, Mapping):
        return _resolve(config, num_ranks, auto or {})
    try:
        return _resolve(_read_json(Path(config)), num_ranks, auto or {})
    except PlanError as error:
        error.args = (f"{config}: {error}",)
        raise


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the content of a configuration file.

    Raises:
        PlanError: it cannot be read, or is not a JSON object.
    """
    try:
        value = parse_json_file(read_regular_file(path, max_bytes=MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise PlanError(f"it cannot be read as JSON: {error}; give a JSON file without comments") from error
    if not isinstance(value, dict):
        raise PlanError(f"it has a {type(value).__name__}, but a configuration is a JSON object: {{...}}")
    return value


def _resolve(config: Mapping[str, Any], num_ranks: int, auto: Mapping[str, Any]) -> DeepSpeedConfig:
    _require_auto_keys(config, auto)
    given = dict(_look_up(_replace_auto(config, auto)))
    _require_no_auto(given, auto)
    notices = tuple(f"{path}: {BY_PATH[path].text}" for path in given if BY_PATH[path].effect == "ignored")
    values = {key.path: key.default for key in CONFIG_KEYS if key.effect == "becomes"}
    values |= {path: value for path, value in given.items() if path in values}
    sizes = resolve_batch_sizes(
        values["train_batch_size"],
        values["train_micro_batch_size_per_gpu"],
        values["gradient_accumulation_steps"],
        num_ranks,
    )
    optimizer, scheduler = values["optimizer.type"], values["scheduler.type"]
    plan_arguments, offload_arguments = _plan_arguments(values, num_ranks), _offload_arguments(values)
    if offload_arguments:
        passes = (*plan_arguments.get("passes", ("overlap",)), *offload_arguments.pop("passes"))
        plan_arguments |= {"passes": passes, **offload_arguments}
    return DeepSpeedConfig(
        {
            **plan_arguments,
            "num_microbatches": sizes.gradient_accumulation_steps,
            **_training_arguments(values, num_ranks),
        },
        sizes,
        values["zero_optimization.stage"],
        None if optimizer is None else resolve_optimizer(optimizer, values["optimizer.params"]),
        None if scheduler is None else resolve_scheduler(scheduler, values["scheduler.params"]),
        notices,
        values["dataloader_drop_last"],
        values | asdict(sizes),
    )


def _replace_auto(config: Mapping[str, Any], auto: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the configuration with the given values in place of ``"auto"``."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            values[name] = _replace_auto(value, auto, f"{path}.")
        else:
            values[name] = auto.get(path, value) if value == "auto" else value
    return values


def _require_auto_keys(config: Mapping[str, Any], auto: Mapping[str, Any]) -> None:
    """Check that values are given for keys that are ``"auto"`` only.

    Raises:
        PlanError: a key is not in the configuration, or has a value there.
    """
    given = dict(_leaves(config))
    for path, value in auto.items():
        if given.get(path) != "auto":
            state = f"is {shorten(repr(given[path]))}" if path in given else "is not there"
            raise PlanError(
                f"auto has {path}={shorten(repr(value))}, but the key {state} in the configuration; omit it from auto"
                f"{suggest_name(path, [name for name, given_value in given.items() if given_value == 'auto'])}"
            )


def _look_up(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every key that is set.

    Raises:
        PlanError: a key is unknown, refused, or has a value of another type.
    """
    siblings = sorted({path.removeprefix(prefix).split(".")[0] for path in BY_PATH if path.startswith(prefix)})
    for name, value in config.items():
        path = f"{prefix}{name}"
        if path in BY_PATH:
            if value is not None:
                _check_value(BY_PATH[path], value)
                yield path, value
        elif name not in siblings:
            place = f"section {prefix[:-1]}" if prefix else "a configuration"
            raise PlanError(f"{place} has no key {shorten(repr(name))}{_suggest_path(str(name), prefix, siblings)}")
        elif isinstance(value, Mapping):
            yield from _look_up(value, f"{path}.")
        elif value is not None:
            raise PlanError(f"{path}={shorten(repr(value))} is not a section; write it as {{...}}")


def _suggest_path(name: str, prefix: str, siblings: list[str]) -> str:
    """Return the nearest key of the same section, else the section to which a key of this name belongs."""
    for path in BY_PATH:
        section, _, last = path.rpartition(".")
        if last == name and f"{section}." != prefix:
            return f"; {name} belongs to section {section}" if section else f"; {name} belongs to no section"
    return suggest_name(name, siblings)


def _check_value(key: ConfigKey, value: object) -> None:
    """Check the value of a key.

    Raises:
        PlanError: it is of another type, is not finite, or asks for something that is refused.
    """
    if key.effect == "refused":
        if not key.asks_for_nothing(value):
            raise PlanError(f"{key.path}={shorten(repr(value))} is not supported; {key.text}")
    elif value != "auto" and not _has_kind(key, value):
        raise PlanError(f"{key.path}={shorten(repr(value))} is a {type(value).__name__}; give {_KINDS[key.kind]}")
    for path, number in _leaves({key.path: value}):
        items = number if isinstance(number, list | tuple) else [number]
        if key.effect == "becomes" and any(isinstance(item, float) and not math.isfinite(item) for item in items):
            raise PlanError(f"{path}={shorten(repr(number))} is not finite; give a finite number")


_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "int or auto": "a whole number",
    "number": "a number",
    "text": "a text",
    "list": "a list",
    "dict": "a section: {...}",
    "any": "anything",
}


def _has_kind(key: ConfigKey, value: object) -> bool:
    match key.kind:
        case "bool":
            return type(value) is bool
        case "int" | "int or auto":
            return type(value) is int or (isinstance(value, float) and value.is_integer())
        case "number":
            return type(value) in {int, float}
        case "text":
            return isinstance(value, str)
        case "list":
            return isinstance(value, list | tuple)
        case "dict":
            return isinstance(value, Mapping)
        case "any":
            return True


def _require_no_auto(given: Mapping[str, Any], auto: Mapping[str, Any]) -> None:
    """Check that every ``"auto"`` of a key that counts got a value.

    Raises:
        PlanError: one has none.
    """
    missing = [
        path
        for path, value in _leaves(given)
        if value == "auto"
        and (key := BY_PATH.get(path, BY_PATH.get(path.rpartition(".")[0]))) is not None
        and key.effect == "becomes"
        and key.kind != "int or auto"
    ]
    if missing:
        example = "{" + ", ".join(f'"{path}": ...' for path in missing) + "}"
        has = f"auto has {', '.join(auto)}" if auto else "no values were given"
        raise PlanError(
            f'{", ".join(missing)} {"is" if len(missing) == 1 else "are"} "auto", and {has}; give {example}'
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def resolve_batch_sizes(
    train_batch_size: int | None, micro_batch_size: int | None, accumulation_steps: int | None, num_ranks: int
) -> BatchSizes:
    """Return all three batch sizes; any two of them imply the third, as in DeepSpeed.

    Args:
        train_batch_size: samples of one step, over all ranks; None to compute it.
        micro_batch_size: samples of one microbatch on one rank; None to compute it.
        accumulation_steps: microbatches of one step on one rank; None to compute it, or 1 if only one size is given.
        num_ranks: ranks that train.

    Raises:
        PlanError: they contradict each other, or neither of the first two is given.

    Example:
        >>> resolve_batch_sizes(32, 4, None, 2)
        BatchSizes(train_batch_size=32, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=4)
    """
    whole, micro, steps = (
        None if size is None else int(size) for size in (train_batch_size, micro_batch_size, accumulation_steps)
    )
    require_counts(
        optional=True,
        train_batch_size=whole,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )
    if whole is None and micro is None:
        raise PlanError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given; give one of them, and "
            "gradient_accumulation_steps unless it is 1"
        )
    if whole is not None and micro is not None and steps is None:
        steps = whole // (micro * num_ranks)
    steps = 1 if steps is None else steps
    if micro is None:
        micro = whole // (steps * num_ranks) if whole is not None else 0
    whole = micro * steps * num_ranks if whole is None else whole
    if whole != micro * steps * num_ranks or 0 in (micro, steps):
        given = {
            "train_batch_size": train_batch_size,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": accumulation_steps,
        }
        sizes = ", ".join(f"{name}={size}" for name, size in given.items() if size is not None)
        raise PlanError(
            f"{sizes} cannot be on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}: train_batch_size is "
            "train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, which would be "
            f"{micro} * {steps} * {num_ranks} = {micro * steps * num_ranks}; omit one of them, or change a number"
        )
    return BatchSizes(whole, micro, steps)


def _plan_arguments(values: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return the strategy of a stage, and the pass that gathers weights early.

    Raises:
        PlanError: there is no such stage, or a negative number of elements.
    """
    stage = values["zero_optimization.stage"]
    if stage not in (0, 1, 2, 3):
        raise PlanError(f"zero_optimization.stage={stage} is not 0, 1, 2 or 3")
    _require_quantizable(values)
    if stage == 0:
        return {"strategy": f"data({num_ranks})"}
    if stage < 3:
        return {"strategy": f"zero({num_ranks}, level={int(stage)})"}
    path = "zero_optimization.stage3_param_persistence_threshold"
    threshold = int(BY_PATH[path].default if values[path] == "auto" else values[path])
    if threshold < 0:
        raise PlanError(f"{path}={threshold} is negative; give the most elements of weights that stay whole, or 0")
    strategy = Zero(
        num_ranks,
        level=3,
        persistence_threshold=threshold,
        quantized_weights="int8" if values[QUANTIZED_WEIGHTS] else "",
        quantized_gradients="int4" if values[QUANTIZED_GRADIENTS] else "",
    )
    prefetches = values["zero_optimization.stage3_prefetch_bucket_size"] != 0
    return {"strategy": str(strategy), **({"passes": ("overlap", "prefetch")} if prefetches else {})}


def _require_quantizable(values: Mapping[str, Any]) -> None:
    """Check that weights and gradients are quantized at stage 3 only, and gradients not cast besides.

    Raises:
        PlanError: they are.
    """
    for path in (QUANTIZED_WEIGHTS, QUANTIZED_GRADIENTS):
        if values[path] and values["zero_optimization.stage"] != 3:
            raise PlanError(
                f"{path}=true is for stage 3, but stage={values['zero_optimization.stage']}; write stage 3, or omit it"
            )
    communication = values["communication_data_type"]
    casts = communication is not None and _parse_dtype("communication_data_type", communication) != "fp32"
    if casts and values[QUANTIZED_GRADIENTS]:
        raise PlanError(
            f"{QUANTIZED_GRADIENTS}=true sends gradients in 4 bits, and communication_data_type="
            f"{shorten(repr(communication))} casts them; omit one of the two"
        )


_OFFLOADS: dict[str, dict[str, str]] = {
    "zero_optimization.offload_optimizer": {"cpu": "offload:state=host", "nvme": "offload:state=disk"},
    "zero_optimization.offload_param": {"nvme": "offload:params=disk"},
}
"""The pass for each device of a section."""


def _offload_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the passes that offload optimizer state and weights, with the folder that they need; nothing if both stay.

    Raises:
        PlanError: there is no such device, it lacks a folder, or the two have different ones; or weights are whole.
    """
    found = {path: values[f"{path}.device"] for path in _OFFLOADS if values[f"{path}.device"] != "none"}
    for path, device in found.items():
        _require_offload(values, path, device)
    folders = {path: values[f"{path}.nvme_path"] for path, device in found.items() if device == "nvme"}
    if len({*folders.values()}) > 1:
        given = " and ".join(f"{path}.nvme_path={shorten(repr(folder))}" for path, folder in folders.items())
        raise PlanError(f"{given} are two folders; ranks have one offload_folder: give the same one in both")
    passes = tuple(_OFFLOADS[path][device] for path, device in found.items())
    return {
        **({"passes": passes} if passes else {}),
        **({"offload_folder": next(iter(folders.values()))} if folders else {}),
    }


def _require_offload(values: Mapping[str, Any], path: str, device: object) -> None:
    """Check that a section names a device that is supported, with a folder for files."""
    if path == "zero_optimization.offload_param" and device == "cpu":
        raise PlanError(
            f"{path}.device=cpu is not supported: weights stay on the device; on CPUs, where they are in memory, write "
            "nvme with nvme_path to have them on disk, or omit offload_param"
        )
    if device not in _OFFLOADS[path]:
        known = "none or nvme" if path == "zero_optimization.offload_param" else "none, cpu or nvme"
        raise PlanError(f"{path}.device={shorten(repr(device))} is not {known}")
    if device == "nvme" and values[f"{path}.nvme_path"] is None:
        raise PlanError(f"{path}.device=nvme needs {path}.nvme_path; give a folder on a local disk")
    if path == "zero_optimization.offload_param" and values["zero_optimization.stage"] != 3:
        raise PlanError(
            f"{path}.device={device} offloads shards of weights, which are whole at "
            f"stage={values['zero_optimization.stage']}; write stage 3, or omit offload_param"
        )


def _training_arguments(values: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return the options of training: unused parameters, precision, loss scale, clipping.

    Raises:
        PlanError: two precisions are enabled, or a value is out of range.
    """
    ignores_unused = values["zero_optimization.ignore_unused_parameters"]
    arguments: dict[str, Any] = {"unused_parameters": "zero" if ignores_unused else "error"}
    arguments |= _precision_arguments(values, num_ranks)
    clip_norm = values["gradient_clipping"]
    if clip_norm < 0:
        raise PlanError(f"gradient_clipping={clip_norm} is negative; give the largest norm of the gradient, or 0")
    return arguments | ({"clip_norm": float(clip_norm)} if clip_norm else {})


def _precision_arguments(values: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return the precision and the loss scale.

    Raises:
        PlanError: two precisions are enabled, or a value is out of range.
    """
    enabled = [section for section in ("fp16", "bf16", "torch_autocast") if values[f"{section}.enabled"]]
    if len(enabled) > 1:
        raise PlanError(f"{' and '.join(enabled)} are enabled; enable one of them")
    section = enabled[0] if enabled else "fp32"
    communication = values["communication_data_type"]
    reduce = "fp32" if section == "torch_autocast" else section
    if communication is not None:
        reduce = _parse_dtype("communication_data_type", communication)
    reduce = reduce if num_ranks > 1 and not values[QUANTIZED_GRADIENTS] else "fp32"
    if section == "torch_autocast":
        compute = _parse_dtype("torch_autocast.dtype", values["torch_autocast.dtype"])
        loss_scale = {"loss_scale": "dynamic"} if compute == "fp16" else {}
        return {"precision": str(Precision(compute, autocast=True, reduce=reduce)), **loss_scale}
    if section == "fp16":
        return {"precision": _cast_precision("fp16", reduce), **_loss_scale_arguments(values)}
    if section == "bf16":
        skips = {"nonfinite": "skip"} if values["bf16.check_grad_overflow"] else {}
        return {"precision": _cast_precision("bf16", reduce), **skips}
    return {} if reduce == "fp32" else {"precision": str(Precision("fp32", reduce=reduce)), "loss_scale": 1.0}


def _cast_precision(compute: str, reduce: str) -> str:
    """Return the precision of a whole model in a dtype, norms and outputs included, as DeepSpeed converts it."""
    return str(Precision(compute, norms="compute", output="compute", reduce=reduce))


def _parse_dtype(path: str, text: str) -> str:
    """Return the name of a dtype in plans.

    Raises:
        PlanError: there is no such dtype.
    """
    name = DTYPE_NAMES.get(text.lower().removeprefix("torch."))
    if name is None:
        raise PlanError(f"{path}={text!r} is not one of fp32, fp16, bf16")
    return name


def _loss_scale_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scale of fp16; a static one skips steps with gradients that are not finite, as DeepSpeed does.

    Raises:
        PlanError: a number is out of range.
    """
    scale = values["fp16.loss_scale"]
    if scale < 0:
        raise PlanError(f"fp16.loss_scale={scale} is negative; give a power of two, or 0 for a dynamic scale")
    if scale:
        return {"loss_scale": float(scale), "nonfinite": "skip"}
    try:
        dynamic = DynamicLossScale(
            init_scale=2.0 ** int(values["fp16.initial_scale_power"]),
            growth_interval=int(values["fp16.loss_scale_window"]),
            hysteresis=int(values["fp16.hysteresis"]),
            consecutive_hysteresis=values["fp16.consecutive_hysteresis"],
            min_scale=float(values["fp16.min_loss_scale"]),
        )
    except (PlanError, OverflowError) as error:
        raise PlanError(f"the loss scale of fp16 is not possible: {error}") from error
    return {"loss_scale": dynamic}
