"""Embedding modules whose table is on servers: pull the rows of a lookup, push the gradients of those rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoint.elastic.remote_parameters import MAX_PENDING_PUSHES
from counterpoint.elastic.row_ids import (
    PooledLookup,
    UniqueRows,
    densify_gradient,
    find_unique_rows,
    make_pooled_lookup,
    merge_row_gradients,
    positions_in,
    validate_table_module,
)
from counterpoint.elastic.sync_policy import StepContext
from counterpoint.errors import DataError
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.session import PendingResult, PullResult, PushResult, Session, Versions
from counterpoint.ps.update_rules import Initializer, UpdateRule


@dataclass(slots=True)
class RowAccess:
    """Rows that the current minibatch has looked up.

    Attributes:
        rows: ids, ascending.
        leaf: their values as an autograd leaf; a row of zeros follows if padding was looked up.
        is_complete: whether the leaf has its gradient.
        pooled: lookup whose sums the leaf holds; None if it holds rows.
    """

    rows: Tensor
    leaf: Tensor
    is_complete: bool = False
    pooled: PooledLookup | None = None


@dataclass(slots=True)
class PrefetchedRows:
    """Rows pulled before they are looked up.

    Attributes:
        unique: rows of the coming lookup.
        early_pull: pull of all rows; None if none can be sent before the push of the current minibatch.
        late_positions: positions of rows to pull after that push.
        late_pull: pull of these.
        pooled: lookup whose sums are pulled instead of the rows.
    """

    unique: UniqueRows
    early_pull: PendingResult[PullResult] | None = None
    late_positions: Tensor | None = None
    late_pull: PendingResult[PullResult] | None = None
    pooled: PooledLookup | None = None

    def matches(self, rows: Tensor, pooled: PooledLookup | None) -> bool:
        """Tell whether this is the lookup that was prefetched."""
        is_same = self.pooled is None if pooled is None else pooled.equals(self.pooled)
        return is_same and (self.unique.rows is rows or torch.equal(self.unique.rows, rows))


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How an embedding table is held by servers.

    Args:
        initializer: of rows that were never pushed; the module's own weight is not used.
        rule: update rule of the rows; by default that of the optimizer.
        lookup_indices: from the inputs of the model to the indices it will look up, for prefetching; detected by
            default if an input itself is looked up.
    """

    initializer: Initializer
    rule: UpdateRule | None = None
    lookup_indices: Callable[..., Tensor] | None = None


class RemoteEmbedding:
    """A table on servers, and the modules that look it up.

    Args:
        session: of the worker.
        key: name of the table.
        modules: embedding modules that share it.
        rule: update rule of its rows.
        config: how it is held.
        context: what is being computed, updated by the owner.
    """

    def __init__(
        self,
        session: Session,
        key: str,
        modules: Sequence[nn.Module],
        rule: UpdateRule,
        config: EmbeddingConfig,
        context: StepContext,
    ) -> None:
        self.session, self.key, self.modules, self.config, self.context = session, key, modules, config, context
        first = modules[0]
        validate_table_module(key, first)
        self.num_rows, self.width = int(first.num_embeddings), int(first.embedding_dim)  # type: ignore[arg-type]
        self.padding: int | None = first.padding_idx  # type: ignore[assignment]
        self.dtype: torch.dtype = first.get_parameter("weight").dtype
        session.init_rows(key, self.num_rows, self.width, self.dtype, rule, config.initializer)
        self.accesses: list[RowAccess] = []
        self.read_versions: Versions = ()
        self.is_pushed = False
        self.input_index: int | None = None
        self._lookup_known = False  # how the field is looked up
        self._pooling_module: nn.EmbeddingBag | None = None  # the module that does so as sums
        self._prefetched: deque[PrefetchedRows] = deque()
        self._inputs: Sequence[Tensor] = ()
        self._accumulated: list[tuple[Tensor, Tensor, PooledLookup | None]] = []
        self._pending_pushes: deque[PendingResult[PushResult]] = deque()
        for module in modules:
            if isinstance(module, nn.EmbeddingBag):
                module.forward = partial(self.look_up_bags, module)  # type: ignore[method-assign]
            elif isinstance(module, nn.Embedding):
                module.forward = partial(self.look_up, module)  # type: ignore[method-assign]

    def restore_modules(self) -> None:
        """Restore the original forward of the modules."""
        for module in self.modules:
            del module.forward

    def begin_minibatch(self, inputs: Sequence[Tensor]) -> None:
        """Start a minibatch with these model inputs."""
        self.accesses, self._inputs = [], inputs
        self.is_pushed = False

    def look_up(self, module: nn.Embedding, indices: Tensor) -> Tensor:
        """Return the output of an ``nn.Embedding``."""
        unique = self._find_unique_rows(indices)
        leaf, padding = self._fetch(unique)
        by_frequency = module.scale_grad_by_freq
        return F.embedding(
            unique.positions,
            leaf,
            padding,
            scale_grad_by_freq=by_frequency,
            sparse=padding is None and not by_frequency,
        )

    def look_up_bags(
        self,
        module: nn.EmbeddingBag,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the output of an ``nn.EmbeddingBag``."""
        unique = self._find_unique_rows(indices)
        if offsets is None and per_sample_weights is None and self.context.is_open:
            pooled = self._pooled_lookup(module, unique)
            if pooled is not None:
                return pooled.output(self._fetch_pooled(unique.rows, pooled))
        leaf, padding = self._fetch(unique)
        is_unmodified = padding is None and per_sample_weights is None and not module.scale_grad_by_freq
        return F.embedding_bag(
            unique.positions,
            leaf,
            offsets,
            scale_grad_by_freq=module.scale_grad_by_freq,
            mode=module.mode,
            sparse=is_unmodified and module.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    def _find_unique_rows(self, indices: Tensor) -> UniqueRows:
        """Return the distinct rows of a lookup, and detect which input is looked up."""
        self._lookup_known = True
        if self.input_index is None:
            matching_inputs = [index for index, tensor in enumerate(self._inputs) if tensor is indices]
            self.input_index = matching_inputs[0] if matching_inputs else None
        for prefetched in self._prefetched:
            if prefetched.unique.indices is indices:
                return prefetched.unique
        return find_unique_rows(self.key, indices, self.num_rows, self.padding)

    def _pooled_lookup(self, module: nn.EmbeddingBag, unique: UniqueRows) -> PooledLookup | None:
        """Return the pooled lookup; None if rows are fetched."""
        is_known, self._pooling_module = module is self._pooling_module, module
        for prefetched in self._prefetched if is_known else ():
            if prefetched.unique is unique:
                return prefetched.pooled
        return make_pooled_lookup(unique, module, self.session.job.num_shards)

    def _fetch_pooled(self, rows: Tensor, pooled: PooledLookup) -> Tensor:
        """Return pooled rows as an autograd leaf."""
        for access in self.accesses:
            if pooled.equals(access.pooled) and torch.equal(access.rows, rows):
                return access.leaf
        return self._make_leaf(rows, self._pull_values(rows, pooled), pooled)

    def _fetch(self, unique: UniqueRows) -> tuple[Tensor, int | None]:
        """Return rows as an autograd leaf, and the position of the padding row in it."""
        padding = len(unique.rows) if unique.has_padding else None
        num_rows = len(unique.rows) + unique.has_padding
        for access in self.accesses:
            if access.pooled is None and len(access.leaf) == num_rows and torch.equal(access.rows, unique.rows):
                return access.leaf, padding
        values = self._pull_values(unique.rows)
        leaf = torch.cat([values, values.new_zeros(1, self.width)]) if unique.has_padding else values
        if self.context.is_open:
            self._make_leaf(unique.rows, leaf)
            leaf.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        return leaf, padding

    def _make_leaf(self, rows: Tensor, leaf: Tensor, pooled: PooledLookup | None = None) -> Tensor:
        """Register a pulled tensor as a leaf; pooled ones are pushed when the minibatch ends."""
        if self.is_pushed:
            raise DataError(
                f"{self.key} was looked up after its gradient had been pushed; a forward that is recomputed in the "
                "backward must look up the same rows"
            )
        self.accesses.append(RowAccess(rows, leaf.requires_grad_(), pooled=pooled))
        return leaf

    def _pull_values(self, rows: Tensor, pooled: PooledLookup | None = None) -> Tensor:
        prefetched = self._take_prefetched(rows, pooled) if self.context.is_open else None
        if prefetched is None:
            return self._note_version(
                self._pull(rows, pooled, min_versions=self.context.step, is_open=self.context.is_open).wait()
            )
        self._pull_late(prefetched)
        late_pull = prefetched.late_pull
        if prefetched.early_pull is None:
            return self._note_version((late_pull or self._pull(rows, pooled, min_versions=0, is_open=False)).wait())
        values = self._note_version(prefetched.early_pull.wait())
        if late_pull is not None and prefetched.late_positions is not None:
            values[prefetched.late_positions] = self._note_version(late_pull.wait())
        return values

    def _take_prefetched(self, rows: Tensor, pooled: PooledLookup | None) -> PrefetchedRows | None:
        """Return the prefetched rows of this lookup, if any; drop them and all earlier ones."""
        for index, prefetched in enumerate(self._prefetched):
            if prefetched.matches(rows, pooled):
                for _ in range(index + 1):
                    self._prefetched.popleft()
                return prefetched
        return None

    def _note_version(self, result: PullResult) -> Tensor:
        if self.context.is_open:
            versions = result.versions
            self.read_versions = tuple(map(min, self.read_versions, versions)) if self.read_versions else versions
        return result.values

    def prefetch(self, inputs: Sequence[Tensor], *, next_step: int) -> None:
        """Pull what a coming minibatch will look up, if that is known; repeated calls have no effect.

        Rows that are about to be pushed are pulled after that push, so that only the timing changes; with
        ``pull_ahead`` they are pulled before it.

        Args:
            inputs: of the next minibatch, or of the one after those that are prefetched already.
            next_step: step that it belongs to; 0 if there are no steps.
        """
        indices = self._next_indices(inputs)
        if indices is None or any(equal_tensors(prefetched.unique.indices, indices) for prefetched in self._prefetched):
            return
        # with what comes now: that of the minibatches that are begun ahead, and of this one until it has looked it up
        while len(self._prefetched) >= max(1, self.context.pull_ahead) + (not self.accesses):
            self._prefetched.popleft()
        prefetched = PrefetchedRows(find_unique_rows(self.key, indices, self.num_rows, self.padding))
        unique = prefetched.unique
        self._prefetched.append(prefetched)
        consistency = self.session.job.consistency
        if self._pooling_module is not None:
            prefetched.pooled = make_pooled_lookup(unique, self._pooling_module, self.session.job.num_shards)
        if self._pulls_with_push(prefetched):
            pass
        elif not self.context.is_last_minibatch or self.context.pull_ahead or isinstance(consistency, Bsp):
            prefetched.early_pull = self._pull(unique.rows, prefetched.pooled, min_versions=next_step, is_open=True)
        elif prefetched.pooled is not None:
            pass  # pooled rows are all pulled after the push, which changes sums of pushed rows
        elif isinstance(consistency, Asp):
            prefetched.early_pull = self.session.pull(self.key, rows=unique.rows)
            prefetched.late_positions = positions_in(unique.rows, self._accessed_rows())
        else:
            prefetched.late_positions = torch.arange(len(unique.rows))

    def _pulls_with_push(self, prefetched: PrefetchedRows) -> bool:
        """Tell whether pooled rows are pulled together with the push at the end of the minibatch.

        There is a whole minibatch left until they are looked up, and a separate message costs more on both sides.
        """
        return prefetched.pooled is not None and self.context.pull_ahead > 1 and self.context.is_last_minibatch

    def _next_indices(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Return what a minibatch will look up; None before that is known."""
        if not self._lookup_known:
            return None
        if self.config.lookup_indices is not None:
            return self.config.lookup_indices(*inputs)
        return inputs[self.input_index] if self.input_index is not None and self.input_index < len(inputs) else None

    def _accessed_rows(self) -> Tensor:
        """Return the rows that the coming push will contain, ascending."""
        row_sets = [*(access.rows for access in self.accesses), *(rows for rows, _, _ in self._accumulated)]
        return (
            row_sets[0]
            if len(row_sets) == 1
            else torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *row_sets]))
        )

    def _pull_late(self, prefetched: PrefetchedRows) -> None:
        if prefetched.late_pull is not None:
            return
        if prefetched.pooled is not None and prefetched.early_pull is None:
            prefetched.late_pull = self._pull(prefetched.unique.rows, prefetched.pooled, min_versions=0, is_open=False)
        elif prefetched.late_positions is not None and len(prefetched.late_positions):
            prefetched.late_pull = self.session.pull(self.key, rows=prefetched.unique.rows[prefetched.late_positions])

    def _pull(
        self, rows: Tensor, pooled: PooledLookup | None, *, min_versions: int, is_open: bool
    ) -> PendingResult[PullResult]:
        """Pull rows, or their sums; under bsp, those of a step as of that step."""
        is_exact = is_open and isinstance(self.session.job.consistency, Bsp)
        pooling = None if pooled is None else pooled.pull_pooling
        return self.session.pull(
            self.key, rows=rows, min_versions=min_versions, exact_version=is_exact, pooling=pooling
        )

    def _on_gradient(self, leaf: Tensor) -> None:
        for access in self.accesses:  # the leaf holds this hook, so the hook does not hold the leaf
            access.is_complete = access.is_complete or access.leaf is leaf
        if (
            self.context.is_open
            and self.context.is_last_minibatch
            and all(access.is_complete for access in self.accesses)
        ):
            self.add_gradient()

    def add_gradient(self) -> None:
        """Add the gradient of this minibatch to that of the slice, and push it after the last minibatch."""
        if self.is_pushed:
            return
        for access in self.accesses:
            if access.leaf.grad is not None:
                gradient = densify_gradient(access.leaf.grad)
                gradient = gradient[: len(access.rows)] if access.pooled is None else gradient
                self._accumulated.append((access.rows, gradient, access.pooled))
                access.leaf.grad = None
        if self.context.is_last_minibatch:
            self.push()
            self.is_pushed = True
        else:
            self.accesses = []

    def push(self) -> None:
        """Push the gradients of the rows of a slice; under asp only if there are any."""
        rows, values, pooling = self._total_gradient()
        read_versions, self._accumulated, self.read_versions = self.read_versions, [], ()
        consistency = self.session.job.consistency
        if isinstance(consistency, Bsp):
            read_versions = read_versions or (self.context.step,) * self.session.job.num_shards
        while len(self._pending_pushes) >= MAX_PENDING_PUSHES + self.context.pull_ahead:
            self._pending_pushes.popleft().wait()
        with self.session.batch():
            for prefetched in self._prefetched if self.context.pull_ahead > 1 else ():
                self._pull_late(prefetched)
            if len(rows) or not isinstance(consistency, Asp):
                slice_index = self.context.slice_index
                push = self.session.push(
                    self.key,
                    values,
                    slice_index=slice_index,
                    read_versions=read_versions or None,
                    rows=rows,
                    pooling=pooling,
                )
                self._pending_pushes.append(push)
            for prefetched in self._prefetched:
                self._pull_late(prefetched)

    def _total_gradient(self) -> tuple[Tensor, Tensor, RowPooling | None]:
        """Return rows and gradients, and their pooling if there is a single pooled lookup."""
        if len(self._accumulated) == 1 and (pooled := self._accumulated[0][2]) is not None:
            return self._accumulated[0][0], self._accumulated[0][1], pooled.push_pooling
        gradients = [
            (rows, gradient if pooled is None else pooled.push_pooling.pool(gradient))
            for rows, gradient, pooled in self._accumulated
        ]
        return *merge_row_gradients(gradients, self.width, self.dtype), None

    def discard(self) -> None:
        """Discard a slice that was begun."""
        self._accumulated, self.read_versions = [], ()
        self._prefetched.clear()
        self.begin_minibatch(())

    def invalidate(self) -> None:
        """Discard prefetched rows, which are too stale."""
        self._prefetched.clear()

    def flush(self) -> None:
        """Wait until every push has been acknowledged."""
        while self._pending_pushes:
            self._pending_pushes.popleft().wait()

    def pull_all_rows(self, rows_per_pull: int = 1 << 16) -> Tensor:
        """Return all current rows, ``(num_rows, width)``; zeros for the padding row."""
        table = torch.empty(self.num_rows, self.width, dtype=self.dtype)
        for low in range(0, self.num_rows, rows_per_pull):
            rows = torch.arange(low, min(low + rows_per_pull, self.num_rows))
            table[rows] = self.session.pull(self.key, rows=rows).wait().values
        if self.padding is not None:
            table[self.padding] = 0
        return table


def equal_tensors(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are identical or equal."""
    return first is second or torch.equal(first, second)
