"""Training in the ranks of a barrier stage: the function that each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from counterpoint.spark.module_codec import decode_module
from counterpoint.spark.shard import SampleShard
from counterpoint.training.trainer import Trainer


def fit_as_rank(shard: SampleShard, what: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train on the samples of all ranks; every rank of the stage calls this.

    Args:
        shard: the samples of this rank's partition.
        what: the model, the loss and the optimizer factory, from ``encode_module``.
        options: ``trainer``, the options of a Trainer, and ``fit``, those of its ``fit``.

    Returns:
        the plan and the losses; on rank 0 also the trained values by name.
    """
    model, loss, optimizer = decode_module(what, trust=True)  # of the driver, over Spark's channel
    samples = shard.all_samples()
    trainer = Trainer(model, loss=loss, optimizer=optimizer, progress="off", **options["trainer"])
    history = trainer.fit(samples, **options["fit"])
    plan, rank = str(trainer.plan), trainer.rank
    trainer.close()
    return {"plan": plan, "losses": history.losses, "values": named_tensors(model) if rank == 0 else {}}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by the first of its names."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors}


def load_named_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values into the model's parameters and buffers."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.detach().copy_(values[name])


def with_learning_rate(optimizer: Callable[..., Any], rate: float | None) -> Callable[..., Any]:
    """Return the factory with another learning rate; the factory itself for None."""
    from functools import partial

    return optimizer if rate is None else partial(optimizer, lr=rate)
