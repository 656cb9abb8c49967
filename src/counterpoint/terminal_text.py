r"""Text for terminals and logs: control characters in it are shown as escapes such as ``\x1b``, never sent.

A name, a path or an exception's text from elsewhere may contain them: escape sequences set a terminal's title or its
clipboard and overwrite earlier lines, and marks of direction reorder a line. Data (JSON, TensorBoard, checkpoints)
stays as it is.
"""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

CONTROL = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line and paragraph separators, marks of direction
    r"\ud800-\udfff"  # bytes of a file name that are not UTF-8
)
COLOR = r"\x1b\[[0-9;:]*m"
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
RESET_COLOR = "\x1b[0m"
_IN_TEXT = re.compile(f"[{CONTROL}]")
_IN_LINE = re.compile(f"[{CONTROL}\n]")
_IN_OUTPUT = re.compile(f"(?:{COLOR}|\r)|([{CONTROL}])")


def escape_text(text: str) -> str:
    r"""Return the text with its control characters escaped, except tabs and newlines.

    Example:
        >>> print(escape_text("layer\x1b]0;title\x07 \u202e of\ntwo lines"))
        layer\x1b]0;title\x07 \u202e of
        two lines
    """
    return _IN_TEXT.sub(_escape, text)


def escape_line(text: str) -> str:
    r"""Return the text as one line: newlines are escaped too.

    Example:
        >>> print(escape_line("name\nrank 0 failed"))
        name\nrank 0 failed
    """
    return _IN_LINE.sub(_escape, text)


def escape_output(line: str) -> str:
    r"""Return a line that another program has written, with its control characters escaped.

    Colors stay, and end with the line; a carriage return stays, so that progress bars are drawn over themselves.

    Source:
        ``less -R``; git's relay of a server's messages (``sideband.allowControlCharacters``).

    Example:
        >>> escape_output("\x1b[31mred\x1b[2J")
        '\x1b[31mred\\x1b[2J\x1b[0m'
    """
    shown = _IN_OUTPUT.sub(lambda match: _escape(match) if match[1] else match[0], line)
    return shown + RESET_COLOR if "\x1b" in shown and not shown.endswith((RESET_COLOR, "\x1b[m")) else shown


def escape_surrogates(text: str) -> str:
    r"""Return the text with the bytes of a file name that are not UTF-8 escaped, so that it can be encoded.

    Example:
        >>> escape_surrogates("run-\udcff")
        'run-\\udcff'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def write_line(stream: TextIO, line: str) -> None:
    """Write a line at once; characters that the stream's encoding does not have are escaped.

    A line that cannot be written, because the disk of the file is full or fails, is lost; no error is raised.
    """
    encoding = stream.encoding or "utf-8"
    with losing_lines():
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()


@contextmanager
def losing_lines() -> Iterator[None]:
    """Ignore that a disk does not take what is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Warn as ``warnings.warn`` does, with the control characters of the text escaped."""
    warnings.warn(escape_text(text), category, stacklevel=stacklevel + 1)  # noqa: TID251 - here, and nowhere else


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
