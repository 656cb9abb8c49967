"""Choose round ticks of axes, and format numbers, durations and sizes for people."""

from __future__ import annotations

import math
from fractions import Fraction


def round_step(span: float, max_steps: int) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that fits into the span at most ``max_steps`` times."""
    raw = span / max_steps
    power = 10.0 ** math.floor(math.log10(raw))
    return next((times * power for times in (1, 2, 5) if times * power >= raw * (1 - 1e-9)), 10 * power)


def ticks(low: float, high: float, max_ticks: int = 6) -> tuple[float, ...]:
    """Return the round numbers from ``low`` to ``high``, about ``max_ticks`` of them; none for an empty span."""
    if not high > low:
        return ()
    step = round_step(high - low, max_ticks)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(step * index for index in range(first, last + 1))


def format_tick(value: float, step: float) -> str:
    """Format a tick with as many decimals as the step has: ``0.25`` at steps of 0.05, ``12,000`` at steps of 2,000."""
    if value and (abs(value) >= 1e7 or step < 1e-6):
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value + 0.0:,.{decimals}f}"


def format_number(value: float | str) -> str:
    """Format a number with four significant digits: ``0.2727``, ``81.53``, ``12,346``; return text unchanged."""
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = math.floor(math.log10(abs(value)))
    if not -5 <= digits <= 9:
        return f"{value:.3e}"
    text = f"{value:,.{max(0, 3 - digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_unit(span_s: float) -> tuple[float, str]:
    """Return how many of which unit make a second, so that the span becomes a number from 1 to 1000."""
    if span_s >= 1:
        return 1.0, "s"
    return (1e3, "ms") if span_s >= 1e-3 else (1e6, "us")


def format_seconds(seconds: float) -> str:
    """Format a duration in a suitable unit: ``12.5 ms``."""
    times, unit = time_unit(seconds)
    return f"{format_number(seconds * times)} {unit}"


def format_bytes(size: float | Fraction) -> str:
    """Format a size in a suitable unit.

    Example:
        >>> format_bytes(512), format_bytes(3 * 2**19)
        ('512 B', '1.5 MiB')
    """
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:g} B" if unit == "B" else f"{number:.4g} {unit}"


def format_share(share: float) -> str:
    """Format a share in percent; one that is not zero does not become zero.

    Example:
        >>> format_share(0.31), format_share(0.0), format_share(2e-7), format_share(0.99999)
        ('31.0 %', '0 %', '<0.1 %', '>99.9 %')
    """
    if share in {0.0, 1.0}:
        return f"{100 * share:.0f} %"
    if share < 1e-3:
        return "<0.1 %"
    return ">99.9 %" if share > 0.999 else f"{100 * share:.1f} %"
