"""Horovod's elastic training does not exist here; whoever asks for a part of it is told what does."""

from __future__ import annotations

from counterpoint.compat.horovod.errors import HorovodUnsupportedError


def __getattr__(name: str) -> object:
    """Say what there is instead.

    Raises:
        HorovodUnsupportedError: always.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    raise HorovodUnsupportedError(
        f"hvd.elastic.{name} does not exist here: the ranks of a job are those it was started with; save state with "
        "counterpoint.Trainer(...).fit(checkpoint_dir=..., resume=...), or your own, and start the job again with "
        "`counterpoint run` or `torchrun --max-restarts`"
    )
