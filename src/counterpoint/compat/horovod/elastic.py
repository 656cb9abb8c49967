"""Horovod's elastic API, which is not supported: every name raises an error with the replacement."""

from __future__ import annotations

from counterpoint.compat.horovod.errors import HorovodUnsupportedError


def __getattr__(name: str) -> object:
    """Raise an error that names the replacement.

    Raises:
        HorovodUnsupportedError: always.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    raise HorovodUnsupportedError(
        f"hvd.elastic.{name} is not supported: the ranks of a job are fixed at its start; save checkpoints with "
        "counterpoint.Trainer(...).fit(checkpoint_dir=..., resume=...), or your own code, and restart the job with "
        "`counterpoint run` or `torchrun --max-restarts`"
    )
