"""A training in the ranks of a barrier stage: what they are told, what each does, and what the first one gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from counterpoint.spark.module_codec import SerializedModule, deserialize_module
from counterpoint.spark.shard import SampleShard
from counterpoint.training.trainer import Trainer


def fit_as_rank(
    shard: SampleShard, tree: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]
) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Train on the samples of all ranks, as one of them; all have called it.

    Args:
        shard: the samples of this rank's partition.
        tree: of the model, the loss and the optimizer's factory, as ``serialize_module`` writes them.
        tensors: of the same.
        how: ``trainer``, the options of a SimulatedWorker, and ``fit``, those of its ``fit``.

    Returns:
        the plan and the losses; of rank 0 the trained values, by name.
    """
    model, loss, optimizer = deserialize_module(SerializedModule(tree, tensors))
    samples = shard.all_samples()
    trainer = Trainer(model, loss=loss, optimizer=optimizer, progress="off", **options["trainer"])
    history = trainer.fit(samples, **options["fit"])
    plan, rank = str(trainer.plan), trainer.rank
    trainer.close()
    return {"plan": plan, "losses": history.losses, "values": named_tensors(model) if rank == 0 else {}}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by the first of its names."""
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in found}


def load_named_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """The model has these values, in its own memory."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.detach().copy_(values[name])


def with_learning_rate(optimizer: Callable[..., Any], rate: float | None) -> Callable[..., Any]:
    """Return the factory with another learning rate; itself for None."""
    from functools import partial

    return optimizer if rate is None else partial(optimizer, lr=rate)
