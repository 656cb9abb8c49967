"""The orders by name."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.orders import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from counterpoint.strategies.orders.order import Order
from counterpoint.strategies.orders.pipedream import STREAMS

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

NAMES = tuple(sorted((*ORDERS, *STREAMS)))
"""All that a pipeline may be told as its order, streams among them."""


def require_order(name: str, chunks: int) -> None:
    """Check that there is an order of that name for so many chunks per stage; a stage of a stream runs one.

    Raises:
        PlanError: there is none.
    """
    if name not in NAMES:
        raise PlanError(f"there is no pipeline order {name!r}; the orders are {', '.join(NAMES)}")
    if not any(chunks in order.chunks for order in ORDERS.get(name, ())) and (name in ORDERS or chunks != 1):
        wanted = _wanted(ORDERS[name]) if name in ORDERS else "virtual=1"
        raise PlanError(f"order={name} is not made for virtual={chunks} chunks per stage; give {wanted}")


def find_order(name: str, chunks: int) -> Order:
    """Return the order of that name for so many chunks per stage; there must be one, and it must flush."""
    return next(order for order in ORDERS[name] if chunks in order.chunks)


def _wanted(orders: tuple[Order, ...]) -> str:
    """Write which numbers of chunks there are orders for."""
    parts = [f"virtual={order.chunks.start}" + (" or more" if order.chunks.stop == _MOST else "") for order in orders]
    return " or ".join(parts)
