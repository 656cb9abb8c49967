"""DeepSpeed's configuration files and its training API: ``import counterpoint.compat.deepspeed as deepspeed``.

``read_config`` needs no torch; the other names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.compat.deepspeed.config import BatchSizes, DeepSpeedConfig, read_config

if TYPE_CHECKING:
    from counterpoint.compat.deepspeed import zero
    from counterpoint.compat.deepspeed.start import add_config_arguments, init_distributed, initialize
    from counterpoint.compat.deepspeed.wrapped_model import DeepSpeedModel
    from counterpoint.compat.deepspeed.zero_import import import_checkpoint

__all__ = [
    "BatchSizes", "DeepSpeedConfig", "DeepSpeedModel", "add_config_arguments", "import_checkpoint",
    "init_distributed", "initialize", "read_config", "zero",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a name on first use.

    Raises:
        AttributeError: there is no such name.
    """
    if name == "zero":
        import counterpoint.compat.deepspeed.zero

        return counterpoint.compat.deepspeed.zero
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from counterpoint.compat.deepspeed import start, zero_import

    return getattr(zero_import if name == "import_checkpoint" else start, name)
