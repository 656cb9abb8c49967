"""Rows of a table that a minibatch has looked up, and those that the next ones will.

A table on the worker: what a module looks up is fetched row by row, and only rows that were looked up are pushed.
"""

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
from counterpoint.ps.job_config import Asp, Bsp
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.session import PendingResult, PullResult, PushResult, Session, Versions
from counterpoint.ps.update_rules import Initializer, UpdateRule


@dataclass(slots=True)
class RowAccess:
    """Rows that have been looked up.

    Attributes:
        rows: their numbers, ascending.
        leaf: what they were, and zeros behind them where the padding row was among them.
        is_complete: whether their gradient has come.
        bags: of which the leaf is the sums; None where it is the rows.
    """

    rows: Tensor
    leaf: Tensor
    is_complete: bool = False
    pooled: PooledLookup | None = None


@dataclass(slots=True)
class PrefetchedRows:
    """Rows that are fetched before they are looked up.

    Attributes:
        wanted: what will be looked up.
        early: the answer that is under way, to all rows; None if there is none before the push that is still to come.
        late: places of rows that are to be asked for after that push, or have been.
        newer: the answer to these, under way.
        bags: whose sums are fetched instead of the rows.
    """

    unique: UniqueRows
    early_pull: PendingResult[PullResult] | None = None
    late_positions: Tensor | None = None
    late_pull: PendingResult[PullResult] | None = None
    pooled: PooledLookup | None = None

    def matches(self, rows: Tensor, pooled: PooledLookup | None) -> bool:
        """Tell whether this is what is looked up."""
        is_same = self.pooled is None if pooled is None else pooled.equals(self.pooled)
        return is_same and (self.unique.rows is rows or torch.equal(self.unique.rows, rows))


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a table is kept.

    Args:
        start: how rows begin that nobody has pushed; the module's own weight is not looked at.
        rule: what a push does to rows; that of the optimizer, if not given.
        indices: from the inputs of the model to what will be looked up, for fetching ahead; found out, if not given,
            where an input itself is looked up.
    """

    initializer: Initializer
    rule: UpdateRule | None = None
    lookup_indices: Callable[..., Tensor] | None = None


class RemoteEmbedding:
    """A table's modules, and what they have looked up.

    Args:
        session: the way to the servers.
        key: the table's name.
        modules: of torch, which share it.
        rule: what a push does to rows.
        table: how rows begin.
        moment: what is being computed, kept up to date by whoever computes.
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
        """The modules are torch's own again."""
        for module in self.modules:
            del module.forward

    def begin_minibatch(self, inputs: Sequence[Tensor]) -> None:
        """A minibatch begins."""
        self.accesses, self._inputs = [], inputs
        self.is_pushed = False

    def look_up(self, module: nn.Embedding, indices: Tensor) -> Tensor:
        """Return rows, as the module would."""
        wanted = self._find_unique_rows(indices)
        leaf, padding = self._fetch(wanted)
        by_frequency = module.scale_grad_by_freq
        return F.embedding(
            wanted.positions,
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
        """Return what bags of rows come to, as the module would."""
        wanted = self._find_unique_rows(indices)
        if offsets is None and per_sample_weights is None and self.context.is_open:
            bags = self._pooled_lookup(module, wanted)
            if bags is not None:
                return bags.output(self._fetch_pooled(wanted.rows, bags))
        leaf, padding = self._fetch(wanted)
        is_plain = padding is None and per_sample_weights is None and not module.scale_grad_by_freq
        return F.embedding_bag(
            wanted.positions,
            leaf,
            offsets,
            scale_grad_by_freq=module.scale_grad_by_freq,
            mode=module.mode,
            sparse=is_plain and module.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    def _find_unique_rows(self, indices: Tensor) -> UniqueRows:
        """Return the rows that are looked up, each once."""
        self._lookup_known = True
        if self.input_index is None:
            found = [at for at, one in enumerate(self._inputs) if one is indices]
            self.input_index = found[0] if found else None
        for ahead in self._prefetched:
            if ahead.unique.indices is indices:
                return ahead.unique
        return find_unique_rows(self.key, indices, self.num_rows, self.padding)

    def _pooled_lookup(self, module: nn.EmbeddingBag, wanted: UniqueRows) -> PooledLookup | None:
        """Return the bags whose sums are fetched; None where rows are."""
        is_known, self._pooling_module = module is self._pooling_module, module
        for ahead in self._prefetched if is_known else ():
            if ahead.unique is wanted:
                return ahead.pooled
        return make_pooled_lookup(wanted, module, self.session.job.num_shards)

    def _fetch_pooled(self, rows: Tensor, pooled: PooledLookup) -> Tensor:
        """Return sums of what is looked up as a tensor that gets a gradient."""
        for touch in self.accesses:
            if pooled.equals(touch.pooled) and torch.equal(touch.rows, rows):
                return touch.leaf
        return self._make_leaf(rows, self._pull_values(rows, pooled), pooled)

    def _fetch(self, wanted: UniqueRows) -> tuple[Tensor, int | None]:
        """Return what is looked up as a tensor that gets a gradient, and where in it padding is."""
        padding = len(wanted.rows) if wanted.has_padding else None
        num_rows = len(wanted.rows) + wanted.has_padding
        for touch in self.accesses:
            if touch.pooled is None and len(touch.leaf) == num_rows and torch.equal(touch.rows, wanted.rows):
                return touch.leaf, padding
        values = self._pull_values(wanted.rows)
        leaf = torch.cat([values, values.new_zeros(1, self.width)]) if wanted.has_padding else values
        if self.context.is_open:
            self._make_leaf(wanted.rows, leaf)
            leaf.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        return leaf, padding

    def _make_leaf(self, rows: Tensor, leaf: Tensor, pooled: PooledLookup | None = None) -> Tensor:
        """What was fetched gets a gradient; sums are pushed when the minibatch is over, with whatever else is then."""
        if self.is_pushed:
            raise DataError(
                f"{self.key} was looked up after its gradient had been pushed; a forward that is computed again "
                "in the backward must look up the same rows"
            )
        self.accesses.append(RowAccess(rows, leaf.requires_grad_(), pooled=pooled))
        return leaf

    def _pull_values(self, rows: Tensor, pooled: PooledLookup | None = None) -> Tensor:
        ahead = self._take_prefetched(rows, pooled) if self.context.is_open else None
        if ahead is None:
            return self._note_version(
                self._pull(rows, pooled, min_versions=self.context.step, is_open=self.context.is_open).wait()
            )
        self._pull_late(ahead)
        newer = ahead.late_pull
        if ahead.early_pull is None:
            return self._note_version((newer or self._pull(rows, pooled, min_versions=0, is_open=False)).wait())
        values = self._note_version(ahead.early_pull.wait())
        if newer is not None and ahead.late_positions is not None:
            values[ahead.late_positions] = self._note_version(newer.wait())
        return values

    def _take_prefetched(self, rows: Tensor, pooled: PooledLookup | None) -> PrefetchedRows | None:
        """Return what was fetched ahead of this look-up, if it was, and do away with it and what came before it."""
        for at, ahead in enumerate(self._prefetched):
            if ahead.matches(rows, pooled):
                for _ in range(at + 1):
                    self._prefetched.popleft()
                return ahead
        return None

    def _note_version(self, pulls: PullResult) -> Tensor:
        if self.context.is_open:
            versions = pulls.versions
            self.read_versions = tuple(map(min, self.read_versions, versions)) if self.read_versions else versions
        return pulls.values

    def prefetch(self, inputs: Sequence[Tensor], *, next_step: int) -> None:
        """What a minibatch to come will look up is on its way, if that is known; once, however often it is said.

        Rows that this worker is about to push are asked for behind that push, so that nothing changes but the time;
        before it, if weights are fetched ahead.

        Args:
            inputs: of the minibatch; of the next one, or of that behind what is expected already.
            following: the step that it belongs to; 0 where there are no steps.
        """
        indices = self._next_indices(inputs)
        if indices is None or any(equal_tensors(ahead.unique.indices, indices) for ahead in self._prefetched):
            return
        # with what comes now: that of the minibatches that are begun ahead, and of this one until it has looked it up
        while len(self._prefetched) >= max(1, self.context.pull_ahead) + (not self.accesses):
            self._prefetched.popleft()
        ahead = PrefetchedRows(find_unique_rows(self.key, indices, self.num_rows, self.padding))
        wanted = ahead.unique
        self._prefetched.append(ahead)
        consistency = self.session.job.consistency
        if self._pooling_module is not None:
            ahead.pooled = make_pooled_lookup(wanted, self._pooling_module, self.session.job.num_shards)
        if self._pulls_with_push(ahead):
            pass
        elif not self.context.is_last_minibatch or self.context.pull_ahead or isinstance(consistency, Bsp):
            ahead.early_pull = self._pull(wanted.rows, ahead.pooled, min_versions=next_step, is_open=True)
        elif ahead.pooled is not None:
            pass  # a sum of which a row is about to be pushed is another one then: all are asked for behind that push
        elif isinstance(consistency, Asp):
            ahead.early_pull = self.session.pull(self.key, rows=wanted.rows)
            ahead.late_positions = positions_in(wanted.rows, self._accessed_rows())
        else:
            ahead.late_positions = torch.arange(len(wanted.rows))

    def _pulls_with_push(self, ahead: PrefetchedRows) -> bool:
        """Tell whether sums are asked for when a minibatch is over, in the letter of its push and before it.

        There is a whole minibatch left then until they are looked up; a letter of their own is more work on both sides.
        """
        return ahead.pooled is not None and self.context.pull_ahead > 1 and self.context.is_last_minibatch

    def _next_indices(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Return what a minibatch will look up; None before it is known how the model does that."""
        if not self._lookup_known:
            return None
        if self.config.lookup_indices is not None:
            return self.config.lookup_indices(*inputs)
        return inputs[self.input_index] if self.input_index is not None and self.input_index < len(inputs) else None

    def _accessed_rows(self) -> Tensor:
        """Return the rows that the push to come will have, ascending and each once."""
        found = [*(touch.rows for touch in self.accesses), *(rows for rows, _, _ in self._accumulated)]
        return found[0] if len(found) == 1 else torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *found]))

    def _pull_late(self, ahead: PrefetchedRows) -> None:
        if ahead.late_pull is not None:
            return
        if ahead.pooled is not None and ahead.early_pull is None:
            ahead.late_pull = self._pull(ahead.unique.rows, ahead.pooled, min_versions=0, is_open=False)
        elif ahead.late_positions is not None and len(ahead.late_positions):
            ahead.late_pull = self.session.pull(self.key, rows=ahead.unique.rows[ahead.late_positions])

    def _pull(
        self, rows: Tensor, pooled: PooledLookup | None, *, min_versions: int, is_open: bool
    ) -> PendingResult[PullResult]:
        """Ask for rows, or their sums; of a step that is computed, under bsp, as they were in it."""
        is_exact = is_open and isinstance(self.session.job.consistency, Bsp)
        sums = None if pooled is None else pooled.pull_pooling
        return self.session.pull(self.key, rows=rows, min_versions=min_versions, exact_version=is_exact, pooling=sums)

    def _on_gradient(self, leaf: Tensor) -> None:
        for touch in self.accesses:  # the leaf holds this hook, so the hook does not hold the leaf
            touch.is_complete = touch.is_complete or touch.leaf is leaf
        if self.context.is_open and self.context.is_last_minibatch and all(one.is_complete for one in self.accesses):
            self.add_gradient()

    def add_gradient(self) -> None:
        """The gradient of this minibatch is here: it is added to the portion's, and pushed with the last one."""
        if self.is_pushed:
            return
        for touch in self.accesses:
            if touch.leaf.grad is not None:
                gradient = densify_gradient(touch.leaf.grad)
                gradient = gradient[: len(touch.rows)] if touch.pooled is None else gradient
                self._accumulated.append((touch.rows, gradient, touch.pooled))
                touch.leaf.grad = None
        if self.context.is_last_minibatch:
            self.push()
            self.is_pushed = True
        else:
            self.accesses = []

    def push(self) -> None:
        """The rows that a portion has looked up are on their way; under asp only if there are any."""
        rows, values, sums = self._total_gradient()
        read, self._accumulated, self.read_versions = self.read_versions, [], ()
        consistency = self.session.job.consistency
        if isinstance(consistency, Bsp):
            read = read or (self.context.step,) * self.session.job.num_shards
        while len(self._pending_pushes) >= MAX_PENDING_PUSHES + self.context.pull_ahead:
            self._pending_pushes.popleft().wait()
        with self.session.batch():
            for ahead in self._prefetched if self.context.pull_ahead > 1 else ():
                self._pull_late(ahead)
            if len(rows) or not isinstance(consistency, Asp):
                portion = self.context.slice_index
                push = self.session.push(
                    self.key, values, slice_index=portion, read_versions=read or None, rows=rows, pooling=sums
                )
                self._pending_pushes.append(push)
            for ahead in self._prefetched:
                self._pull_late(ahead)

    def _total_gradient(self) -> tuple[Tensor, Tensor, RowPooling | None]:
        """Return rows, their gradients, and of which sums if there is one look-up alone."""
        if len(self._accumulated) == 1 and (bags := self._accumulated[0][2]) is not None:
            return self._accumulated[0][0], self._accumulated[0][1], bags.push_pooling
        whole = [(rows, one if bags is None else bags.push_pooling.pool(one)) for rows, one, bags in self._accumulated]
        return *merge_row_gradients(whole, self.width, self.dtype), None

    def discard(self) -> None:
        """Nothing is left of a portion that was begun."""
        self._accumulated, self.read_versions = [], ()
        self._prefetched.clear()
        self.begin_minibatch(())

    def invalidate(self) -> None:
        """What was fetched ahead is too old to be used."""
        self._prefetched.clear()

    def flush(self) -> None:
        """Every push has been answered."""
        while self._pending_pushes:
            self._pending_pushes.popleft().wait()

    def pull_all_rows(self, rows_per_pull: int = 1 << 16) -> Tensor:
        """Return all rows as they are now, ``(num_rows, width)``; zeros for the padding row."""
        found = torch.empty(self.num_rows, self.width, dtype=self.dtype)
        for low in range(0, self.num_rows, rows_per_pull):
            rows = torch.arange(low, min(low + rows_per_pull, self.num_rows))
            found[rows] = self.session.pull(self.key, rows=rows).wait().values
        if self.padding is not None:
            found[self.padding] = 0
        return found


def equal_tensors(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal, or even one."""
    return one is other or torch.equal(one, other)
