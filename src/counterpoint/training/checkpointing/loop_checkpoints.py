"""Checkpoints of a custom training loop: the same files as a trainer's, without a position in its data.

A checkpoint may be loaded before the first step, which builds the ranks. The model, the options of the optimizer's
groups and the random number generators have its values at once, and the ranks read the rest when they are built::

    load ----> model, options, generators      first step: build ranks from the model ----> read optimizer state
"""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np
import torch
from torch import optim

from counterpoint.checkpoint import Checkpoint
from counterpoint.checkpoint.reader import state_error
from counterpoint.data.sampler import Cursor
from counterpoint.errors import CheckpointError, DataError, PlanError, ProtocolError
from counterpoint.optim.validation import shorten
from counterpoint.terminal_text import warn
from counterpoint.training.checkpointing import save_restore
from counterpoint.training.checkpointing.checkpoint_dir import CheckpointDir, claim_checkpoint_dir
from counterpoint.training.checkpointing.restored_options import (
    describe_options,
    require_same_options,
    restore_options,
)
from counterpoint.training.distributed_world import has_remote_ranks
from counterpoint.training.ranks.local_ranks import LocalRanks
from counterpoint.value_codec import decode_value, encode_value


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint that ranks read when they are built.

    Args:
        checkpoint: the checkpoint.
        versions: of the model's tensors when they got its values.
    """

    checkpoint: Checkpoint
    versions: Sequence[int]


@dataclass(slots=True)
class LoopCheckpoints:
    """The checkpoints that a loop writes, and the one that it continues from.

    Args:
        local_ranks: the ranks.
    """

    local_ranks: LocalRanks
    run_id: str = ""  # of the run that was loaded, or is saved
    pending: PendingCheckpoint | None = None
    has_other_state: bool = False  # whether the optimizer got another state after the load
    dirs: dict[Path, CheckpointDir] = field(default_factory=dict)  # that are held

    def save(
        self, folder: Path, number: int, scheduler: optim.lr_scheduler.LRScheduler | None, keep_last: int | None
    ) -> Path:
        """Write a checkpoint; a collective call, with no batch in flight.

        Args:
            folder: of all checkpoints; the first call holds it for this run.
            number: of steps that are done.
            scheduler: the learning rate scheduler, if any.
            keep_last: how many checkpoints of this run are kept; None keeps all.

        Returns:
            The checkpoint's own folder.

        Raises:
            CheckpointError: there is nothing to save, or the folder cannot be used, or did not take it.
        """
        ranks = self.local_ranks
        if ranks.compiled is None or ranks.optimizer_exchange is None:
            raise CheckpointError("there is nothing to save before the first step; call step(...) first")
        ranks.optimizer_exchange.hand_over_changes()
        folder = folder.absolute()
        if folder not in self.dirs:
            self.dirs[folder] = claim_checkpoint_dir(ranks, folder, self.run_id, is_new=not self.run_id)
            self.run_id = self.dirs[folder].run_id
        metadata = {**describe_options(ranks.optimizer_spec, scheduler), "rng": self.gather_generators()}
        progress = save_restore.TrainProgress(number, Cursor(0, number))
        return save_restore.save_checkpoint(ranks, self.dirs[folder], progress, metadata, keep_last=keep_last)

    def load(
        self,
        folder: Path,
        scheduler: optim.lr_scheduler.LRScheduler | None,
        if_missing: Literal["error", "start"],
    ) -> int:
        """Continue from a checkpoint, or from the newest intact one in a folder; a collective call.

        Args:
            folder: the checkpoint, or the folder.
            scheduler: the learning rate scheduler, if any.
            if_missing: what happens if there is none.

        Returns:
            The number of steps that are done.

        Raises:
            PlanError: there is no such way to start.
            CheckpointError: there is none where one is needed, or it is of another model or optimizer; nothing has
                changed.
        """
        if if_missing not in {"error", "start"}:
            raise PlanError(f"if_missing={if_missing!r} is not one of error, start")
        ranks = self.local_ranks
        checkpoint = save_restore.find_checkpoint_together(ranks, save_restore.ResumeConfig(folder, if_missing))
        if checkpoint is None:
            return 0
        save_restore.require_same_architecture(ranks, checkpoint)
        state: Any = checkpoint.state
        self.require_same_optimizer(checkpoint)
        require_same_options(ranks.optimizer_spec, scheduler, checkpoint)
        generators = read_generators(checkpoint)
        if ranks.compiled is None:
            save_restore.load_model(ranks.trained, checkpoint)
            ranks.optimizer_spec.attach_ranks(self.refuse_state)
            ranks.optimizer_spec.take_state()  # that of the checkpoint replaces it
            self.pending = PendingCheckpoint(checkpoint, self.tensor_versions())
        else:
            ranks.restore_state(lambda: save_restore.restore_checkpoint(ranks, checkpoint))
        restore_options(ranks.optimizer_spec, scheduler, state["extra"])
        self.restore_generators(checkpoint, generators)
        self.run_id = str(state.get("run_id", ""))
        return int(state["step"])

    def before_build(self) -> None:
        """Note before ranks are built whether the optimizer has got another state than that of the checkpoint."""
        if self.pending is not None:
            self.local_ranks.optimizer_spec.find_changed_state(dict)
            self.has_other_state = self.local_ranks.optimizer_spec.has_new_state

    def restore_pending(self) -> None:
        """Let ranks that were just built read what was loaded before.

        Raises:
            DataError: weights were changed since, and ranks have weights of their own.
        """
        if self.pending is None:
            return
        ranks, pending, self.pending = self.local_ranks, self.pending, None
        has_replicas = ranks.shard_map().num_replicas > 1
        if has_replicas and self.tensor_versions() != pending.versions:
            raise DataError(
                f"weights were changed between load() of {pending.checkpoint.folder} and the first step, but under "
                f"{ranks.plan} replicas have weights of their own, which the first step reads; change them before "
                "load(), or inside full_weights(writeback=True) after the first step"
            )
        save_restore.restore_checkpoint(
            ranks, pending.checkpoint, has_weights=not has_replicas, has_optimizer_state=self.has_other_state
        )

    def tensor_versions(self) -> list[int]:
        """Return torch's counters of changes of the model's tensors."""
        trained = self.local_ranks.trained
        return [tensor._version for tensor in (*trained.parameters(), *trained.buffers())]  # noqa: SLF001 - see there

    def refuse_state(self) -> NoReturn:
        """Refuse a use of the optimizer's state before the ranks have it.

        Raises:
            DataError: always.
        """
        folder = "" if self.pending is None else f" of {self.pending.checkpoint.folder}"
        raise DataError(
            f"the optimizer's state was used, or its state_dict() called, between load(){folder} and the first step, "
            "which reads it; use it after the first step, or read it with counterpoint export"
        )

    def require_same_optimizer(self, checkpoint: Checkpoint) -> None:
        """Check that a checkpoint is of an optimizer of this class, with as many groups.

        Raises:
            CheckpointError: it is not.
        """
        extra: Any = checkpoint.state["extra"]
        spec = self.local_ranks.optimizer_spec
        own = (spec.optimizer_class.__name__, len(spec.optimizer.param_groups))
        saved = (extra.get("optimizer", own[0]), len(extra["options"]) if "options" in extra else own[1])
        if saved != own:
            raise CheckpointError(
                f"{checkpoint.folder} was saved with the optimizer {saved[0]} and {saved[1]} parameter groups, this "
                f"loop has {own[0]} and {own[1]}; a run can only continue with the same optimizer; load with it, or "
                "start from the weights alone (counterpoint export)"
            )

    def gather_generators(self) -> dict[str, list[str]]:
        """Return the states of the generators; of every process where they differ."""
        own = {
            name: b64encode(encode_value(state, f"the state of {name}")).decode()
            for name, state in generator_states().items()
        }
        gathered, world = [own], self.local_ranks.world
        if has_remote_ranks(world):
            everyone = tuple(range(world.fabrics[0].num_ranks))
            results = world.run(lambda fabric: fabric.gather_values("generators", own, everyone))  # type: ignore[arg-type]
            gathered = cast("list[dict[str, str]]", results[0])
        by_name = {name: [states[name] for states in gathered] for name in own}
        return {name: states if len(set(states)) > 1 else states[:1] for name, states in by_name.items()}

    def restore_generators(self, checkpoint: Checkpoint, saved: Mapping[str, Sequence[Any]]) -> None:
        """Continue with the generators of a checkpoint.

        Raises:
            CheckpointError: they are not states of generators.
        """
        world = self.local_ranks.world
        rank, num_processes = world.fabrics[0].rank, world.fabrics[0].num_ranks if has_remote_ranks(world) else 1
        skipped = [name for name, states in saved.items() if len(states) not in {1, num_processes}]
        own = {name: states[rank % len(states)] for name, states in saved.items() if name not in skipped}
        try:
            set_generators(own)
        except (LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise state_error(checkpoint, f"state.extra.rng is not a state of generators ({error})") from error
        if skipped and rank == 0:
            warn(
                f"{checkpoint.folder} has the random number generators of {len(saved[skipped[0]])} processes, and this "
                f"run has {num_processes}, so those that differed are not restored: {' and '.join(skipped)}; seed them "
                "before load() if the loop draws from them",
                RuntimeWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Let other runs use the folders."""
        for held in self.dirs.values():
            held.release()
        self.dirs.clear()


def generator_states() -> dict[str, Any]:
    """Return the states of the global random number generators of this process, on the CPU."""
    return {
        "torch": torch.get_rng_state(),
        "numpy.random": np.random.get_state(legacy=False),
        "random": random.getstate(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Set generators to states of :func:`generator_states`."""
    setters: dict[str, Callable[[Any], object]] = {
        "torch": torch.set_rng_state,
        "numpy.random": np.random.set_state,
        "random": random.setstate,
    }
    for name, state in states.items():
        setters[name](state)


def read_generators(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """Return the states of generators that a checkpoint has; none if a trainer has saved it.

    Raises:
        CheckpointError: one cannot be decoded.
    """
    extra: Any = checkpoint.state["extra"]
    try:
        return {
            name: [decode_value(b64decode(text, validate=True)) for text in texts]
            for name, texts in extra.get("rng", {}).items()
            if texts
        }
    except (ValueError, ProtocolError) as error:
        raise state_error(checkpoint, f"state.extra.rng is not an encoded value ({shorten(str(error))})") from error
