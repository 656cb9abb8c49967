"""The state of the user's optimizer, to and from the optimizers of the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from counterpoint.errors import DataError
from counterpoint.runtime.full_state import gather_optimizer_state, scatter_optimizer_state
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.batches.in_flight import InFlightBatches
from counterpoint.training.built_ranks import BuiltRanks


class OptimizerExchange:
    """Exchanges optimizer state between the user's optimizer, which has it in torch's layout, and the ranks.

    Args:
        optimizer_spec: the user's optimizer.
        built: the ranks.
        in_flight: batches that must be flushed before state is read.
    """

    def __init__(self, optimizer_spec: OptimizerSpec, built: BuiltRanks, in_flight: InFlightBatches) -> None:
        self.optimizer_spec, self.built, self.in_flight = optimizer_spec, built, in_flight
        optimizer_spec.attach_ranks(self.export_state)

    def gather(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of every trained parameter; a collective call."""
        self.in_flight.require_flushed("state_dict()")
        return self.built.gather(gather_optimizer_state)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict()`` of the user's optimizer in full, as torch's own; a collective call."""
        optimizer = self.optimizer_spec.optimizer
        if self.optimizer_spec.has_new_state:
            return optimizer.state_dict()
        states = self.gather()
        self.optimizer_spec.attach_ranks(partial(self.optimizer_spec.put_state, states))
        try:
            return optimizer.state_dict()
        finally:
            self.optimizer_spec.attach_ranks(self.export_state)

    def export_state(self) -> None:
        """Give the user's optimizer the state of the ranks' optimizers, because it is used.

        Raises:
            DataError: other processes would have to take part.
        """
        if not self.built.is_single_process:
            raise DataError(
                f"the optimizer's state was used, or its state_dict() called, but under {self.built.plan} its state is "
                "on ranks in other processes; call step.full_optimizer_state(), or trainer.full_optimizer_state(), on "
                "all ranks, before close(), and optimizer.load_state_dict(...) on all ranks to change it"
            )
        self.optimizer_spec.put_state(self.gather())

    def find_changes(self) -> None:
        """Note before a step whether the state of the user's optimizer was changed, for the ranks to get it."""
        self.optimizer_spec.find_changed_state(self.gather)

    def hand_over_changes(self) -> None:
        """Give the ranks the changes of the user's optimizer before its state is saved.

        Raises:
            DataError: ranks must be built again for them.
        """
        self.find_changes()
        spec = self.optimizer_spec
        if spec.has_new_state and spec.merges_params and not spec.has_mergeable_state():
            raise DataError(
                "the optimizer's state was changed for some parameters since the last step, and the ranks take it over "
                "in the next one, for which they are built again; save after that step"
            )
        if spec.has_new_state:
            self.import_state()

    def import_state(self) -> None:
        """Load the state of the user's optimizer into the optimizers of the ranks."""
        is_new, states = self.optimizer_spec.has_new_state, self.optimizer_spec.take_state()
        if is_new:
            scatter_optimizer_state(self.built.shard_map, self.built.ranks, states)

    def keep_for_rebuild(self) -> None:
        """Give the user's optimizer the state of the ranks, for ranks that are built next; a collective call.

        Raises:
            DataError: its steps change attributes, which are not part of its state.
        """
        attributes = self.optimizer_spec.step_effects().attributes
        if attributes:
            name = self.optimizer_spec.optimizer_class.__name__
            raise DataError(
                f"{name}.step changes its attributes {', '.join(attributes)}, but ranks have to be built again with "
                "optimizers of their own, which get options and state only; keep what steps change in state[param], as "
                "Adam keeps its step, or close() and call parallelize(...) again after the change"
            )
        if not self.optimizer_spec.has_new_state:
            self.optimizer_spec.put_state(self.gather(), is_new=True)

    def close(self) -> None:
        """Make the user's optimizer an ordinary one, with the state of the ranks if all are in this process."""
        if self.built.is_single_process:
            self.in_flight.batches.clear()
            if not self.optimizer_spec.has_new_state and not self.optimizer_spec.is_state_loaded():
                self.export_state()
            self.optimizer_spec.detach_ranks()
