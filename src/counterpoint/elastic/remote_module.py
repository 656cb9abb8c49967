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

from counterpoint.elastic.optimizer_rules import OptimizerFactory, rules_from_optimizer
from counterpoint.elastic.parameter_keys import (
    OWN_KEY_BYTES,
    agree_on_keys,
    check_no_running_stats,
    coalesce_small_keys,
    dense_keys,
    find_table_modules,
    zero_copy_keys,
)
from counterpoint.elastic.remote_embedding import EmbeddingConfig, RemoteEmbedding
from counterpoint.elastic.remote_parameters import RemoteParameters
from counterpoint.elastic.sync_policy import StepContext, SyncPolicy, find_step
from counterpoint.errors import DataError, PlanError
from counterpoint.ps.key_partitioning import validate_codec
from counterpoint.ps.session import Session
from counterpoint.ps.update_rules import Initializer

UnusedPolicy = Literal["error", "zero"]

MIN_PUSH_BYTES = 1 << 18
"""So much of gradients that are ready leaves while others are still computed; less waits for them."""
NO_LIMIT = 1 << 62
KEY_BYTES = 1 << 16
"""Up to so many, the weights of neighbouring modules are one key: a message costs more than they do."""


class RemoteModule:
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
        optimizer: optim.Optimizer | OptimizerFactory,
        *,
        tables: Mapping[str, EmbeddingConfig | Initializer] | None = None,
        sync: SyncPolicy | None = None,
        codec: str = "",
        unused: UnusedPolicy = "error",
        buffers: Literal["error", "own"] = "error",
        overlap: bool = True,
        key_bytes: int = KEY_BYTES,
    ) -> None:
        self.model, self.session, self.sync = model, session, sync or SyncPolicy()
        self.unused, self.overlap = unused, overlap
        self.context = StepContext(pull_ahead=self.sync.pull_ahead)
        consistency = session.job.consistency
        self.sync.check_consistency(consistency)
        if codec:
            validate_codec(codec)
        if buffers == "error":
            check_no_running_stats(model)
        wanted = {
            name: one if isinstance(one, EmbeddingConfig) else EmbeddingConfig(one)
            for name, one in (tables or {}).items()
        }
        homes = find_table_modules(model, wanted)
        for modules in homes.values():
            move_to_meta(modules[0].get_parameter("weight"))
        rules = rules_from_optimizer(optimizer, model, [name for name, table in wanted.items() if table.rule is None])
        self.rules = {**rules, **{name: one.rule for name, one in wanted.items() if one.rule is not None}}
        self.tables: dict[str, RemoteEmbedding] = {}
        for name, modules in homes.items():
            if name not in self.rules:
                raise PlanError(f"table {name} is not in the optimizer; add it, or say Table(rule=...)")
            self.tables[name] = RemoteEmbedding(session, name, modules, self.rules[name], wanted[name], self.context)
        alone_bytes = NO_LIMIT if codec else OWN_KEY_BYTES
        units = dense_keys(model, self.rules, excluded=set(self.tables), own_key_bytes=alone_bytes)
        units = agree_on_keys(session, coalesce_small_keys(units, 0 if codec else key_bytes), codec)
        held = zero_copy_keys(unit for unit in units if unit.is_trained)
        self.weights = [
            RemoteParameters(session, unit.key, unit.parameters, unit.rule, codec=codec, zero_copy=unit.key in held)
            for unit in units
            if unit.is_trained
        ]
        self._ready_keys: list[RemoteParameters] = []
        self.frozen = [
            RemoteParameters(session, unit.key, unit.parameters, unit.rule) for unit in units if not unit.is_trained
        ]
        self._since_pull = 0
        self._modules_of_key = {unit.key: unit.module_paths for unit in units}
        self._called_layers: list[str] | None = None
        self._has_layer_order = False
        self._is_evaluating = False
        self._lazy_keys: dict[str, list[RemoteParameters]] = {}
        self._eager_keys = list(self.weights)
        self._hooks = list(self._register_hooks())
        for one in self.frozen:
            one.refresh()
            one.detach_copy()

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        yield self.model.register_forward_pre_hook(lambda *_: self._on_forward())
        for path, module in self.model.named_modules():
            if path:
                yield module.register_forward_pre_hook(lambda *_, path=path: self._on_layer_forward(path))
        for one in self.weights:
            for part in one.parameters:
                hook = partial(self._on_gradient, one)
                yield part.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_minibatch(self, slice_index: int, inputs: Sequence[Any] = (), *, is_last_minibatch: bool = True) -> None:
        """A minibatch begins.

        Args:
            portion: of the whole run, that it belongs to.
            inputs: that the model is going to be called with.
            is_last: whether it is the portion's last minibatch.
        """
        moment = self.context
        moment.slice_index, moment.is_last_minibatch, moment.is_open = slice_index, is_last_minibatch, True
        moment.step, moment.next_step = find_step(self.session.job.consistency, slice_index)
        self._since_pull += 1
        moment.pulls_next = is_last_minibatch if moment.next_step else self._since_pull >= self.sync.pull_every
        self._ready_keys.clear()
        for one in self.weights:
            one.begin_minibatch()
        for table in self.tables.values():
            table.begin_minibatch(inputs)

    def _on_forward(self) -> None:
        """A forward begins: what cannot wait for its own layer is waited for."""
        if not self.context.is_open or self._is_evaluating:
            return
        is_lazy = self._has_layer_order and self.model.training
        for one in self._eager_keys if is_lazy else self.weights:
            one.wait_fresh(self.context)
        if self._called_layers is None:
            self._called_layers = []

    def _on_layer_forward(self, path: str) -> None:
        if not self.context.is_open or self._is_evaluating:
            return
        for one in self._lazy_keys.get(path, ()):
            one.wait_fresh(self.context)
        if not self._has_layer_order and self._called_layers is not None:
            self._called_layers.append(path)

    def _learn_layer_order(self) -> None:
        """Weights all of whose modules were called wait for the first of them; the others for the whole model."""
        if self._has_layer_order or not self._called_layers or not self.overlap:
            return
        self._has_layer_order = True
        called, self._eager_keys = set(self._called_layers), []
        for one in self.weights:
            owners = self._modules_of_key[one.key]
            if "" in owners or not owners <= called:
                self._eager_keys.append(one)
                continue
            for path in owners:
                self._lazy_keys.setdefault(path, []).append(one)

    def _on_gradient(self, one: RemoteParameters, _: Tensor) -> None:
        if not self.context.is_open or one.is_complete or one.missing_gradients or one in self._ready_keys:
            return
        self._ready_keys.append(one)
        if sum(each.flat.nbytes for each in self._ready_keys) >= MIN_PUSH_BYTES:
            self._push_ready()

    def _push_ready(self) -> None:
        """What is ready leaves, in one go."""
        with self.session.batch():
            for one in self._ready_keys:
                one.add_gradient(self.context, self.sync.local_lr)
        self._ready_keys.clear()

    def prefetch(self, inputs: Sequence[Any], slice_index: int) -> None:
        """Rows that a minibatch to come looks up are on their way, if it can be told which.

        It is said after the forward of the one before it; where weights are fetched ahead, of each of so many
        minibatches in their order, and before the forward already, for more time.

        Args:
            inputs: of the minibatch.
            portion: that it belongs to.
        """
        step, _ = find_step(self.session.job.consistency, slice_index)
        for table in self.tables.values():
            table.prefetch(inputs, next_step=step)

    def finish_minibatch(self, *, is_skipped: bool = False) -> None:
        """A minibatch is over: what is left of its gradient is added or pushed, too.

        Args:
            is_skipped: whether there was no backward, and zeros are meant.

        Raises:
            DataError: a parameter has no gradient.
        """
        missing = [one for one in self.weights if not one.is_complete and one.missing_gradients]
        if missing and self.unused == "error" and not is_skipped:
            raise DataError(
                f"{missing[0].missing_gradients[0]} got no gradient from portion {self.context.slice_index}; leave it out of the "
                "optimizer, mend the model, or give unused='zero'"
            )
        for one in missing:
            one.is_fresh = True
        self._ready_keys[:] = [one for one in self.weights if not one.is_complete]
        with self.session.batch():
            self._push_ready()
            for table in self.tables.values():
                table.add_gradient()
        if self.sync.local_lr:
            for one in self.weights:
                one.apply_local_step(self.sync.local_lr)
        if self.context.pulls_next:
            self._since_pull = 0
        self.context.is_open = False
        self._learn_layer_order()

    def push_zeros(self, slice_index: int) -> None:
        """A portion without samples is pushed as zeros."""
        self.begin_minibatch(slice_index)
        for one in self.weights:
            one.wait_fresh(self.context)
        for one in self.weights:
            one.add_gradient(self.context)
        for table in self.tables.values():
            table.add_gradient()
        self.context.is_open = False

    def _all_remote(self) -> Iterator[RemoteParameters | RemoteEmbedding]:
        yield from self.weights
        yield from self.tables.values()

    def discard(self) -> None:
        """Nothing is left of a portion that was begun, but what has been pushed of it."""
        self.context.is_open = False
        for one in self._all_remote():
            one.discard()

    def invalidate(self) -> None:
        """What has been fetched is too old to be used, as it is after :meth:`Session.join_clock`."""
        for one in self._all_remote():
            one.invalidate()

    def flush(self) -> None:
        """Every push has been answered."""
        for one in self._all_remote():
            one.flush()

    @contextmanager
    def latest_weights(self) -> Iterator[nn.Module]:
        """The model has the newest weights, to be measured; nothing is pushed."""
        self.flush()
        for one in self.weights:
            one.refresh()
        self._is_evaluating, self.context.step = True, 0
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self._is_evaluating = False

    def export_weights(self, *, tables: bool = False) -> nn.Module:
        """The model is as before, without hooks and with the newest weights; returns it.

        Args:
            tables: whether tables are fetched as a whole, too; else their weights stay on the ``meta`` device.
        """
        self.flush()
        for one in self.weights:
            one.refresh()
            one.detach_copy()
        self.close()
        for name, table in self.tables.items() if tables else ():
            restore_table(self.model, name, table)
        return self.model

    def close(self) -> None:
        """The model calls nothing of this any more."""
        for hook in self._hooks:
            hook.remove()
        for table in self.tables.values() if self._hooks else ():
            table.restore_modules()
        self._hooks = []


def move_to_meta(parameter: nn.Parameter) -> None:
    """The parameter has its shape, but no memory."""
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, bare)  # type: ignore[no-untyped-call]


def restore_table(model: nn.Module, name: str, table: RemoteEmbedding) -> None:
    """The weight of a table has memory again, and what the servers have."""
    parameter = model.get_parameter(name)
    whole = nn.Parameter(table.pull_all_rows(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]
