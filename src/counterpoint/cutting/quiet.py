"""Torch's tracer without what it says about its own working, in warnings, on the terminal and in logs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what the tracer says about its own working off the user's terminal."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()), _without_logs():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_logs() -> Iterator[None]:
    """Have handlers of torch's loggers that write to a stream let nothing of torch's through.

    They hold the stream that was the process's when torch was loaded, so that a redirection does not reach them.
    """
    names = [name for name in logging.root.manager.loggerDict if _is_of_torch(name)]
    found = {handler for name in names for handler in logging.getLogger(name).handlers}
    silenced = [handler for handler in found if type(handler) is logging.StreamHandler]
    for handler in silenced:
        handler.addFilter(_is_not_of_torch)
    try:
        yield
    finally:
        for handler in silenced:
            handler.removeFilter(_is_not_of_torch)


def _is_of_torch(name: str) -> bool:
    return name.split(".", 1)[0] == "torch"


def _is_not_of_torch(record: logging.LogRecord) -> bool:
    return not _is_of_torch(record.name)
