"""The text of a cluster's file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import yaml

from counterpoint.world.cluster import Cluster, Link, Turns
from counterpoint.world.quantities import BANDWIDTH, FLOPS, LATENCY, MEMORY, format_quantity


def write_cluster(cluster: Cluster) -> str:
    """Return the text that :func:`counterpoint.world.cluster_file.read_cluster` reads as the same cluster.

    The link of a cluster with levels says nothing, and is left out.
    """
    device, link = cluster.device, cluster.link
    fields: dict[str, Any] = {
        "device": {
            "flops": format_quantity(device.cost_per_s, FLOPS),
            "memory": format_quantity(device.memory_bytes, MEMORY),
            "memory_bandwidth": format_quantity(device.memory_bytes_per_s, BANDWIDTH),
        }
    }
    if cluster.levels:
        fields["levels"] = [
            {"name": level.name, "count": level.count, **_link_fields(level.link), "shared": level.is_shared}
            for level in cluster.levels
        ]
    else:
        fields["link"] = _link_fields(link)
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    lists = {"speeds": cluster.speeds, "crowding": cluster.crowding, "memory_crowding": cluster.memory_crowding}
    for key, numbers in lists.items():
        text += f"{key}: {_listed(numbers)}\n" if numbers else ""
    text += "" if cluster.turns is None else f"turns: {{{', '.join(_turn_fields(cluster.turns))}}}\n"
    rows = "".join(
        f"- {{level: {level}, group: {group}, part: {part!r}}}\n" for level, group, part in cluster.slow_links
    )
    return text + (f"slow_links:\n{rows}" if rows else "")


def _listed(numbers: Collection[float]) -> str:
    return f"[{', '.join(map(repr, numbers))}]"


def _turn_fields(turns: Turns) -> Iterator[str]:
    yield f"cores: {turns.cores}"
    if turns.parts:
        yield f"parts: {_listed(turns.parts)}"
    if turns.message_s:
        yield f"message: {format_quantity(turns.message_s, LATENCY)}"


def _link_fields(link: Link) -> dict[str, Any]:
    copied = {"copied": True} if link.is_copied else {}
    return {
        "latency": format_quantity(link.latency_s, LATENCY),
        "bandwidth": format_quantity(link.bytes_per_s, BANDWIDTH),
        **copied,
    }
