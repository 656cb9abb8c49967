"""A table on the worker: what a module looks up is fetched row by row, and only rows that were looked up are pushed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.server.choices import Rule, Start
from counterpoint.server.job import Asp, Bsp
from counterpoint.server.session import Pending, Pulls, Pushes, Session, Versions
from counterpoint.server.sums import Sums
from counterpoint.server.working.bags import Bags, bags_of
from counterpoint.server.working.rhythm import Moment
from counterpoint.server.working.rows import Distinct, among, distinct, merged, require_plain, whole_gradient
from counterpoint.server.working.touches import Ahead, Touch
from counterpoint.server.working.weights import UNDER_WAY


@dataclass(frozen=True, slots=True)
class Table:
    """How a table is kept.

    Args:
        start: how rows begin that nobody has pushed; the module's own weight is not looked at.
        rule: what a push does to rows; that of the optimizer, if not given.
        indices: from the inputs of the model to what will be looked up, for fetching ahead; found out, if not given,
            where an input itself is looked up.
    """

    start: Start
    rule: Rule | None = None
    indices: Callable[..., Tensor] | None = None


class Lookups:
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
        self, session: Session, key: str, modules: Sequence[nn.Module], rule: Rule, table: Table, moment: Moment
    ) -> None:
        self.session, self.key, self.modules, self.table, self.moment = session, key, modules, table, moment
        first = modules[0]
        require_plain(key, first)
        self.num_rows, self.width = int(first.num_embeddings), int(first.embedding_dim)  # type: ignore[arg-type]
        self.padding: int | None = first.padding_idx  # type: ignore[assignment]
        self.dtype: torch.dtype = first.get_parameter("weight").dtype
        session.init_rows(key, self.num_rows, self.width, self.dtype, rule, table.start)
        self.touches: list[Touch] = []
        self.read: Versions = ()
        self.is_pushed = False
        self.field: int | None = None
        self._is_known = False  # how the field is looked up
        self._bagging: nn.EmbeddingBag | None = None  # the module that does so as sums
        self._ahead: deque[Ahead] = deque()
        self._inputs: Sequence[Tensor] = ()
        self._accrued: list[tuple[Tensor, Tensor, Bags | None]] = []
        self._pushing: deque[Pending[Pushes]] = deque()
        for module in modules:
            if isinstance(module, nn.EmbeddingBag):
                module.forward = partial(self.look_up_bags, module)  # type: ignore[method-assign]
            elif isinstance(module, nn.Embedding):
                module.forward = partial(self.look_up, module)  # type: ignore[method-assign]

    def release(self) -> None:
        """The modules are torch's own again."""
        for module in self.modules:
            del module.forward

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """A minibatch begins."""
        self.touches, self._inputs = [], inputs
        self.is_pushed = False

    def look_up(self, module: nn.Embedding, indices: Tensor) -> Tensor:
        """Return rows, as the module would."""
        wanted = self._distinct(indices)
        leaf, padding = self._fetch(wanted)
        by_frequency = module.scale_grad_by_freq
        return F.embedding(
            wanted.places, leaf, padding, scale_grad_by_freq=by_frequency, sparse=padding is None and not by_frequency
        )

    def look_up_bags(
        self,
        module: nn.EmbeddingBag,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return what bags of rows come to, as the module would."""
        wanted = self._distinct(indices)
        if offsets is None and per_sample_weights is None and self.moment.is_open:
            bags = self._bags(module, wanted)
            if bags is not None:
                return bags.output(self._fetch_sums(wanted.rows, bags))
        leaf, padding = self._fetch(wanted)
        is_plain = padding is None and per_sample_weights is None and not module.scale_grad_by_freq
        return F.embedding_bag(
            wanted.places,
            leaf,
            offsets,
            scale_grad_by_freq=module.scale_grad_by_freq,
            mode=module.mode,
            sparse=is_plain and module.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    def _distinct(self, indices: Tensor) -> Distinct:
        """Return the rows that are looked up, each once."""
        self._is_known = True
        if self.field is None:
            found = [at for at, one in enumerate(self._inputs) if one is indices]
            self.field = found[0] if found else None
        for ahead in self._ahead:
            if ahead.wanted.indices is indices:
                return ahead.wanted
        return distinct(self.key, indices, self.num_rows, self.padding)

    def _bags(self, module: nn.EmbeddingBag, wanted: Distinct) -> Bags | None:
        """Return the bags whose sums are fetched; None where rows are."""
        is_known, self._bagging = module is self._bagging, module
        for ahead in self._ahead if is_known else ():
            if ahead.wanted is wanted:
                return ahead.bags
        return bags_of(wanted, module, self.session.job.num_shards)

    def _fetch_sums(self, rows: Tensor, bags: Bags) -> Tensor:
        """Return sums of what is looked up as a tensor that gets a gradient."""
        for touch in self.touches:
            if bags.equals(touch.bags) and torch.equal(touch.rows, rows):
                return touch.leaf
        return self._touch(rows, self._values(rows, bags), bags)

    def _fetch(self, wanted: Distinct) -> tuple[Tensor, int | None]:
        """Return what is looked up as a tensor that gets a gradient, and where in it padding is."""
        padding = len(wanted.rows) if wanted.has_padding else None
        num_rows = len(wanted.rows) + wanted.has_padding
        for touch in self.touches:
            if touch.bags is None and len(touch.leaf) == num_rows and torch.equal(touch.rows, wanted.rows):
                return touch.leaf, padding
        values = self._values(wanted.rows)
        leaf = torch.cat([values, values.new_zeros(1, self.width)]) if wanted.has_padding else values
        if self.moment.is_open:
            self._touch(wanted.rows, leaf)
            leaf.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        return leaf, padding

    def _touch(self, rows: Tensor, leaf: Tensor, bags: Bags | None = None) -> Tensor:
        """What was fetched gets a gradient; sums are pushed when the minibatch is over, with whatever else is then."""
        if self.is_pushed:
            raise DataError(
                f"{self.key} was looked up after its gradient had been pushed; a forward that is computed again "
                "in the backward must look up the same rows"
            )
        self.touches.append(Touch(rows, leaf.requires_grad_(), bags=bags))
        return leaf

    def _values(self, rows: Tensor, bags: Bags | None = None) -> Tensor:
        ahead = self._foreseen(rows, bags) if self.moment.is_open else None
        if ahead is None:
            return self._saw(self._pull(rows, bags, least=self.moment.step, is_open=self.moment.is_open).wait())
        self._ask_late(ahead)
        newer = ahead.newer
        if ahead.early is None:
            return self._saw((newer or self._pull(rows, bags, least=0, is_open=False)).wait())
        values = self._saw(ahead.early.wait())
        if newer is not None and ahead.late is not None:
            values[ahead.late] = self._saw(newer.wait())
        return values

    def _foreseen(self, rows: Tensor, bags: Bags | None) -> Ahead | None:
        """Return what was fetched ahead of this look-up, if it was, and do away with it and what came before it."""
        for at, ahead in enumerate(self._ahead):
            if ahead.fits(rows, bags):
                for _ in range(at + 1):
                    self._ahead.popleft()
                return ahead
        return None

    def _saw(self, pulls: Pulls) -> Tensor:
        if self.moment.is_open:
            versions = pulls.versions
            self.read = tuple(map(min, self.read, versions)) if self.read else versions
        return pulls.values

    def expect(self, inputs: Sequence[Tensor], *, following: int) -> None:
        """What a minibatch to come will look up is on its way, if that is known; once, however often it is said.

        Rows that this worker is about to push are asked for behind that push, so that nothing changes but the time;
        before it, if weights are fetched ahead.

        Args:
            inputs: of the minibatch; of the next one, or of that behind what is expected already.
            following: the step that it belongs to; 0 where there are no steps.
        """
        indices = self._upcoming(inputs)
        if indices is None or any(same(ahead.wanted.indices, indices) for ahead in self._ahead):
            return
        # with what comes now: that of the minibatches that are begun ahead, and of this one until it has looked it up
        while len(self._ahead) >= max(1, self.moment.ahead) + (not self.touches):
            self._ahead.popleft()
        ahead = Ahead(distinct(self.key, indices, self.num_rows, self.padding))
        wanted = ahead.wanted
        self._ahead.append(ahead)
        consistency = self.session.job.consistency
        if self._bagging is not None:
            ahead.bags = bags_of(wanted, self._bagging, self.session.job.num_shards)
        if self._leaves_with_push(ahead):
            pass
        elif not self.moment.is_last or self.moment.ahead or isinstance(consistency, Bsp):
            ahead.early = self._pull(wanted.rows, ahead.bags, least=following, is_open=True)
        elif ahead.bags is not None:
            pass  # a sum of which a row is about to be pushed is another one then: all are asked for behind that push
        elif isinstance(consistency, Asp):
            ahead.early = self.session.pull(self.key, rows=wanted.rows)
            ahead.late = among(wanted.rows, self._touched())
        else:
            ahead.late = torch.arange(len(wanted.rows))

    def _leaves_with_push(self, ahead: Ahead) -> bool:
        """Tell whether sums are asked for when a minibatch is over, in the letter of its push and before it.

        There is a whole minibatch left then until they are looked up; a letter of their own is more work on both sides.
        """
        return ahead.bags is not None and self.moment.ahead > 1 and self.moment.is_last

    def _upcoming(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Return what a minibatch will look up; None before it is known how the model does that."""
        if not self._is_known:
            return None
        if self.table.indices is not None:
            return self.table.indices(*inputs)
        return inputs[self.field] if self.field is not None and self.field < len(inputs) else None

    def _touched(self) -> Tensor:
        """Return the rows that the push to come will have, ascending and each once."""
        found = [*(touch.rows for touch in self.touches), *(rows for rows, _, _ in self._accrued)]
        return found[0] if len(found) == 1 else torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *found]))

    def _ask_late(self, ahead: Ahead) -> None:
        if ahead.newer is not None:
            return
        if ahead.bags is not None and ahead.early is None:
            ahead.newer = self._pull(ahead.wanted.rows, ahead.bags, least=0, is_open=False)
        elif ahead.late is not None and len(ahead.late):
            ahead.newer = self.session.pull(self.key, rows=ahead.wanted.rows[ahead.late])

    def _pull(self, rows: Tensor, bags: Bags | None, *, least: int, is_open: bool) -> Pending[Pulls]:
        """Ask for rows, or their sums; of a step that is computed, under bsp, as they were in it."""
        is_exact = is_open and isinstance(self.session.job.consistency, Bsp)
        sums = None if bags is None else bags.there
        return self.session.pull(self.key, rows=rows, least=least, is_exact=is_exact, sums=sums)

    def _note(self, leaf: Tensor) -> None:
        for touch in self.touches:  # the leaf holds this hook, so the hook does not hold the leaf
            touch.is_complete = touch.is_complete or touch.leaf is leaf
        if self.moment.is_open and self.moment.is_last and all(one.is_complete for one in self.touches):
            self.complete()

    def complete(self) -> None:
        """The gradient of this minibatch is here: it is added to the portion's, and pushed with the last one."""
        if self.is_pushed:
            return
        for touch in self.touches:
            if touch.leaf.grad is not None:
                gradient = whole_gradient(touch.leaf.grad)
                gradient = gradient[: len(touch.rows)] if touch.bags is None else gradient
                self._accrued.append((touch.rows, gradient, touch.bags))
                touch.leaf.grad = None
        if self.moment.is_last:
            self.push()
            self.is_pushed = True
        else:
            self.touches = []

    def push(self) -> None:
        """The rows that a portion has looked up are on their way; under asp only if there are any."""
        rows, values, sums = self._gradient()
        read, self._accrued, self.read = self.read, [], ()
        consistency = self.session.job.consistency
        if isinstance(consistency, Bsp):
            read = read or (self.moment.step,) * self.session.job.num_shards
        while len(self._pushing) >= UNDER_WAY + self.moment.ahead:
            self._pushing.popleft().wait()
        with self.session.together():
            for ahead in self._ahead if self.moment.ahead > 1 else ():
                self._ask_late(ahead)
            if len(rows) or not isinstance(consistency, Asp):
                portion = self.moment.portion
                push = self.session.push(self.key, values, portion=portion, read=read or None, rows=rows, sums=sums)
                self._pushing.append(push)
            for ahead in self._ahead:
                self._ask_late(ahead)

    def _gradient(self) -> tuple[Tensor, Tensor, Sums | None]:
        """Return rows, their gradients, and of which sums if there is one look-up alone."""
        if len(self._accrued) == 1 and (bags := self._accrued[0][2]) is not None:
            return self._accrued[0][0], self._accrued[0][1], bags.back
        whole = [(rows, one if bags is None else bags.back.of(one)) for rows, one, bags in self._accrued]
        return *merged(whole, self.width, self.dtype), None

    def drop(self) -> None:
        """Nothing is left of a portion that was begun."""
        self._accrued, self.read = [], ()
        self._ahead.clear()
        self.begin(())

    def forget(self) -> None:
        """What was fetched ahead is too old to be used."""
        self._ahead.clear()

    def settle(self) -> None:
        """Every push has been answered."""
        while self._pushing:
            self._pushing.popleft().wait()

    def whole(self, at_once: int = 1 << 16) -> Tensor:
        """Return all rows as they are now, ``(num_rows, width)``; zeros for the padding row."""
        found = torch.empty(self.num_rows, self.width, dtype=self.dtype)
        for low in range(0, self.num_rows, at_once):
            rows = torch.arange(low, min(low + at_once, self.num_rows))
            found[rows] = self.session.pull(self.key, rows=rows).wait().values
        if self.padding is not None:
            found[self.padding] = 0
        return found


def same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal, or even one."""
    return one is other or torch.equal(one, other)
