"""A key that is fetched whole: parameters of one module, side by side, and what is under way of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterpoint.elastic.sync_policy import StepContext
from counterpoint.errors import DataError
from counterpoint.ps.job_config import Bsp
from counterpoint.ps.placement import split_range
from counterpoint.ps.session import PendingResult, PullResult, PushResult, Session, Versions
from counterpoint.ps.update_rules import UpdateRule

MAX_PENDING_PUSHES = 2
"""So many pushes of a key may be unanswered before the next one waits, and one for each that is not waited for."""


@dataclass(frozen=True, slots=True)
class PendingPull:
    """Weights that are on their way.

    Args:
        pending: what has been asked for.
        out: where they are going to be, if nobody else has them in memory that all see.
        minibatch: the number of the one whose forward waits for them.
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
    """The parameters of a key.

    Args:
        session: the way to the servers.
        key: its name.
        parts: what lies in it, in order.
        rule: what a push does; None where nothing is ever pushed.
        code: how pushes are written on the wire; empty for as they are.
        is_held: whether what comes is computed with where it came in; else it is copied to memory of the worker's own.
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
        """Newer weights are on their way, unless as many are as may be."""
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
        """A minibatch begins."""
        self.is_fresh = self.is_complete = False
        self._minibatch += 1
        for part in self.parameters:
            part.parameter.grad = None

    def wait_fresh(self, context: StepContext) -> None:
        """The parameters are as new as they have to be."""
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
        """The parameters are the newest there are, whatever else is under way."""
        self._set_values(self.session.pull(self.key).wait(), None)

    def detach_copy(self) -> None:
        """The parameters are in memory of the worker's own, whatever becomes of the session."""
        self._rebind_parameters(self.flat.clone())

    def invalidate(self) -> None:
        """What the parameters are is too old to be used; they are fetched again."""
        self.versions = ()
        self._pending_pulls.clear()  # something may still come to where they were going to be

    def _finish_pull(self) -> None:
        fetch = self._pending_pulls.popleft()
        self._set_values(fetch.pending.wait(), fetch.buffer)

    def _set_values(self, pulls: PullResult, out: Tensor | None) -> None:
        if pulls.values is out or len(pulls.versions) > 1:
            self._spare_buffers = [*self._spare_buffers[:1], self.flat]  # no more than may be under way at once
        self.versions = pulls.versions
        self._rebind_parameters(pulls.values)

    def _rebind_parameters(self, flat: Tensor) -> None:
        self.flat = flat
        for part, values in zip(self.parameters, torch.split(self.flat, self.sizes), strict=True):
            part.parameter.data = values.view(part.parameter.shape)

    @property
    def missing_gradients(self) -> list[str]:
        """Names of the parameters that have no gradient yet."""
        return [part.name for part in self.parameters if part.parameter.grad is None]

    def add_gradient(self, context: StepContext, local_lr: float = 0.0) -> None:
        """The gradient of this minibatch is here: it is added to the portion's, and pushed with the last one.

        Args:
            moment: what is being computed.
            local_lr: see :class:`counterpoint.elastic.sync_policy.Rhythm`.

        Raises:
            DataError: the weights were used before they had come.
        """
        if not self.is_fresh:
            raise DataError(
                f"weights of {self.key} were used before the forward of their module began, so they were old; take a "
                "model that calls its modules, or give overlap=False, which waits for all weights at once"
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
        found = []
        for part in self.parameters:
            gradient = part.parameter.grad
            found.append(torch.zeros_like(part.parameter) if gradient is None else gradient)
            part.parameter.grad = None
        return found[0].reshape(-1) if len(found) == 1 else torch.cat([one.reshape(-1) for one in found])

    def push(self, context: StepContext) -> None:
        """What has been added up for a portion is on its way; of a code, what it leaves out stays here."""
        values = torch.zeros_like(self.flat) if self._accumulated is None else self._accumulated
        read, self._accumulated, self.read_versions = self.read_versions or self.versions, None, ()
        while len(self._pending_pushes) >= MAX_PENDING_PUSHES + context.pull_ahead:
            self._finish_push()
        if not self.codec:
            self._pending_pushes.append(
                (self.session.push(self.key, values, slice_index=context.slice_index, read_versions=read), None)
            )
            return
        if not bool(values.isfinite().all()):
            raise DataError(
                f"the gradient of {self.key} is not finite in portion {context.slice_index}, so it has no {self.codec}"
            )
        before = torch.zeros_like(values) if self.residual is None else self.residual
        values = values + before
        pending = self.session.push(
            self.key, values, slice_index=context.slice_index, read_versions=read, codec=self.codec
        )
        self.residual = values
        self._pending_pushes.append((pending, before - values))

    def apply_local_step(self, local_lr: float) -> None:
        """The worker's own weights go a step down the gradient of this minibatch."""
        if self._local_gradient is not None:
            self.flat.sub_(self._local_gradient, alpha=local_lr)
            self._local_gradient = None

    def discard(self) -> None:
        """Nothing is left of a portion that was begun."""
        self._accumulated = self._local_gradient = None
        self.read_versions = ()
        self.begin_minibatch()

    def flush(self) -> None:
        """Every push has been answered."""
        while self._pending_pushes:
            self._finish_push()

    def _finish_push(self) -> None:
        pending, undone = self._pending_pushes.popleft()
        answer = pending.wait()
        if undone is None or self.residual is None or all(answer.are_new):
            return
        for is_new, place in zip(answer.are_new, split_range(len(self.flat), len(answer.are_new)), strict=True):
            if not is_new:  # somebody else's push of this data was counted, so nothing of this one was sent
                self.residual[place.low : place.high] += undone[place.low : place.high]
