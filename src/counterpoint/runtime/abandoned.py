"""A step that failed is left out: nothing of it is in the next one, as if it had never begun."""

from __future__ import annotations

from counterpoint.fabric.fabric import Group
from counterpoint.runtime.exchange import Exchange
from counterpoint.runtime.interpreter import Interpreter


def abandon(interpreter: Interpreter) -> None:
    """Forget what a step that failed has left on a rank; all ranks do so, and none of them communicates.

    Weights, optimizers and what codes have not sent are as they were before the step, because nobody updates before all
    have decided. A stream has several batches under way, of which stages may have applied some already; the others are
    lost, and the next batches meet the newest weights.
    """
    store, exchange, state = interpreter.store, interpreter.exchange, interpreter.state
    take_back_late(interpreter, sums_of_late(exchange))
    interpreter.compute.drop()
    exchange.drop()
    interpreter.counter.drop()
    store.settle(applied=False)
    for arena in store.arenas():
        arena.release_weights()
    store.leave_commons(None)
    store.clear()
    if store.editions is not None:
        store.editions.renew()
    state.skipped, state.leaves_out_late = interpreter.before
    interpreter.twins.turn = 0


def sums_of_late(exchange: Exchange) -> dict[int, Group]:
    """Return who has added up a gradient that was set aside, by the identity of its arena."""
    under_way = [begun for works in exchange.started.values() for begun in works]
    over = [(arena, word) for arena, work, word in under_way if work.is_complete]
    return {
        id(arena): word.group
        for arena, word in (*exchange.over, *over)
        if arena is not None and word.value.name == "delayed_grad"
    }


def take_back_late(interpreter: Interpreter, summed: dict[int, Group]) -> None:
    """Set aside again what was set aside before the step; where it has been summed, the first member keeps the sum."""
    for unit in interpreter.swapped:
        for arena in interpreter.store.units[unit].arenas:
            arena.gradient, arena.late = None, arena.gradient
    for arena in interpreter.store.arenas():
        group = summed.get(id(arena))
        if arena.late is not None and group is not None and group[0] != interpreter.fabric.rank:
            arena.late.zero_()
