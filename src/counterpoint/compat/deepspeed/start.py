"""``initialize``: a model, an optimizer and a schedule as DeepSpeed's scripts get them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from counterpoint.compat.deepspeed.config import DeepSpeedConfig, read_config
from counterpoint.compat.deepspeed.grad_update import GradientRule, make_update, require_new_optimizer
from counterpoint.compat.deepspeed.model_checks import (
    require_dense_grads,
    require_known_params,
    require_master_weights,
    require_real_grads,
    require_separate_memory,
)
from counterpoint.compat.deepspeed.rank_agreement import require_same_setup
from counterpoint.compat.deepspeed.wrapped_model import DeepSpeedModel, StepOptions
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.launchers.environment import detect
from counterpoint.model.precision import parse_precision
from counterpoint.partitioning.module_casts import torch_dtype
from counterpoint.runtime.loss.loss_scale import LossScaler, parse_loss_scale
from counterpoint.strategies.offload import OFFLOAD_PASS
from counterpoint.training.distributed_world import open_world

TIMEOUT_S = 600.0
OptimizerArgument: TypeAlias = Optimizer | Callable[[Any], Optimizer] | None
SchedulerArgument: TypeAlias = LRScheduler | Callable[[Optimizer], LRScheduler] | None


def initialize(  # noqa: PLR0913 - DeepSpeed's arguments
    args: Any = None,  # noqa: ANN401 - a namespace of argparse
    model: nn.Module | None = None,
    optimizer: OptimizerArgument = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerArgument = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    config_params: Mapping[str, Any] | str | PathLike[str] | None = None,
    auto: Mapping[str, Any] | None = None,
    **others: object,
) -> tuple[DeepSpeedModel, Optimizer, DataLoader[Any] | None, LRScheduler | None]:
    """Return a model with the methods of DeepSpeed's engine, its optimizer, a loader and a schedule.

    Every rank passes its own microbatches; gradients are means over all of them. All ranks begin with the weights of
    rank 0. Stages 0, 1 and 2 are as in DeepSpeed; stage 3 works on one rank only, see ``cp.parallelize`` for more.

    Args:
        args: a namespace whose ``deepspeed_config`` is the path of the configuration, if ``config`` is not given.
        model: stays whole on each rank.
        optimizer: a torch optimizer on the model's parameters, or a function that makes one of ``model_parameters``;
            None for that of the configuration.
        model_parameters: what the optimizer is made of; None for all parameters; those that are frozen stay so.
        training_data: None, or samples of which each rank loads its own part, in microbatches.
        lr_scheduler: a scheduler of the optimizer, or a function that makes one; None for that of the configuration.
        collate_fn: of the loader.
        config: the configuration, or the path of its JSON file.
        config_params: DeepSpeed's former name of ``config``.
        auto: values for keys that are ``"auto"``, as for ``read_config``.
        **others: DeepSpeed's further arguments, of which each may be None only.

    Returns:
        ``(model, optimizer, loader, lr_scheduler)``; None for a loader or a schedule that there is not.

    Raises:
        PlanError: an argument or a key is not supported, or model, configuration or optimizer are missing.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> engine, optimizer, _, _ = initialize(
        ...     model=model, config={"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        ... )
        >>> loss = nn.functional.mse_loss(engine(torch.ones(4, 2)), torch.zeros(4, 1))
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps
        1
    """
    if model is None:
        raise PlanError("initialize() got no model; pass model=")
    _require_no_others(others)
    config = config if config is not None else config_params
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if config is None:
        raise PlanError("initialize() got no configuration; pass config=, or args with deepspeed_config")
    fabric = open_fabric()
    parsed = read_config(config, num_ranks=fabric.num_ranks, auto=auto)
    require_device(fabric, model)
    made = _make_optimizer(parsed, optimizer, model.parameters() if model_parameters is None else model_parameters)
    wrapped = _wrap(fabric, model, parsed, made, lr_scheduler)
    wrapped.lr_scheduler = _make_scheduler(parsed, made, lr_scheduler)
    loader = None if training_data is None else _make_loader(fabric, training_data, parsed, collate_fn)
    return wrapped, made, loader, wrapped.lr_scheduler


def open_fabric() -> Fabric:
    """Return the connection to the ranks that a launcher started; a single rank without a launcher."""
    environment = detect()
    num_ranks = 1 if environment is None else environment.world_size
    return open_world(environment, num_ranks, TIMEOUT_S).fabrics[0]


def require_state_in_memory(config: DeepSpeedConfig, model: nn.Module) -> None:
    """Check that the configuration keeps optimizer state where the model is, as the script's own optimizer does.

    Raises:
        PlanError: it offloads the state, which needs a program.
    """
    passes, on_host = (
        config.arguments.get("passes", ()),
        all(param.device.type == "cpu" for param in model.parameters()),
    )
    moved = [one for one in passes if one.startswith(OFFLOAD_PASS) and not (on_host and one.endswith("host"))]
    if moved:
        section = "offload_param" if ":params=" in moved[0] else "offload_optimizer"
        raise PlanError(
            f"zero_optimization.{section} is the pass {moved[0]}, which programs have, but initialize() "
            "updates by the script's optimizer, whose state is with the model; write step = cp.parallelize(model, "
            f"optimizer, loss, **read_config(...).arguments), or omit {section} here"
        )


def require_device(fabric: Fabric, model: nn.Module) -> None:
    """Check that ranks can exchange the model's tensors.

    Raises:
        PlanError: they are on a device, and ranks communicate in host memory.
    """
    device = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    if device.type != "cpu" and fabric.num_ranks > 1 and not fabric.takes_device_tensors:
        raise PlanError(
            f"the model is on {device}, but the ranks exchange tensors in host memory; start them with "
            "`counterpoint run --transport process_group`"
        )


def _require_no_others(others: Mapping[str, object]) -> None:
    """Check DeepSpeed's further arguments.

    Raises:
        PlanError: one is given, or is unknown.
    """
    ignored = {"distributed_port", "dist_init_required"}
    for name, value in others.items():
        if name not in {*ignored, "mpu", "mesh_param", "mesh_device"}:
            raise PlanError(f"initialize() has no argument {name!r}")
        if name not in ignored and value is not None:
            raise PlanError(
                f"initialize({name}=...) is not supported; write the plan: tensor(n) * zero(m), and omit it"
            )


def _make_optimizer(config: DeepSpeedConfig, optimizer: OptimizerArgument, params: Iterable[Any]) -> Optimizer:
    """Return the optimizer that was given, or that of the configuration.

    Raises:
        PlanError: there is none.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if optimizer is not None:
        return optimizer(params)
    if config.optimizer is None:
        raise PlanError("initialize() got no optimizer, and the configuration has none; pass optimizer=, or add one")
    return config.make_optimizer(params)


def _make_scheduler(config: DeepSpeedConfig, optimizer: Optimizer, scheduler: SchedulerArgument) -> LRScheduler | None:
    """Return the schedule that was given, or that of the configuration; None if there is none.

    Raises:
        PlanError: ``step()`` cannot step it.
    """
    if scheduler is None:
        return None if config.scheduler is None else config.make_scheduler(optimizer)
    made: object = scheduler(optimizer) if callable(scheduler) else scheduler
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise PlanError(
            f"lr_scheduler is a {type(made).__name__}, and step() steps an LRScheduler without a metric; omit it, and "
            "step it in the script"
        )
    return made


def _wrap(
    fabric: Fabric, model: nn.Module, config: DeepSpeedConfig, optimizer: Optimizer, scheduler: SchedulerArgument
) -> DeepSpeedModel:
    """Return the model with its update, after all ranks have got rank 0's weights."""
    arguments = config.arguments
    precision = parse_precision(arguments.get("precision"))
    require_state_in_memory(config, model)
    require_new_optimizer(optimizer)
    trained: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    names = require_known_params(model, trained)
    require_master_weights(precision, trained, names)
    require_dense_grads(model)
    require_real_grads(trained, names)
    if config.stage > 0 and fabric.num_ranks > 1:
        require_separate_memory(model, trained)
    broadcast_model(fabric, model)
    require_same_setup(fabric, config, optimizer, names, scheduler)
    reduce_dtype = torch_dtype(precision.reduce) if precision is not None and precision.casts_grads else None
    rule = GradientRule(config.stage, reduce_dtype, arguments["unused_parameters"])
    options = StepOptions(
        config.batch_sizes, arguments.get("clip_norm"), precision, arguments.get("nonfinite") == "skip"
    )
    update = make_update(fabric, optimizer, rule, model)
    scaler = LossScaler(parse_loss_scale(arguments.get("loss_scale")))
    return DeepSpeedModel(model, update, None, options, scaler)


@torch.no_grad()
def broadcast_model(fabric: Fabric, model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks.

    Raises:
        PlanError: ranks have other models, or a buffer whose elements share memory.
    """
    ranks = tuple(range(fabric.num_ranks))
    if len(ranks) == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes: Any = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors]
    for name, tensor in tensors:
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise PlanError(f"{name} was made by expand(), and its elements share memory; register it after .clone()")
    given = fabric.gather_values("the parameters of the model", shapes, ranks)
    for rank, other in enumerate(given):
        if other != given[0]:
            raise PlanError(f"rank {rank} has another model than rank 0; build the same one on all ranks")
    works = []
    for name, tensor in tensors:
        flat = tensor.detach().contiguous()
        works.append((fabric.broadcast(name, flat, ranks, 0), tensor, flat))
    for work, tensor, flat in works:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


def _make_loader(
    fabric: Fabric,
    samples: Dataset[Any],
    config: DeepSpeedConfig,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any]:
    """Return a loader of this rank's microbatches, shuffled with seed 0.

    Raises:
        PlanError: samples have no indices.
    """
    if isinstance(samples, IterableDataset):
        raise PlanError(
            "training_data is an IterableDataset, whose samples cannot be divided among ranks; omit it, and make a "
            "DataLoader of this rank's samples in the script"
        )
    return DataLoader(
        samples,
        batch_size=config.batch_sizes.train_micro_batch_size_per_gpu,
        sampler=DistributedSampler(samples, fabric.num_ranks, fabric.rank),
        collate_fn=collate_fn,
        drop_last=config.drops_last_batch,
    )


def init_distributed(*_args: object, **_options: object) -> None:
    """Do nothing: ``initialize`` connects the ranks."""
    return


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add DeepSpeed's arguments ``--deepspeed`` and ``--deepspeed_config`` to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the configuration")
    return parser
