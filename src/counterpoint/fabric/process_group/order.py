"""The order in which a rank starts the collectives of a group, and how the ranks' orders are compared.

Devices run ahead of no comparison: a collective is compared before it starts only if it is *new*, which means that the
group has not started it after the same predecessor before::

    step 1      a   b   c       all announced: (-, a) (a, b) (b, c) are new
    step 2      a   b   c       (c, a) is announced; the rest starts at once
    step 3      a   b   c       nothing is announced; at the step's commit the digests of all three steps are compared
    step 4      a   c   b       (a, c) is new on the rank that does this: it announces, and no data moves

A rank whose order is a new one is thus found before any data moves. If orders that were both seen before alternate
differently on two ranks, the digests differ. If they wait for each other, the logs are compared over the store.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    describe_mismatch,
    fingerprint,
    format_ranks,
    signature_text,
)

MAX_RECENT: Final = 256
"""Collectives whose names a log keeps."""
MAX_KNOWN: Final = 1 << 16
"""Pairs of collectives that a log keeps; all members forget them at the same collective."""
DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class LogExcerpt:
    """What another rank needs to know of a log.

    Attributes:
        count: how many collectives were started.
        recent: fingerprint and text of the last ones, by number.
    """

    count: int
    recent: Mapping[int, tuple[bytes, str]]

    def encode(self) -> str:
        """Return it as JSON."""
        return json.dumps([self.count, [[index, mark.hex(), text] for index, (mark, text) in self.recent.items()]])


def decode_excerpt(text: bytes) -> LogExcerpt:
    """Return the excerpt that a rank has encoded."""
    count, recent = json.loads(text)
    return LogExcerpt(int(count), {int(index): (bytes.fromhex(mark), str(name)) for index, mark, name in recent})


class CollectiveLog:
    """The collectives of one group, in the order in which this rank has started them.

    Attributes:
        count: how many were started.
    """

    def __init__(self) -> None:
        self.count = 0
        self._digest = bytes(DIGEST_BYTES)
        self._last = b""
        self._known: set[tuple[bytes, bytes]] = set()
        self._recent: deque[tuple[bytes, CollectiveSignature]] = deque(maxlen=MAX_RECENT)

    def append(self, signature: CollectiveSignature) -> bool:
        """Append a collective; return whether it is new after its predecessor."""
        mark = fingerprint(signature)
        pair = (self._last, mark)
        is_new = pair not in self._known
        if is_new:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known.add(pair)
        self._last = mark
        self._digest = blake2b(self._digest + mark, digest_size=DIGEST_BYTES).digest()
        self._recent.append((mark, signature))
        self.count += 1
        return is_new

    def signature(self, group: Group) -> CollectiveSignature:
        """Return the signature of the comparison of all that was started."""
        last = signature_text(self._recent[-1][1]) if self._recent else "none"
        label = f"{self.count} collectives {self._digest.hex()}, at last {last}"
        return CollectiveSignature("order", label, group, position=self.count)

    def excerpt(self) -> LogExcerpt:
        """Return the last collectives."""
        recent: list[Any] = list(self._recent)
        first = self.count - len(recent)
        return LogExcerpt(
            self.count,
            {first + index: (mark, signature_text(signature)) for index, (mark, signature) in enumerate(recent)},
        )


def describe_divergence(excerpts: Mapping[int, LogExcerpt], num_moved: int) -> str | None:
    """Return an error text for the first collective that two ranks have started differently; None if there is none.

    Args:
        excerpts: of the logs, by rank.
        num_moved: how many collectives have changed tensors of this rank.
    """
    numbers = sorted({index for excerpt in excerpts.values() for index in excerpt.recent})
    for index in numbers:
        seen = {rank: excerpt.recent[index] for rank, excerpt in excerpts.items() if index in excerpt.recent}
        consequence = "tensors of this step may be wrong" if index < num_moved else "no tensor was changed"
        error = describe_mismatch(seen, index, consequence) if len(seen) > 1 else None
        if error is not None:
            return error
    return None


def describe_missing(excerpts: Mapping[int, LogExcerpt], index: int) -> str | None:
    """Return an error text for the ranks that have not started collective ``index``; None if all have."""
    missing = [rank for rank, excerpt in sorted(excerpts.items()) if excerpt.count <= index]
    if not missing:
        return None
    last = excerpts[missing[0]]
    where = f"after {last.recent[last.count - 1][1]}" if last.count - 1 in last.recent else "before any other"
    have = "has" if len(missing) == 1 else "have"
    return (
        f"{format_ranks(missing)} {have} not started it (rank {missing[0]} is at collective {last.count} of the group, "
        f"{where}): look at what {format_ranks(missing)} did instead, or raise the timeout if it is only slow"
    )
