"""DeepSpeed's configuration files, read as plans and options of this library."""

from counterpoint.compat.deepspeed.config import BatchSizes, DeepSpeedConfig, read_config

__all__ = ["BatchSizes", "DeepSpeedConfig", "read_config"]
