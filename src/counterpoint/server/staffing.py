"""Who keeps a shard when somebody falls silent: never is the last complete copy given up before another one is made.

What two servers keep *completely* is all that anybody has been told. When one of the two falls silent, the other goes
on with a new backup, and the silent one is remembered as ``former``: until the new backup is complete, nothing changes,
so its copy is as good as the other's, and either may lead.
"""

from __future__ import annotations

from collections.abc import Mapping

from counterpoint.server.calls import Keepers


def staffed(keepers: Keepers, heard: Mapping[str, int]) -> Keepers:
    """Return who is to keep a shard.

    Args:
        keepers: who does.
        heard: the servers that are not silent, with the shards that each keeps.

    Example:
        >>> staffed(Keepers("a", "b", is_complete=True), {"b": 2, "c": 0})
        Keepers(primary='b', backup='c', is_complete=False, former='a')
        >>> staffed(Keepers("b", "c", former="a"), {"a": 1, "c": 1})
        Keepers(primary='a', backup='c', is_complete=False, former='b')
    """
    if keepers.is_complete:
        return _of_complete(keepers, heard)
    primary, former = keepers.primary, keepers.former
    if primary not in heard and former in heard:
        primary, former = former, primary
    backup = keepers.backup if keepers.backup in heard and keepers.backup != primary else ""
    backup = backup or chosen(heard, primary, former) or chosen(heard, primary)
    return Keepers(primary, backup, is_complete=False, former=former)


def _of_complete(keepers: Keepers, heard: Mapping[str, int]) -> Keepers:
    pair = (keepers.primary, keepers.backup)
    staying = [name for name in pair if name in heard]
    backup = chosen(heard, *pair)
    if not keepers.backup or len(staying) != 1 or not backup:
        return keepers
    (silent,) = set(pair) - set(staying)
    return Keepers(staying[0], backup, is_complete=False, former=silent)


def without(keepers: Keepers, name: str) -> Keepers | None:
    """Return who keeps a shard when the copy of one server is gone for good; None where that was the last one."""
    if name == keepers.primary:
        successor = keepers.backup if keepers.is_complete else keepers.former
        return Keepers(successor) if successor else None
    if name == keepers.backup:
        former = "" if keepers.former == name else keepers.former
        return Keepers(keepers.primary, former=former)
    if name == keepers.former:
        return Keepers(keepers.primary, keepers.backup, keepers.is_complete)
    return keepers


def chosen(heard: Mapping[str, int], *others: str) -> str:
    """Return the server with the fewest shards that is none of the others; empty where there is none."""
    return min((name for name in heard if name not in others), key=lambda name: (heard[name], name), default="")
