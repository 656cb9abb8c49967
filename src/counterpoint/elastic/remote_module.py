"""A module whose parameters are on servers: pull weights layer by layer, push gradients as they become ready.

One minibatch: `begin_minibatch`, forward, `prefetch` for the next one, backward, `finish_minibatch`. Pulls that are
started in `finish_minibatch` or before are awaited in the next forward, layer by layer. With ``pull_ahead``, `prefetch`
may also come before the forward.
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
from counterpoint.elastic.sync_policy import StepContext, SyncPolicy
from counterpoint.errors import DataError, PlanError
from counterpoint.optim.validation import renamed_parameters
from counterpoint.ps.consistency import find_step
from counterpoint.ps.key_partitioning import validate_codec
from counterpoint.ps.session import Session
from counterpoint.ps.update_rules import Initializer

UnusedPolicy = Literal["error", "zero"]

MIN_PUSH_BYTES = 1 << 18
"""Ready gradients are sent once there are this many bytes; fewer wait for more."""
NO_LIMIT = 1 << 62
KEY_BYTES = 1 << 16
"""Adjacent modules share a key up to this size, since a message costs more than the copies."""


@renamed_parameters({"codec": "compress", "unused": "unused_parameters"})
class RemoteModule:
    """A worker's replica of a module whose parameters are on servers.

    Args:
        model: any module on the CPU. The first worker's initial weights count; tables have initializers.
        session: of the worker.
        optimizer: of torch, or a factory; its update rule runs on the servers.
        tables: weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` that are held as rows, and their initial values.
            Such a weight is never materialized on the worker, where it is on the ``meta`` device.
        sync_policy: how often the worker pushes and pulls.
        compress: codec of dense pushes, such as ``int8`` or ``topk:0.01``, with error feedback.
        unused_parameters: what a parameter without a gradient means: ``error``, or ``zero`` for a gradient of zeros.
        buffers: what running statistics, which servers do not hold, mean: ``error``, or ``own`` for each worker's own.
        overlap: whether a layer's weights are awaited when its forward begins; else all are awaited at once.
        key_bytes: size up to which adjacent modules share a key; 0 for one key per module. The first worker's value
            counts, also after a restart. A codec needs one key per module.

    Raises:
        PlanError: no server can do what is requested.
    """

    def __init__(  # noqa: PLR0913 - what a worker may choose, most by keyword
        self,
        model: nn.Module,
        session: Session,
        optimizer: optim.Optimizer | OptimizerFactory,
        *,
        tables: Mapping[str, EmbeddingConfig | Initializer] | None = None,
        sync_policy: SyncPolicy | None = None,
        compress: str = "",
        unused_parameters: UnusedPolicy = "error",
        buffers: Literal["error", "own"] = "error",
        overlap: bool = True,
        key_bytes: int = KEY_BYTES,
    ) -> None:
        self.model, self.session, self.sync_policy = model, session, sync_policy or SyncPolicy()
        self.unused_parameters, self.overlap = unused_parameters, overlap
        self.context = StepContext(pull_ahead=self.sync_policy.pull_ahead)
        consistency = session.job.consistency
        self.sync_policy.check_consistency(consistency)
        if compress:
            validate_codec(compress)
        if buffers == "error":
            check_no_running_stats(model)
        self.tables = self._make_tables(optimizer, tables or {})
        own_key_bytes = NO_LIMIT if compress else OWN_KEY_BYTES
        keys = dense_keys(model, self.rules, excluded=set(self.tables), own_key_bytes=own_key_bytes)
        keys = agree_on_keys(session, coalesce_small_keys(keys, 0 if compress else key_bytes), compress)
        zero_copy_names = zero_copy_keys(key for key in keys if key.is_trained)
        self.weights = [
            RemoteParameters(
                session, key.key, key.parameters, key.rule, codec=compress, zero_copy=key.key in zero_copy_names
            )
            for key in keys
            if key.is_trained
        ]
        self._ready_keys: list[RemoteParameters] = []
        self.frozen = [
            RemoteParameters(session, key.key, key.parameters, key.rule) for key in keys if not key.is_trained
        ]
        self._since_pull = 0
        self._modules_of_key = {key.key: key.module_paths for key in keys}
        self._called_layers: list[str] | None = None
        self._has_layer_order = False
        self._is_evaluating = False
        self._lazy_keys: dict[str, list[RemoteParameters]] = {}
        self._eager_keys = list(self.weights)
        self._hooks = list(self._register_hooks())
        for remote in self.frozen:
            remote.refresh()
            remote.detach_copy()

    def _make_tables(
        self,
        optimizer: optim.Optimizer | OptimizerFactory,
        tables: Mapping[str, EmbeddingConfig | Initializer],
    ) -> dict[str, RemoteEmbedding]:
        """Return the tables, and set the update rules of all parameters."""
        configs = {
            name: config if isinstance(config, EmbeddingConfig) else EmbeddingConfig(config)
            for name, config in tables.items()
        }
        modules_of_table = find_table_modules(self.model, configs)
        for modules in modules_of_table.values():
            move_to_meta(modules[0].get_parameter("weight"))
        own_rules = {name: config.rule for name, config in configs.items() if config.rule is not None}
        self.rules = rules_from_optimizer(optimizer, self.model, configs.keys() - own_rules.keys()) | own_rules
        embeddings = {}
        for name, modules in modules_of_table.items():
            if name not in self.rules:
                raise PlanError(f"table {name} is not in the optimizer; add it, or give EmbeddingConfig(rule=...)")
            embeddings[name] = RemoteEmbedding(
                self.session, name, modules, self.rules[name], configs[name], self.context
            )
        return embeddings

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        yield self.model.register_forward_pre_hook(lambda *_: self._on_forward())
        for path, module in self.model.named_modules():
            if path:
                yield module.register_forward_pre_hook(lambda *_, path=path: self._on_layer_forward(path))
        for remote in self.weights:
            for part in remote.parameters:
                hook = partial(self._on_gradient, remote)
                yield part.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_minibatch(self, slice_index: int, inputs: Sequence[Any] = (), *, is_last_minibatch: bool = True) -> None:
        """Start a minibatch.

        Args:
            slice_index: data slice that it belongs to, counted over the whole run.
            inputs: that the model will be called with.
            is_last_minibatch: whether it is the last one of the slice.
        """
        context = self.context
        context.slice_index, context.is_last_minibatch, context.is_open = slice_index, is_last_minibatch, True
        context.step, context.next_step = find_step(self.session.job.consistency, slice_index)
        self._since_pull += 1
        context.pulls_next = is_last_minibatch if context.next_step else self._since_pull >= self.sync_policy.pull_every
        self._ready_keys.clear()
        for remote in self.weights:
            remote.begin_minibatch()
        for table in self.tables.values():
            table.begin_minibatch(inputs)

    def _on_forward(self) -> None:
        """Wait for the weights that are not awaited by their own layer."""
        if not self.context.is_open or self._is_evaluating:
            return
        is_lazy = self._has_layer_order and self.model.training
        for remote in self._eager_keys if is_lazy else self.weights:
            remote.wait_fresh(self.context)
        if self._called_layers is None:
            self._called_layers = []

    def _on_layer_forward(self, path: str) -> None:
        if not self.context.is_open or self._is_evaluating:
            return
        for remote in self._lazy_keys.get(path, ()):
            remote.wait_fresh(self.context)
        if not self._has_layer_order and self._called_layers is not None:
            self._called_layers.append(path)

    def _learn_layer_order(self) -> None:
        """Assign the keys all of whose modules were called to these modules; others wait for the whole model."""
        if self._has_layer_order or not self._called_layers or not self.overlap:
            return
        self._has_layer_order = True
        called, self._eager_keys = set(self._called_layers), []
        for remote in self.weights:
            module_paths = self._modules_of_key[remote.key]
            if "" in module_paths or not module_paths <= called:
                self._eager_keys.append(remote)
                continue
            for path in module_paths:
                self._lazy_keys.setdefault(path, []).append(remote)

    def _on_gradient(self, remote: RemoteParameters, _: Tensor) -> None:
        if not self.context.is_open or remote.is_complete or remote.missing_gradients or remote in self._ready_keys:
            return
        self._ready_keys.append(remote)
        if sum(other.flat.nbytes for other in self._ready_keys) >= MIN_PUSH_BYTES:
            self._push_ready()

    def _push_ready(self) -> None:
        """Push all ready gradients together."""
        with self.session.batch():
            for remote in self._ready_keys:
                remote.add_gradient(self.context, self.sync_policy.local_lr)
        self._ready_keys.clear()

    def prefetch(self, inputs: Sequence[Any], slice_index: int) -> None:
        """Pull the rows that a coming minibatch will look up, if they are known.

        Call it after the forward of the minibatch before; with ``pull_ahead``, for each of that many minibatches in
        order, and before the forward, to gain time.

        Args:
            inputs: of the minibatch.
            slice_index: data slice that it belongs to.
        """
        step, _ = find_step(self.session.job.consistency, slice_index)
        for table in self.tables.values():
            table.prefetch(inputs, next_step=step)

    def finish_minibatch(self, *, is_skipped: bool = False) -> None:
        """Finish a minibatch: accumulate or push the rest of its gradient.

        Args:
            is_skipped: whether there was no backward, and the gradient is zero.

        Raises:
            DataError: a parameter has no gradient.
        """
        missing = [remote for remote in self.weights if not remote.is_complete and remote.missing_gradients]
        if missing and self.unused_parameters == "error" and not is_skipped:
            raise DataError(
                f"{missing[0].missing_gradients[0]} got no gradient from slice {self.context.slice_index}; remove it "
                "from the optimizer, fix the model, or give unused_parameters='zero'"
            )
        for remote in missing:
            remote.is_fresh = True
        self._ready_keys[:] = [remote for remote in self.weights if not remote.is_complete]
        with self.session.batch():
            self._push_ready()
            for table in self.tables.values():
                table.add_gradient()
        if self.sync_policy.local_lr:
            for remote in self.weights:
                remote.apply_local_step(self.sync_policy.local_lr)
        if self.context.pulls_next:
            self._since_pull = 0
        self.context.is_open = False
        self._learn_layer_order()

    def push_zeros(self, slice_index: int) -> None:
        """Push a gradient of zeros for a data slice without samples."""
        self.begin_minibatch(slice_index)
        for remote in self.weights:
            remote.wait_fresh(self.context)
        for remote in self.weights:
            remote.add_gradient(self.context)
        for table in self.tables.values():
            table.add_gradient()
        self.context.is_open = False

    def _all_remote(self) -> Iterator[RemoteParameters | RemoteEmbedding]:
        yield from self.weights
        yield from self.tables.values()

    def discard(self) -> None:
        """Discard a slice that was begun, except what has been pushed."""
        self.context.is_open = False
        for remote in self._all_remote():
            remote.discard()

    def invalidate(self) -> None:
        """Discard all pulled weights and rows: after :meth:`Session.join_clock` they are too stale."""
        for remote in self._all_remote():
            remote.invalidate()

    def flush(self) -> None:
        """Wait until every push has been acknowledged."""
        for remote in self._all_remote():
            remote.flush()

    @contextmanager
    def latest_weights(self) -> Iterator[nn.Module]:
        """Return a context in which the model has the newest weights, for evaluation; nothing is pushed."""
        self.flush()
        for remote in self.weights:
            remote.refresh()
        self._is_evaluating, self.context.step = True, 0
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self._is_evaluating = False

    def export_weights(self, *, tables: bool = False) -> nn.Module:
        """Return the model with the newest weights and without hooks.

        Args:
            tables: whether to pull tables as a whole, too; else their weights stay on the ``meta`` device.
        """
        self.flush()
        for remote in self.weights:
            remote.refresh()
            remote.detach_copy()
        self.close()
        for name, table in self.tables.items() if tables else ():
            restore_table(self.model, name, table)
        return self.model

    def close(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        for table in self.tables.values() if self._hooks else ():
            table.restore_modules()
        self._hooks = []


def move_to_meta(parameter: nn.Parameter) -> None:
    """Replace a parameter by one of the same shape without memory."""
    meta_parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, meta_parameter)  # type: ignore[no-untyped-call]


def restore_table(model: nn.Module, name: str, table: RemoteEmbedding) -> None:
    """Give the weight of a table memory again, with the values of the servers."""
    parameter = model.get_parameter(name)
    weight = nn.Parameter(table.pull_all_rows(), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, weight)  # type: ignore[no-untyped-call]
