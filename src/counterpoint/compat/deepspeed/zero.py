"""``zero.Init`` and ``zero.GatheredParameters``, as far as weights that are whole on every rank need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.errors import PlanError
from counterpoint.launchers.environment import detect


@contextmanager
def Init(*_args: object, enabled: bool = True, **_options: object) -> Iterator[None]:  # noqa: N802 - DeepSpeed's name
    """Make a model inside; on one rank there is nothing to shard.

    Args:
        enabled: False for a context that does nothing.

    Raises:
        PlanError: there are several ranks.
    """
    environment = detect()
    if enabled and environment is not None and environment.world_size > 1:
        raise PlanError(
            f"zero.Init on {environment.world_size} ranks would shard weights while the model is made, but "
            "initialize() keeps them whole on each rank; pass enabled=False, or train with "
            "cp.parallelize(strategy='zero3')"
        )
    yield


@contextmanager
def GatheredParameters(*_args: object, **_options: object) -> Iterator[None]:  # noqa: N802 - DeepSpeed's name
    """Read or change parameters inside: at stages 0, 1 and 2 every rank has all of them.

    As in DeepSpeed, changes of parameters that are not sharded are not sent: make them on all ranks.
    """
    yield
