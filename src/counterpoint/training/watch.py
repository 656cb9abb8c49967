"""Whether the user changed weights of which ranks train copies: under another plan, that would be another training."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from counterpoint.errors import DataError
from counterpoint.plan import Plan
from counterpoint.runtime.build import Rank


class Watch:
    """Sees changes in place, which torch counts; those through ``.data`` it does not.

    Args:
        model: the user's.
        ranks: those of this process.
        num_ranks: of the whole plan.
    """

    def __init__(self, model: nn.Module, ranks: Collection[Rank], num_ranks: int) -> None:
        stores = [rank.interpreter.store for rank in ranks]
        units = [unit for store in stores for unit in store.units.values() if not unit.arenas]
        own = {id(param) for unit in units for param in unit.params.values()}  # an optimizer changes these in place
        if num_ranks == 1:
            own |= {id(param) for param in stores[0].params.values()}
        self.params = [(name, param) for name, param in model.named_parameters() if id(param) not in own]
        self.stores = stores
        self.trained = [(name, param, param.requires_grad) for name, param in model.named_parameters()]
        self.versions: list[int] = []
        self.note()

    def counts(self) -> list[int]:
        """Return how often each watched parameter was changed in place."""
        return [param._version for _, param in self.params]  # noqa: SLF001 - there is no other way to see it

    def note(self) -> None:
        """The weights are as the ranks know them."""
        self.versions = self.counts()

    def require_unchanged(self, plan: Plan, where: str) -> None:
        """Check that nobody has changed the model's weights since the ranks got them, or which of them are trained.

        Args:
            plan: of the ranks.
            where: in which process, for the error.

        Raises:
            DataError: somebody has.
        """
        changed = next(((name, was) for name, param, was in self.trained if param.requires_grad is not was), None)
        if changed is not None:
            became = "frozen" if changed[1] else "made trainable"
            raise DataError(
                f"{changed[0]} of the model was {became} {where}between two steps, but what is trained is settled in "
                "the first one; freeze before it, or close() and call parallelize(...) again (a trainer: make another)"
            )
        if not self.params:
            return
        found = self.counts()
        if found == self.versions:
            return
        pairs = zip(self.versions, found, strict=True)
        names = [name for (name, _), (old, new) in zip(self.params, pairs, strict=True) if old != new]
        is_common = any(arena.commons is not None for store in self.stores for arena in store.arenas())
        common = "the ranks train one copy in memory that they share, so that all of them may have computed with either"
        held = common if is_common else "the ranks train copies, of which this changed one at most"
        raise DataError(
            f"{names[0]}{f' and {len(names) - 1} other parameters' if names[1:] else ''} of the model changed {where}"
            f"between two steps, but under {plan} {held}; in a loop of your own call step.give_back() before the "
            "change and step.take() after it; around a trainer change weights before fit(), or between two calls of it"
        )
