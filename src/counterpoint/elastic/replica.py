"""Model replica of a worker of a job without servers: weights, buffers, optimizer state and progress.

Its state is a set of named tensors, so that it can be sent to workers that join, and saved.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.checkpoint import Checkpoint, fingerprint, latest, save
from counterpoint.checkpoint.folders import step_name
from counterpoint.checkpoint.reader import state_error
from counterpoint.checkpoint.state_schema import COUNT, TEXT, ValueSchema, is_number, mapping, mapping_of
from counterpoint.elastic.optimizer_rules import OptimizerFactory, make_optimizer
from counterpoint.elastic.parameter_keys import check_no_running_stats
from counterpoint.elastic.worker_group import JobStoppedError, WorkerGroup
from counterpoint.errors import CheckpointError, PeerError, PlanError
from counterpoint.fabric.fabric import Json
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.fabric.shm.magnitudes import find_magnitudes
from counterpoint.optim.validation import shorten

FlatGradients: TypeAlias = dict[torch.dtype, Tensor]
"""Flat gradients of all parameters, by the dtype in which they are summed."""

ACCUMULATION_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
NUM_CHECKPOINTS_KEPT = 2
"""Checkpoints that stay in a folder."""


@dataclass(slots=True)
class ReplicaProgress:
    """Progress of a replica.

    Attributes:
        steps: taken so far.
        failures: how often the next step failed.
        interruptions: how often the next step was interrupted because a worker had left.
    """

    steps: int = 0
    failures: int = 0
    interruptions: int = 0

    def count_failure(self) -> None:
        """Count a failure of the next step."""
        self.failures += 1

    def count_interruption(self) -> None:
        """Count an interruption of the next step."""
        self.interruptions += 1


REPLICA_STATE = mapping(
    numbers=mapping_of(ValueSchema("a number or null", lambda value: value is None or is_number(value))),
    progress=ValueSchema(
        "an object of steps, failures and interruptions",
        lambda value: isinstance(value, dict) and value.keys() == {"steps", "failures", "interruptions"},
        COUNT,
    ),
    optimizer=TEXT,
    data=TEXT,
)


def check_replica_state(checkpoint: Checkpoint) -> None:
    """Check that the state of a checkpoint is that of a replica.

    Raises:
        CheckpointError: a value is missing or wrong.
    """
    flaw = REPLICA_STATE.find_flaw(checkpoint.state, "state")
    if flaw:
        raise state_error(checkpoint, flaw)


class ModelReplica:
    """A worker's replica of the training state.

    Args:
        model: any module.
        optimizer: of torch, on its parameters, or a factory.
        buffers: what running statistics mean: ``error``, or ``own`` for those of each worker's own slices; a replica
            that is sent to others includes them.
        folder: of checkpoints; the newest of them is loaded.

    Attributes:
        data: description of the data that it was trained on; empty before training.

    Raises:
        PlanError: the module has running statistics, or the optimizer is not one.
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
        """Number of gradient elements, by the dtype in which they are summed."""
        return {kind: sum(parameter.numel() for parameter in ones) for kind, ones in self._parameters_by_dtype.items()}

    @property
    def signature(self) -> str:
        """Hash of what must be equal for all replicas of a job."""
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        facts = f"{sorted(fingerprint(self._model_tensors()).items())} {type(self.optimizer).__name__} {groups}"
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    # Gradients, and the step that is made of them

    def take_gradients(self) -> tuple[FlatGradients, Tensor]:
        """Return the gradients, which are removed from the parameters, and which parameters had one.

        Raises:
            PlanError: a gradient is sparse.
        """
        gradients = {dtype: torch.zeros(length, dtype=dtype) for dtype, length in self.numel_by_dtype.items()}
        for parameter, view in self._parameter_views(gradients):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise PlanError(
                    f"a parameter of {tuple(parameter.shape)} has a sparse gradient, but workers without servers "
                    "sum dense ones; use sparse=False, or hold it as a table on servers"
                )
            view.copy_(parameter.grad)
        has_grad = torch.tensor(
            [each_parameter.grad is not None for each_parameter in self.parameters], dtype=torch.float64
        )
        self.optimizer.zero_grad()
        return gradients, has_grad

    def find_nonfinite_grad(self) -> str:
        """Return the first parameter whose gradient is not finite; empty if all are, or are missing."""
        grads = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        pairs = zip(grads, find_magnitudes([*grads.values()]), strict=True)
        return next((name for name, magnitude in pairs if not math.isfinite(magnitude)), "")

    def _parameter_views(self, gradients: FlatGradients) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for dtype, parameters in self._parameters_by_dtype.items():
            views = torch.split(gradients[dtype], [one.numel() for one in parameters])
            yield from ((one, view.view(one.shape)) for one, view in zip(parameters, views, strict=True))

    def apply_step(self, gradients: FlatGradients, grad_counts: Tensor, lr_factor: float) -> None:
        """Take one optimizer step.

        Args:
            gradients: summed over the batch.
            grad_counts: how many slices had a gradient of each parameter; a parameter without any is not updated.
            lr_factor: factor of the learning rate.
        """
        is_trained = dict(zip(self.parameters, grad_counts.tolist(), strict=True))
        for parameter, view in self._parameter_views(gradients):
            parameter.grad = view.to(parameter) if is_trained[parameter] else None
        for group, rate in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            group["lr"] = rate * lr_factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress = ReplicaProgress(self.progress.steps + 1)

    # State, for other workers and checkpoints

    def _model_tensors(self) -> dict[str, Tensor]:
        parameters = {f"parameter {name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        return parameters | {f"buffer {name}": tensor for name, tensor in self.model.named_buffers()}

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the replica by name, without copies, and the rest as JSON.

        Raises:
            PlanError: the optimizer state has values that are neither tensors nor numbers.
        """
        tensors, scalars = self._model_tensors(), dict[str, float | None]()
        for index, parameter in enumerate(self.parameters):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"state {index} {name}"] = value
                elif value is None or isinstance(value, int | float):
                    scalars[f"state {index} {name}"] = value
                else:
                    raise PlanError(
                        f"{type(self.optimizer).__name__} keeps {name} of {type(value).__name__}, which cannot be sent "
                        "to a worker that joins; use an optimizer whose state is tensors and numbers"
                    )
        about = {"optimizer": type(self.optimizer).__name__, "data": self.data}
        return tensors, {"numbers": scalars, "progress": asdict(self.progress), **about}

    def load_state(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Load a state; the optimizer takes ownership of its tensors.

        Args:
            tensors: by name.
            rest: everything else.
        """
        with torch.no_grad():
            for name, tensor in self._model_tensors().items():
                tensor.copy_(tensors[name])
        self.optimizer.state.clear()
        for key, value in (*tensors.items(), *rest["numbers"].items()):
            kind, _, path = key.partition(" ")
            if kind == "state":
                index, _, name = path.partition(" ")
                self.optimizer.state[self.parameters[int(index)]][name] = value
        self.progress, self.data = ReplicaProgress(**rest["progress"]), str(rest["data"])

    def save(self) -> None:
        """Save a checkpoint of the current step, if there is a folder."""
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
        checkpoint = latest(folder, check_state=check_replica_state)
        if checkpoint is not None:
            checkpoint.check_model(fingerprint(self._model_tensors()))
            kind, state = type(self.optimizer).__name__, dict(checkpoint.state)
            if state.get("optimizer") != kind:
                raise CheckpointError(
                    f"{checkpoint.folder} is of the optimizer {state.get('optimizer')}, and this is {kind}; give the "
                    "same one, or another folder"
                )
            numbers: Any = state["numbers"]
            wrong = next((name for name in (*checkpoint.names(), *numbers) if not self._has_place(name)), None)
            if wrong is not None:
                raise CheckpointError(
                    f"{checkpoint.folder} has {shorten(wrong)!r}, which is neither of the model nor of one of its "
                    f"{len(self.parameters)} parameters' optimizer state; give another folder"
                )
            self.load_state({name: checkpoint.read(name) for name in checkpoint.names()}, state)

    def _has_place(self, name: str) -> bool:
        """Return whether a name is that of a tensor of the model, or of a parameter's optimizer state."""
        match = re.fullmatch(r"state ([0-9]{1,9}) .+", name)
        return name in self._model_tensors() if match is None else int(match[1]) < len(self.parameters)

    def set_data(self, data: str) -> None:
        """Set the data that the replica is trained on.

        Raises:
            CheckpointError: it was trained on other data.
        """
        if self.data not in {"", data}:
            raise CheckpointError(
                f"the checkpoint in {self.folder} was trained on {self.data}, but this job uses {data}; give the "
                "same data, batch size and seed, or another folder"
            )
        self.data = data

    # Access to the model for evaluation, as with servers

    @contextmanager
    def latest_weights(self) -> Iterator[nn.Module]:
        """Return a context in which the model can be evaluated."""
        with torch.no_grad():
            yield self.model

    def export_weights(self) -> nn.Module:
        """Return the model, which has the newest weights."""
        return self.model

    def close(self) -> None:
        """Do nothing: the model has no hooks."""
        return


def broadcast_state(replica: ModelReplica, workers: WorkerGroup, recorded: int) -> None:
    """Broadcast the state of the replica with the most steps, the oldest member's among equals.

    A replica is modified only after all of the state has arrived.

    Args:
        replica: of this member.
        workers: the members.
        recorded: steps recorded by the coordinator, as the oldest member knows; 0 on others.

    Raises:
        JobStoppedError: no member has taken that many.
        PlanError: this worker trains another model than the source.
        PeerError: another worker does, or one has left.
    """
    fabric, ranks = workers.fabric, workers.ranks
    own_status: Json = {"steps": replica.progress.steps, "recorded": recorded, "look": replica.signature}
    statuses: list[Any] = fabric.gather_values("progress", own_status, ranks)
    root = max(ranks, key=lambda rank: (statuses[rank]["steps"], -rank))
    if statuses[root]["steps"] < statuses[0]["recorded"]:
        raise JobStoppedError(
            f"the weights are lost: {statuses[0]['recorded']} steps are recorded, but all workers that had taken them "
            f"have left, and the most recent replica has {statuses[root]['steps']}; restart the job, from the last "
            "checkpoint if there is one"
        )
    mismatched = [workers.members[rank].name for rank in ranks if statuses[rank]["look"] != statuses[root]["look"]]
    if workers.members[fabric.rank].name in mismatched:
        raise PlanError(
            f"the model or the optimizer differs from that of {workers.members[root].name}; run all workers from "
            "one script"
        )
    if mismatched:
        raise PeerError(f"{', '.join(mismatched)} trains another model and has to leave")
    is_root = fabric.rank == root
    tensors, rest = replica.export_state() if is_root else ({}, {})
    specs: Json = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    layout: Any = fabric.gather_values("layout", [specs, rest] if is_root else None, ranks)[root]
    received: dict[str, Tensor] = {}
    for name, dtype, shape in layout[0]:
        received[name] = tensors[name] if is_root else torch.empty(shape, dtype=getattr(torch, dtype))
        workers.wait(fabric.broadcast(name, received[name].reshape(-1), ranks, root))
    if not is_root:
        replica.load_state(received, layout[1])
