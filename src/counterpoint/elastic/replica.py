"""A worker's whole copy of what is trained, where no server keeps it: weights, buffers, optimizer, steps taken.

A copy can be named tensor by tensor, so that it can be told to whoever comes, and saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.checkpoint import fingerprint, latest, save
from counterpoint.checkpoint.folders import step_name
from counterpoint.elastic.optimizer_rules import OptimizerFactory, make_optimizer
from counterpoint.elastic.parameter_keys import check_no_running_stats
from counterpoint.elastic.worker_group import JobStoppedError, WorkerGroup
from counterpoint.errors import CheckpointError, PeerError, PlanError
from counterpoint.fabric.fabric import Json
from counterpoint.fabric.fingerprint import dtype_name

FlatGradients: TypeAlias = dict[torch.dtype, Tensor]
"""Gradients side by side, by the dtype in which they are added up."""

ACCUMULATION_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
NUM_CHECKPOINTS_KEPT = 2
"""Checkpoints that stay in a folder."""


@dataclass(slots=True)
class ReplicaProgress:
    """How far a copy has come.

    Attributes:
        steps: that it has taken.
        failures: how often the next one could not be computed.
        broken: how often the next one was broken off because somebody had gone.
    """

    steps: int = 0
    failures: int = 0
    interruptions: int = 0


class ModelReplica:
    """A worker's copy.

    Args:
        model: any module.
        optimizer: of torch, on its parameters, or a factory.
        buffers: what running statistics mean: ``error``, or ``own`` for those of each worker's own portions, of which
            the copy that is told to others has one.
        folder: of checkpoints; the copy begins as the newest of them.

    Attributes:
        data: that it has been trained on, in words; empty before that.

    Raises:
        PlanError: the module has running statistics, or that is no optimizer.
        CheckpointError: all checkpoints are damaged, or of another model or optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer | OptimizerFactory,
        *,
        buffers: Literal["error", "own"] = "error",
        folder: Path | None = None,
    ) -> None:
        if buffers == "error":
            check_no_running_stats(model)
        self.model, self.optimizer, self.folder = model, make_optimizer(optimizer, model), folder
        self.progress, self.data = ReplicaProgress(), ""
        self.parameters: list[nn.Parameter] = [one for group in self.optimizer.param_groups for one in group["params"]]
        self._learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._parameters_by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            self._parameters_by_dtype.setdefault(ACCUMULATION_DTYPES.get(parameter.dtype, parameter.dtype), []).append(
                parameter
            )
        if folder is not None:
            self._load(folder)

    @property
    def numel_by_dtype(self) -> dict[torch.dtype, int]:
        """The dtypes in which gradients are added up, and how many numbers each has."""
        return {kind: sum(one.numel() for one in ones) for kind, ones in self._parameters_by_dtype.items()}

    @property
    def signature(self) -> str:
        """What has to be the same for all copies of a job, in few letters."""
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        facts = f"{sorted(fingerprint(self._model_tensors()).items())} {type(self.optimizer).__name__} {groups}"
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    # Gradients, and the step that is made of them

    def take_gradients(self) -> tuple[FlatGradients, Tensor]:
        """Return the gradients, which the parameters have no longer, and which parameters had one.

        Raises:
            PlanError: one is sparse.
        """
        flats = {kind: torch.zeros(length, dtype=kind) for kind, length in self.numel_by_dtype.items()}
        for parameter, place in self._parameter_views(flats):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise PlanError(
                    f"a parameter of {tuple(parameter.shape)} has a sparse gradient, and workers without servers "
                    "add up dense ones; take sparse=False, or keep it as a table on servers"
                )
            place.copy_(parameter.grad)
        had = torch.tensor([one.grad is not None for one in self.parameters], dtype=torch.float64)
        self.optimizer.zero_grad()
        return flats, had

    def _parameter_views(self, flats: FlatGradients) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for kind, parameters in self._parameters_by_dtype.items():
            pieces = torch.split(flats[kind], [one.numel() for one in parameters])
            yield from ((one, piece.view(one.shape)) for one, piece in zip(parameters, pieces, strict=True))

    def apply_step(self, gradients: FlatGradients, grad_counts: Tensor, lr_factor: float) -> None:
        """One step more has been taken.

        Args:
            sums: of the gradients.
            had: how many parts of the batch had a gradient of each parameter; without any it stays as it is.
            factor: of the learning rate.
        """
        is_trained = dict(zip(self.parameters, grad_counts.tolist(), strict=True))
        for parameter, place in self._parameter_views(gradients):
            parameter.grad = place.to(parameter) if is_trained[parameter] else None
        for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            group["lr"] = rate * lr_factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress = ReplicaProgress(self.progress.steps + 1)

    # The copy as it is told and saved

    def _model_tensors(self) -> dict[str, Tensor]:
        parameters = {f"parameter {name}": one.detach() for name, one in self.model.named_parameters()}
        return parameters | {f"buffer {name}": one for name, one in self.model.named_buffers()}

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the copy by name, its own memory, and everything else, as JSON can hold it.

        Raises:
            PlanError: the optimizer knows something that is neither a tensor nor a number.
        """
        tensors, numbers = self._model_tensors(), dict[str, float | None]()
        for index, parameter in enumerate(self.parameters):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"state {index} {name}"] = value
                elif value is None or isinstance(value, int | float):
                    numbers[f"state {index} {name}"] = value
                else:
                    raise PlanError(
                        f"{type(self.optimizer).__name__} keeps {name} of {type(value).__name__}, which cannot be told "
                        "to a worker that comes; take an optimizer that keeps tensors and numbers"
                    )
        about = {"optimizer": type(self.optimizer).__name__, "data": self.data}
        return tensors, {"numbers": numbers, "progress": asdict(self.progress), **about}

    def load_state(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """The copy is as it was written, and owns the optimizer's tensors.

        Args:
            tensors: by name.
            rest: everything else.
        """
        with torch.no_grad():
            for name, tensor in self._model_tensors().items():
                tensor.copy_(tensors[name])
        self.optimizer.state.clear()
        for key, value in (*tensors.items(), *rest["numbers"].items()):
            kind, _, place = key.partition(" ")
            if kind == "state":
                index, _, name = place.partition(" ")
                self.optimizer.state[self.parameters[int(index)]][name] = value
        self.progress, self.data = ReplicaProgress(**rest["progress"]), str(rest["data"])

    def save(self) -> None:
        """The copy is the checkpoint of its step in its folder, if it has a folder."""
        if self.folder is not None and not (self.folder / step_name(self.progress.steps)).exists():
            tensors, rest = self.export_state()
            save(
                self.folder,
                self.progress.steps,
                tensors,
                rest,
                model=fingerprint(self._model_tensors()),
                keep=NUM_CHECKPOINTS_KEPT,
            )

    def _load(self, folder: Path) -> None:
        found = latest(folder)
        if found is not None:
            found.check_model(fingerprint(self._model_tensors()))
            kind, state = type(self.optimizer).__name__, dict(found.state)
            if state.get("optimizer") != kind:
                raise CheckpointError(
                    f"{found.folder} is of the optimizer {state.get('optimizer')}, and this is {kind}; give the same "
                    "one, or another folder"
                )
            self.load_state({name: found.read(name) for name in found.names()}, state)

    def set_data(self, data: str) -> None:
        """The copy is trained on this data, and has not been on any other.

        Raises:
            CheckpointError: it has.
        """
        if self.data not in {"", data}:
            raise CheckpointError(
                f"the checkpoint in {self.folder} was trained on {self.data}, and this job is about {data}, so its "
                "steps are others; give the same data, batch size and seed, or another folder"
            )
        self.data = data

    # What a worker's model is for whoever measures it, as where servers keep it

    @contextmanager
    def latest_weights(self) -> Iterator[nn.Module]:
        """The model, to be measured."""
        with torch.no_grad():
            yield self.model

    def export_weights(self) -> nn.Module:
        """Return the model, which has the newest weights."""
        return self.model

    def close(self) -> None:
        """Nothing is left: the model has no hooks."""
        return


def broadcast_state(replica: ModelReplica, workers: WorkerGroup, recorded: int) -> None:
    """All members have the copy of who has taken most steps; of the oldest, where there are several.

    A copy changes only when all of the other has come.

    Args:
        replica: this member's.
        circle: the members.
        recorded: steps that the coordinator knows of, as the oldest member has been told; others give 0.

    Raises:
        JobStoppedError: nobody has taken so many.
        PlanError: this worker trains another model than who is to be followed.
        PeerError: another one does, or somebody has gone.
    """
    fabric, group = workers.fabric, workers.ranks
    mine: Json = {"steps": replica.progress.steps, "recorded": recorded, "look": replica.signature}
    told: list[Any] = fabric.gather_values("progress", mine, group)
    root = max(group, key=lambda rank: (told[rank]["steps"], -rank))
    if told[root]["steps"] < told[0]["recorded"]:
        raise JobStoppedError(
            f"the weights are lost: {told[0]['recorded']} steps are recorded, and all workers that had the weights "
            f"have gone; the most that one has now is {told[root]['steps']}: start the job anew, from the last "
            "checkpoint if its workers have saved one"
        )
    unlike = [workers.members[rank].name for rank in group if told[rank]["look"] != told[root]["look"]]
    if workers.members[fabric.rank].name in unlike:
        raise PlanError(
            f"the model or the optimizer is another one than {workers.members[root].name} has; build all workers from "
            "one script"
        )
    if unlike:
        raise PeerError(f"{', '.join(unlike)} trains another model; it has to leave")
    is_root = fabric.rank == root
    tensors, rest = replica.export_state() if is_root else ({}, {})
    looks: Json = [[name, dtype_name(one.dtype), list(one.shape)] for name, one in tensors.items()]
    layout: Any = fabric.gather_values("layout", [looks, rest] if is_root else None, group)[root]
    found: dict[str, Tensor] = {}
    for name, dtype, shape in layout[0]:
        found[name] = tensors[name] if is_root else torch.empty(shape, dtype=getattr(torch, dtype))
        workers.wait(fabric.broadcast(name, found[name].reshape(-1), group, root))
    if not is_root:
        replica.load_state(found, layout[1])
