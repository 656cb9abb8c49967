"""The orders by name."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.orders import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from counterpoint.strategies.orders.order import Order

_MOST = 1 << 20
"""More chunks than any model has blocks."""

ORDERS: dict[str, tuple[Order, ...]] = {
    "gpipe": (Order(gpipe.gpipe, gpipe.in_flight, range(1, _MOST)),),
    "one_f_one_b": (Order(one_f_one_b.one_f_one_b, one_f_one_b.in_flight),),
    "interleaved": (Order(interleaved.interleaved, interleaved.in_flight, range(2, _MOST)),),
    "zero_bubble": (
        Order(zero_bubble.zb_h1, zero_bubble.in_flight),
        Order(zero_bubble_v.zb_v, zero_bubble_v.in_flight, range(2, 3), is_folded=True),
    ),
}
"""Under each name the orders for different numbers of chunks."""


def find_order(name: str, chunks: int) -> Order:
    """Return the order of that name for so many chunks per stage.

    Raises:
        PlanError: there is none.
    """
    if name not in ORDERS:
        raise PlanError(f"there is no pipeline order {name!r}; the orders are {', '.join(sorted(ORDERS))}")
    for order in ORDERS[name]:
        if chunks in order.chunks:
            return order
    raise PlanError(f"order={name} is not made for virtual={chunks} chunks per stage; give {_wanted(ORDERS[name])}")


def _wanted(orders: tuple[Order, ...]) -> str:
    """Write which numbers of chunks there are orders for."""
    parts = [f"virtual={order.chunks.start}" + (" or more" if order.chunks.stop == _MOST else "") for order in orders]
    return " or ".join(parts)
