"""A module whose parameters lie on servers: weights come when a layer's forward begins, gradients go when ready.

The order of a minibatch is: `begin`, a forward of the module, `expect` for the next one, a backward, `finish`. What is
asked for in `finish` or before is waited for in the forward of the next minibatch, layer by layer. Where weights are
fetched ahead, `expect` may come before the forward, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from counterpoint.errors import DataError, PlanError
from counterpoint.server.choices import Start
from counterpoint.server.keys import require_alone
from counterpoint.server.session import Session
from counterpoint.server.working.layout import kept
from counterpoint.server.working.lookups import Lookups, Table
from counterpoint.server.working.optimizers import Factory, rules_of
from counterpoint.server.working.rhythm import Moment, Rhythm, step_of
from counterpoint.server.working.units import (
    ALONE_BYTES,
    dense_units,
    gathered,
    modules_of_tables,
    require_kept_buffers,
    to_be_held,
)
from counterpoint.server.working.weights import Weights

Choice = Literal["error", "zero"]

SEND_BYTES = 1 << 18
"""So much of gradients that are ready leaves while others are still computed; less waits for them."""
NEVER = 1 << 62
KEY_BYTES = 1 << 16
"""Up to so many, the weights of neighbouring modules are one key: a message costs more than they do."""


class Served:
    """A worker's copy of a module.

    Args:
        model: any module on the CPU. The first worker's first weights are everybody's; tables begin as they say.
        session: the worker's belonging to a job.
        optimizer: of torch, or a factory; the servers do what it would.
        tables: names of weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` that are kept as rows, and how these begin.
            Such a weight lies nowhere as a whole: on this worker it is on the ``meta`` device.
        rhythm: how often the worker pushes and fetches.
        code: how pushes of dense keys are written on the wire, as ``int8`` or ``topk:0.01``; what a code leaves out
            stays on the worker and is pushed with the next one.
        unused: what a parameter without a gradient means: ``error``, or ``zero`` for a gradient of zeros.
        buffers: what running statistics mean, which servers do not keep: ``error``, or ``own`` for each worker's own.
        overlap: whether a layer's weights are waited for when its forward begins; else all are at once.
        key_bytes: up to which weights of neighbouring modules are one key; 0 for a key for each module. It is the first
            worker's that counts, also after a cut. A code looks at one module at a time.

    Raises:
        PlanError: no server can do what is asked.
    """

    def __init__(  # noqa: PLR0913 - what a worker may choose, most by keyword
        self,
        model: nn.Module,
        session: Session,
        optimizer: optim.Optimizer | Factory,
        *,
        tables: Mapping[str, Table | Start] | None = None,
        rhythm: Rhythm | None = None,
        code: str = "",
        unused: Choice = "error",
        buffers: Literal["error", "own"] = "error",
        overlap: bool = True,
        key_bytes: int = KEY_BYTES,
    ) -> None:
        self.model, self.session, self.rhythm = model, session, rhythm or Rhythm()
        self.unused, self.overlap = unused, overlap
        self.moment = Moment(ahead=self.rhythm.fetch_ahead)
        consistency = session.job.consistency
        self.rhythm.require_fit(consistency)
        if code:
            require_alone(code)
        if buffers == "error":
            require_kept_buffers(model)
        wanted = {name: one if isinstance(one, Table) else Table(one) for name, one in (tables or {}).items()}
        homes = modules_of_tables(model, wanted)
        for modules in homes.values():
            to_meta(modules[0].get_parameter("weight"))
        rules = rules_of(optimizer, model, [name for name, table in wanted.items() if table.rule is None])
        self.rules = {**rules, **{name: one.rule for name, one in wanted.items() if one.rule is not None}}
        self.tables: dict[str, Lookups] = {}
        for name, modules in homes.items():
            if name not in self.rules:
                raise PlanError(f"table {name} is not in the optimizer; add it, or say Table(rule=...)")
            self.tables[name] = Lookups(session, name, modules, self.rules[name], wanted[name], self.moment)
        alone_bytes = NEVER if code else ALONE_BYTES
        units = dense_units(model, self.rules, leave=set(self.tables), alone_bytes=alone_bytes)
        units = kept(session, gathered(units, 0 if code else key_bytes), code)
        held = to_be_held(unit for unit in units if unit.is_trained)
        self.weights = [
            Weights(session, unit.key, unit.parts, unit.rule, code=code, is_held=unit.key in held)
            for unit in units
            if unit.is_trained
        ]
        self._ready: list[Weights] = []
        self.frozen = [Weights(session, unit.key, unit.parts, unit.rule) for unit in units if not unit.is_trained]
        self._since_fetch = 0
        self._owners = {unit.key: unit.owners for unit in units}
        self._called: list[str] | None = None
        self._has_learnt = False
        self._is_reading = False
        self._lazy: dict[str, list[Weights]] = {}
        self._eager = list(self.weights)
        self._hooks = list(self._hook())
        for one in self.frozen:
            one.renew()
            one.own()

    def _hook(self) -> Iterator[RemovableHandle]:
        yield self.model.register_forward_pre_hook(lambda *_: self._enter())
        for path, module in self.model.named_modules():
            if path:
                yield module.register_forward_pre_hook(lambda *_, path=path: self._enter_layer(path))
        for one in self.weights:
            for part in one.parts:
                hook = partial(self._note, one)
                yield part.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self, portion: int, inputs: Sequence[Any] = (), *, is_last: bool = True) -> None:
        """A minibatch begins.

        Args:
            portion: of the whole run, that it belongs to.
            inputs: that the model is going to be called with.
            is_last: whether it is the portion's last minibatch.
        """
        moment = self.moment
        moment.portion, moment.is_last, moment.is_open = portion, is_last, True
        moment.step, moment.following = step_of(self.session.job.consistency, portion)
        self._since_fetch += 1
        moment.fetches = is_last if moment.following else self._since_fetch >= self.rhythm.fetch_every
        self._ready.clear()
        for one in self.weights:
            one.begin()
        for table in self.tables.values():
            table.begin(inputs)

    def _enter(self) -> None:
        """A forward begins: what cannot wait for its own layer is waited for."""
        if not self.moment.is_open or self._is_reading:
            return
        is_lazy = self._has_learnt and self.model.training
        for one in self._eager if is_lazy else self.weights:
            one.arrive(self.moment)
        if self._called is None:
            self._called = []

    def _enter_layer(self, path: str) -> None:
        if not self.moment.is_open or self._is_reading:
            return
        for one in self._lazy.get(path, ()):
            one.arrive(self.moment)
        if not self._has_learnt and self._called is not None:
            self._called.append(path)

    def _learn(self) -> None:
        """Weights all of whose modules were called wait for the first of them; the others for the whole model."""
        if self._has_learnt or not self._called or not self.overlap:
            return
        self._has_learnt = True
        called, self._eager = set(self._called), []
        for one in self.weights:
            owners = self._owners[one.key]
            if "" in owners or not owners <= called:
                self._eager.append(one)
                continue
            for path in owners:
                self._lazy.setdefault(path, []).append(one)

    def _note(self, one: Weights, _: Tensor) -> None:
        if not self.moment.is_open or one.is_complete or one.lacking or one in self._ready:
            return
        self._ready.append(one)
        if sum(each.flat.nbytes for each in self._ready) >= SEND_BYTES:
            self._send()

    def _send(self) -> None:
        """What is ready leaves, in one go."""
        with self.session.together():
            for one in self._ready:
                one.complete(self.moment, self.rhythm.local_lr)
        self._ready.clear()

    def expect(self, inputs: Sequence[Any], portion: int) -> None:
        """Rows that a minibatch to come looks up are on their way, if it can be told which.

        It is said after the forward of the one before it; where weights are fetched ahead, of each of so many
        minibatches in their order, and before the forward already, for more time.

        Args:
            inputs: of the minibatch.
            portion: that it belongs to.
        """
        step, _ = step_of(self.session.job.consistency, portion)
        for table in self.tables.values():
            table.expect(inputs, following=step)

    def finish(self, *, is_skipped: bool = False) -> None:
        """A minibatch is over: what is left of its gradient is added or pushed, too.

        Args:
            is_skipped: whether there was no backward, and zeros are meant.

        Raises:
            DataError: a parameter has no gradient.
        """
        missing = [one for one in self.weights if not one.is_complete and one.lacking]
        if missing and self.unused == "error" and not is_skipped:
            raise DataError(
                f"{missing[0].lacking[0]} got no gradient from portion {self.moment.portion}; leave it out of the "
                "optimizer, mend the model, or give unused='zero'"
            )
        for one in missing:
            one.has_arrived = True
        self._ready[:] = [one for one in self.weights if not one.is_complete]
        with self.session.together():
            self._send()
            for table in self.tables.values():
                table.complete()
        if self.rhythm.local_lr:
            for one in self.weights:
                one.move(self.rhythm.local_lr)
        if self.moment.fetches:
            self._since_fetch = 0
        self.moment.is_open = False
        self._learn()

    def pass_over(self, portion: int) -> None:
        """A portion without samples is pushed as zeros."""
        self.begin(portion)
        for one in self.weights:
            one.arrive(self.moment)
        for one in self.weights:
            one.complete(self.moment)
        for table in self.tables.values():
            table.complete()
        self.moment.is_open = False

    def _all(self) -> Iterator[Weights | Lookups]:
        yield from self.weights
        yield from self.tables.values()

    def drop(self) -> None:
        """Nothing is left of a portion that was begun, but what has been pushed of it."""
        self.moment.is_open = False
        for one in self._all():
            one.drop()

    def forget(self) -> None:
        """What has been fetched is too old to be used, as it is after :meth:`Session.enter`."""
        for one in self._all():
            one.forget()

    def settle(self) -> None:
        """Every push has been answered."""
        for one in self._all():
            one.settle()

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The model has the newest weights, to be measured; nothing is pushed."""
        self.settle()
        for one in self.weights:
            one.renew()
        self._is_reading, self.moment.step = True, 0
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self._is_reading = False

    def give_back(self, *, tables: bool = False) -> nn.Module:
        """The model is as before, without hooks and with the newest weights; returns it.

        Args:
            tables: whether tables are fetched as a whole, too; else their weights stay on the ``meta`` device.
        """
        self.settle()
        for one in self.weights:
            one.renew()
            one.own()
        self.close()
        for name, table in self.tables.items() if tables else ():
            fill(self.model, name, table)
        return self.model

    def close(self) -> None:
        """The model calls nothing of this any more."""
        for hook in self._hooks:
            hook.remove()
        for table in self.tables.values() if self._hooks else ():
            table.release()
        self._hooks = []


def to_meta(parameter: nn.Parameter) -> None:
    """The parameter has its shape, but no memory."""
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, bare)  # type: ignore[no-untyped-call]


def fill(model: nn.Module, name: str, table: Lookups) -> None:
    """The weight of a table has memory again, and what the servers have."""
    parameter = model.get_parameter(name)
    whole = nn.Parameter(table.whole(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]
