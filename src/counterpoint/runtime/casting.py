"""Under which autocasts a batch is computed: those of the call that brought it, though later ones may come to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

from counterpoint.fabric.baton import DEVICES

Casts: TypeAlias = tuple[tuple[str, bool, torch.dtype], ...]
"""For each device whether there is an autocast, and to what."""


def casts_here() -> Casts:
    """Return the autocasts of this thread."""
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)


@contextmanager
def under(casts: Casts | None) -> Iterator[None]:
    """Have these autocasts inside, and none besides; None leaves them as they are."""
    with ExitStack() as stack:
        if casts is not None:
            for (device, is_enabled, dtype), now in zip(casts, casts_here(), strict=True):
                if (device, is_enabled, dtype) != now and (is_enabled or now[1]):
                    stack.enter_context(torch.autocast(device, dtype, enabled=is_enabled))
        yield
