"""A key that is fetched whole: parameters of one module, side by side, and what is under way of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.server.choices import Rule
from counterpoint.server.job import Bsp
from counterpoint.server.placement import cut
from counterpoint.server.session import Pending, Pulls, Pushes, Session, Versions
from counterpoint.server.working.rhythm import Moment

UNDER_WAY = 2
"""So many pushes of a key may be unanswered before the next one waits, and one for each that is not waited for."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Weights that are on their way.

    Args:
        pending: what has been asked for.
        out: where they are going to be, if nobody else has them in memory that all see.
        minibatch: the number of the one whose forward waits for them.
    """

    pending: Pending[Pulls]
    out: Tensor | None
    minibatch: int


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter and its name in the model."""

    name: str
    parameter: nn.Parameter


class Weights:
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
        parts: Sequence[Named],
        rule: Rule,
        *,
        code: str = "",
        is_held: bool = False,
    ) -> None:
        self.session, self.key, self.parts, self.code = session, key, tuple(parts), code
        self.sizes = [part.parameter.numel() for part in parts]
        self.flat = torch.cat([part.parameter.detach().reshape(-1) for part in parts])
        session.init(key, self.flat, rule)
        self._is_held = is_held
        self._spares: list[Tensor] = []
        self._fetches: deque[Fetch] = deque()
        self._minibatch = 0
        self._pushing: deque[tuple[Pending[Pushes], Tensor | None]] = deque()
        self.held: Versions = ()
        self.read: Versions = ()
        self.is_exact = isinstance(session.job.consistency, Bsp)
        self.residual: Tensor | None = None
        self._accrued: Tensor | None = None
        self._moving: Tensor | None = None
        self.has_arrived = False
        self.is_complete = False

    def ask(self, moment: Moment, least: int) -> None:
        """Newer weights are on their way, unless as many are as may be."""
        if len(self._fetches) > moment.ahead:
            return
        out = self._spares.pop() if self._spares else None if self._is_held else torch.empty_like(self.flat)
        pending = self.session.pull(self.key, least=least, out=out, is_exact=self.is_exact)
        self._fetches.append(Fetch(pending, out, self._minibatch + 1 + moment.ahead))

    def begin(self) -> None:
        """A minibatch begins."""
        self.has_arrived = self.is_complete = False
        self._minibatch += 1
        for part in self.parts:
            part.parameter.grad = None

    def arrive(self, moment: Moment) -> None:
        """The parameters are as new as they have to be."""
        if self.has_arrived:
            return
        self.has_arrived = True
        while not moment.following and self._fetches and self._fetches[0].minibatch <= self._minibatch:
            self._take()
        while not self.held or min(self.held) < moment.step:
            self.ask(moment, moment.step)
            self._take()
        self.read = self.read or self.held

    def renew(self) -> None:
        """The parameters are the newest there are, whatever else is under way."""
        self._set(self.session.pull(self.key).wait(), None)

    def own(self) -> None:
        """The parameters are in memory of the worker's own, whatever becomes of the session."""
        self._point(self.flat.clone())

    def forget(self) -> None:
        """What the parameters are is too old to be used; they are fetched again."""
        self.held = ()
        self._fetches.clear()  # something may still come to where they were going to be

    def _take(self) -> None:
        fetch = self._fetches.popleft()
        self._set(fetch.pending.wait(), fetch.out)

    def _set(self, pulls: Pulls, out: Tensor | None) -> None:
        if pulls.values is out or len(pulls.versions) > 1:
            self._spares = [*self._spares[:1], self.flat]  # no more than may be under way at once
        self.held = pulls.versions
        self._point(pulls.values)

    def _point(self, flat: Tensor) -> None:
        self.flat = flat
        for part, values in zip(self.parts, torch.split(self.flat, self.sizes), strict=True):
            part.parameter.data = values.view(part.parameter.shape)

    @property
    def lacking(self) -> list[str]:
        """Names of the parameters that have no gradient yet."""
        return [part.name for part in self.parts if part.parameter.grad is None]

    def complete(self, moment: Moment, local_lr: float = 0.0) -> None:
        """The gradient of this minibatch is here: it is added to the portion's, and pushed with the last one.

        Args:
            moment: what is being computed.
            local_lr: see :class:`counterpoint.server.working.rhythm.Rhythm`.

        Raises:
            DataError: the weights were used before they had come.
        """
        if not self.has_arrived:
            raise DataError(
                f"weights of {self.key} were used before the forward of their module began, so they were old; take a "
                "model that calls its modules, or give overlap=False, which waits for all weights at once"
            )
        self.is_complete = True
        gradient = self._gradient()
        self._moving = gradient if local_lr else None
        self._accrued = gradient if self._accrued is None else self._accrued.add_(gradient)
        with self.session.together():
            if moment.is_last:
                self.push(moment)
            if moment.fetches:
                self.ask(moment, moment.following)

    def _gradient(self) -> Tensor:
        found = []
        for part in self.parts:
            gradient = part.parameter.grad
            found.append(torch.zeros_like(part.parameter) if gradient is None else gradient)
            part.parameter.grad = None
        return found[0].reshape(-1) if len(found) == 1 else torch.cat([one.reshape(-1) for one in found])

    def push(self, moment: Moment) -> None:
        """What has been added up for a portion is on its way; of a code, what it leaves out stays here."""
        values = torch.zeros_like(self.flat) if self._accrued is None else self._accrued
        read, self._accrued, self.read = self.read or self.held, None, ()
        while len(self._pushing) >= UNDER_WAY + moment.ahead:
            self._answer()
        if not self.code:
            self._pushing.append((self.session.push(self.key, values, portion=moment.portion, read=read), None))
            return
        if not bool(values.isfinite().all()):
            raise DataError(
                f"the gradient of {self.key} is not finite in portion {moment.portion}, so it has no {self.code}"
            )
        before = torch.zeros_like(values) if self.residual is None else self.residual
        values = values + before
        pending = self.session.push(self.key, values, portion=moment.portion, read=read, code=self.code)
        self.residual = values
        self._pushing.append((pending, before - values))

    def move(self, local_lr: float) -> None:
        """The worker's own weights go a step down the gradient of this minibatch."""
        if self._moving is not None:
            self.flat.sub_(self._moving, alpha=local_lr)
            self._moving = None

    def drop(self) -> None:
        """Nothing is left of a portion that was begun."""
        self._accrued = self._moving = None
        self.read = ()
        self.begin()

    def settle(self) -> None:
        """Every push has been answered."""
        while self._pushing:
            self._answer()

    def _answer(self) -> None:
        pending, undone = self._pushing.popleft()
        answer = pending.wait()
        if undone is None or self.residual is None or all(answer.are_new):
            return
        for is_new, place in zip(answer.are_new, cut(len(self.flat), len(answer.are_new)), strict=True):
            if not is_new:  # somebody else's push of this data was counted, so nothing of this one was sent
                self.residual[place.low : place.high] += undone[place.low : place.high]
