"""The orders by name."""

from __future__ import annotations

from counterpoint.strategies.orders.gpipe import gpipe
from counterpoint.strategies.orders.one_f_one_b import one_f_one_b
from counterpoint.strategies.orders.order import Order

ORDERS: dict[str, Order] = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}
