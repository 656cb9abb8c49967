"""Parameters of one dense key: pull, push, gradient accumulation and error feedback."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterpoint.elastic.sync_policy import StepContext
from counterpoint.errors import DataError
from counterpoint.ps.consistency import Bsp
from counterpoint.ps.placement import split_range
from counterpoint.ps.session import PendingResult, PullResult, PushResult, Session, Versions
from counterpoint.ps.update_rules import UpdateRule

MAX_PENDING_PUSHES = 2
"""Unacknowledged pushes of a key before the next one waits; ``pull_ahead`` adds to it."""


@dataclass(frozen=True, slots=True)
class PendingPull:
    """Weights that are being pulled.

    Args:
        pending: the pull.
        buffer: that receives them, unless they arrive in shared memory.
        minibatch: number of the minibatch whose forward waits for them.
    """

    pending: PendingResult[PullResult]
    buffer: Tensor | None
    minibatch: int


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter and its name in the model."""

    name: str
    parameter: nn.Parameter


class RemoteParameters:
    """The parameters of one dense key.

    Args:
        session: of the worker.
        key: its name.
        parameters: parts of the key, in order.
        rule: update rule.
        codec: compression codec of pushes; empty for none.
        zero_copy: whether the parameters use the memory in which a pull arrived; else they are copied to own memory.
    """

    def __init__(
        self,
        session: Session,
        key: str,
        parameters: Sequence[NamedParameter],
        rule: UpdateRule,
        *,
        codec: str = "",
        zero_copy: bool = False,
    ) -> None:
        self.session, self.key, self.parameters, self.codec = session, key, tuple(parameters), codec
        self.sizes = [part.parameter.numel() for part in parameters]
        self.flat = torch.cat([part.parameter.detach().reshape(-1) for part in parameters])
        session.init(key, self.flat, rule)
        self._zero_copy = zero_copy
        self._spare_buffers: list[Tensor] = []
        self._pending_pulls: deque[PendingPull] = deque()
        self._minibatch = 0
        self._pending_pushes: deque[tuple[PendingResult[PushResult], Tensor | None]] = deque()
        self.versions: Versions = ()
        self.read_versions: Versions = ()
        self.exact_version = isinstance(session.job.consistency, Bsp)
        self.residual: Tensor | None = None
        self._accumulated: Tensor | None = None
        self._local_gradient: Tensor | None = None
        self.is_fresh = False
        self.is_complete = False

    def start_pull(self, context: StepContext, min_version: int) -> None:
        """Start a pull of newer weights, unless enough are pending."""
        if len(self._pending_pulls) > context.pull_ahead:
            return
        out = (
            self._spare_buffers.pop()
            if self._spare_buffers
            else None
            if self._zero_copy
            else torch.empty_like(self.flat)
        )
        pending = self.session.pull(self.key, min_versions=min_version, out=out, exact_version=self.exact_version)
        self._pending_pulls.append(PendingPull(pending, out, self._minibatch + 1 + context.pull_ahead))

    def begin_minibatch(self) -> None:
        """Start a minibatch."""
        self.is_fresh = self.is_complete = False
        self._minibatch += 1
        for part in self.parameters:
            part.parameter.grad = None

    def wait_fresh(self, context: StepContext) -> None:
        """Wait until the parameters are as recent as required."""
        if self.is_fresh:
            return
        self.is_fresh = True
        while not context.next_step and self._pending_pulls and self._pending_pulls[0].minibatch <= self._minibatch:
            self._finish_pull()
        while not self.versions or min(self.versions) < context.step:
            self.start_pull(context, context.step)
            self._finish_pull()
        self.read_versions = self.read_versions or self.versions

    def refresh(self) -> None:
        """Set the parameters to the newest values, independently of pending pulls."""
        self._set_values(self.session.pull(self.key).wait(), None)

    def detach_copy(self) -> None:
        """Move the parameters to memory that is independent of the session."""
        self._rebind_parameters(self.flat.clone())

    def invalidate(self) -> None:
        """Mark the parameters as too stale, so that they are pulled again."""
        self.versions = ()
        self._pending_pulls.clear()  # their buffers may still be written

    def _finish_pull(self) -> None:
        fetch = self._pending_pulls.popleft()
        self._set_values(fetch.pending.wait(), fetch.buffer)

    def _set_values(self, result: PullResult, out: Tensor | None) -> None:
        if result.values is out or len(result.versions) > 1:
            self._spare_buffers = [*self._spare_buffers[:1], self.flat]  # as many as may be in flight
        self.versions = result.versions
        self._rebind_parameters(result.values)

    def _rebind_parameters(self, flat: Tensor) -> None:
        self.flat = flat
        for part, values in zip(self.parameters, torch.split(self.flat, self.sizes), strict=True):
            part.parameter.data = values.view(part.parameter.shape)

    @property
    def missing_gradients(self) -> list[str]:
        """Names of the parameters that have no gradient yet."""
        return [part.name for part in self.parameters if part.parameter.grad is None]

    def add_gradient(self, context: StepContext, local_lr: float = 0.0) -> None:
        """Add the gradient of this minibatch to that of the slice, and push it after the last minibatch.

        Args:
            context: what is being computed.
            local_lr: see :class:`counterpoint.elastic.sync_policy.SyncPolicy`.

        Raises:
            DataError: the weights were used before they had arrived.
        """
        if not self.is_fresh:
            raise DataError(
                f"weights of {self.key} were used before the forward of their module, so they were stale; use a model "
                "that calls its modules, or overlap=False, which waits for all weights at once"
            )
        self.is_complete = True
        gradient = self._flat_gradient()
        self._local_gradient = gradient if local_lr else None
        self._accumulated = gradient if self._accumulated is None else self._accumulated.add_(gradient)
        with self.session.batch():
            if context.is_last_minibatch:
                self.push(context)
            if context.pulls_next:
                self.start_pull(context, context.next_step)

    def _flat_gradient(self) -> Tensor:
        gradients = []
        for part in self.parameters:
            grad = part.parameter.grad
            gradients.append(torch.zeros_like(part.parameter) if grad is None else grad)
            part.parameter.grad = None
        return (
            gradients[0].reshape(-1)
            if len(gradients) == 1
            else torch.cat([gradient.reshape(-1) for gradient in gradients])
        )

    def push(self, context: StepContext) -> None:
        """Push the accumulated gradient of a slice; with a codec, keep the residual (error feedback)."""
        values = torch.zeros_like(self.flat) if self._accumulated is None else self._accumulated
        read_versions, self._accumulated, self.read_versions = self.read_versions or self.versions, None, ()
        while len(self._pending_pushes) >= MAX_PENDING_PUSHES + context.pull_ahead:
            self._finish_push()
        if not self.codec:
            self._pending_pushes.append(
                (
                    self.session.push(self.key, values, slice_index=context.slice_index, read_versions=read_versions),
                    None,
                )
            )
            return
        if not bool(values.isfinite().all()):
            raise DataError(
                f"the gradient of {self.key} is not finite in slice {context.slice_index}, so {self.codec} cannot "
                "encode it"
            )
        old_residual = torch.zeros_like(values) if self.residual is None else self.residual
        values = values + old_residual
        pending = self.session.push(
            self.key, values, slice_index=context.slice_index, read_versions=read_versions, codec=self.codec
        )
        self.residual = values
        self._pending_pushes.append((pending, old_residual - values))

    def apply_local_step(self, local_lr: float) -> None:
        """Apply the gradient of this minibatch to the local weights."""
        if self._local_gradient is not None:
            self.flat.sub_(self._local_gradient, alpha=local_lr)
            self._local_gradient = None

    def discard(self) -> None:
        """Discard a slice that was begun."""
        self._accumulated = self._local_gradient = None
        self.read_versions = ()
        self.begin_minibatch()

    def flush(self) -> None:
        """Wait until every push has been acknowledged."""
        while self._pending_pushes:
            self._finish_push()

    def _finish_push(self) -> None:
        pending, residual_change = self._pending_pushes.popleft()
        result = pending.wait()
        if residual_change is None or self.residual is None or all(result.are_new):
            return
        for is_new, key_range in zip(result.are_new, split_range(len(self.flat), len(result.are_new)), strict=True):
            if not is_new:  # another worker's push of this slice was counted, so this one had no effect
                self.residual[key_range.low : key_range.high] += residual_change[key_range.low : key_range.high]
