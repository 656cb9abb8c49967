"""Clusters as YAML files: every quantity has a unit, and all mistakes of a file are reported with their lines."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_text
from counterpoint.optim.validation import renamed_hint, shorten
from counterpoint.world.cluster import DTYPES, Cluster, Device, Level, Link, Roofline, TimeSlicing
from counterpoint.world.known_clusters import find_known_cluster, suggest_names
from counterpoint.world.quantities import (
    BANDWIDTH,
    FLOPS,
    LATENCY,
    MEMORY,
    NUMBER,
    QuantityKind,
    format_quantity,
    parse_quantity,
)
from counterpoint.yaml_reader import compose_yaml

DEVICE_KEYS = {"flops": FLOPS, "memory": MEMORY, "memory_bandwidth": BANDWIDTH}
OPTIONAL_DEVICE_KEYS = {"disk_bandwidth": BANDWIDTH, "host_bandwidth": BANDWIDTH}
ROOFLINE_KEYS = ("name", "flops_fraction", "memory_fraction", "launch")
"""Keys of a device whose FLOP/s are given by dtype."""
LINK_KEYS = {"latency": LATENCY, "bandwidth": BANDWIDTH}

_KEYS = ("device", "link", "levels", "speeds", "compute_contention", "slow_links", "memory_contention", "time_slicing")
_SLOW_KEYS = ("level", "group", "fraction")
_LINK_KEYS = (*LINK_KEYS, "shared_memory")
_TIME_SLICING_KEYS = ("cores", "fractions", "message")
_LEVEL_KEYS = ("name", "count", *_LINK_KEYS, "shared")
_RENAMED_KEYS = {
    "copied": "shared_memory",
    "crowding": "compute_contention",
    "memory_crowding": "memory_contention",
    "part": "fraction",
    "parts": "fractions",
    "turns": "time_slicing",
}
_BOOLEANS = {"true": True, "false": False}
_EXAMPLES = {
    "device": "device: {flops: 30 GFLOP/s, memory: 16 GiB, memory_bandwidth: 10 GB/s}",
    "name": "name: host",
    "count": "count: 2",
    "level": "level: 1",
    "group": "group: 0",
    "fraction": "fraction: 0.5",
    **{key: f"{key}: {kind.example}" for key, kind in (DEVICE_KEYS | LINK_KEYS).items()},
    "memory_bandwidth": "memory_bandwidth: 10 GB/s",
    "cores": "cores: 2",
    "fp32": "flops: {fp32: 67 TFLOP/s, bf16: 989 TFLOP/s}",
}


def load_cluster(path: str | Path) -> Cluster:
    """Load a cluster from a file.

    Raises:
        PlanError: the file cannot be read or has mistakes, which are all listed with their lines.
    """
    file = Path(path)
    try:
        text = read_regular_text(file)
    except OSError as error:
        raise PlanError(
            f"the cluster file {path} cannot be read: {error.strerror}; give an existing one, or have "
            f"`counterpoint probe --out {path}` write it"
        ) from None
    except UnicodeDecodeError:
        raise PlanError(f"the cluster file {path} is not text in UTF-8; give a YAML file") from None
    return parse_cluster(text, name=str(path))


def resolve_cluster(given: str | Path | Cluster) -> Cluster:
    """Return the cluster: of its name, as ``8xh100``, or loaded from its file.

    Raises:
        PlanError: it is neither, or the file cannot be read or has mistakes.

    Example:
        >>> resolve_cluster("4x8xh100").num_ranks
        32
    """
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, str | Path):
        raise PlanError(
            f"cluster={given!r} is a {type(given).__name__}; give a Cluster, its name, or the path of its file"
        )
    known = find_known_cluster(given) if isinstance(given, str) else None
    if known is not None:
        return known
    if isinstance(given, str) and "/" not in given and "." not in given and not Path(given).exists():
        raise PlanError(
            f"there is no cluster {shorten(given)}, and no file of this name; {suggest_names(given)}; `counterpoint "
            "probe --out FILE` describes the one that it runs on"
        )
    return load_cluster(given)


def parse_cluster(text: str, *, name: str = "cluster file") -> Cluster:
    """Parse the YAML text of a cluster; see ``docs/how-to/clusters.md``.

    Args:
        text: YAML, as :func:`format_cluster` writes it.
        name: what messages call the text, for example its path.

    Raises:
        PlanError: a key is unknown, missing or given twice, or a quantity has no unit, a wrong one or an impossible
            value; the message has a line for each mistake.

    Example:
        >>> text = "device: {flops: 30 GFLOP/s, memory: 8 GiB, memory_bandwidth: 10 GB/s}"
        >>> text += chr(10) + "link: {latency: 50 us, bandwidth: 1 Gbit/s}"
        >>> parse_cluster(text).link.bytes_per_s
        125000000.0
    """
    root = compose_yaml(text, name, "the cluster")
    if root is None:
        raise PlanError(f"{name} is empty; a cluster has a device and a link or levels, as `counterpoint probe` writes")
    reader = _ClusterReader()
    cluster = reader.cluster(root)
    if reader.errors:
        raise PlanError("\n".join(f"{name}:{line}: {mistake}" for line, mistake in sorted(reader.errors)))
    return cluster


class _ClusterReader:
    """Reader of the nodes of one file; it records mistakes and continues with a default value.

    Attributes:
        errors: lines and messages of the mistakes.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[int, str]] = []

    def cluster(self, root: yaml.Node) -> Cluster:
        nodes = self.mapping(root, "", _KEYS, required=("device",))
        alternatives = [nodes[key] for key in ("link", "levels") if key in nodes]
        if not alternatives:
            self.add_error(root, "the file has neither link nor levels; give one of them")
        if len(alternatives) > 1:
            self.add_error(
                alternatives[0],
                "the file has both link and levels, which have links of their own; leave one of them out",
            )
        levels = tuple(
            self.level(node, f"levels[{index}]") for index, node in enumerate(self.items(nodes.get("levels"), "levels"))
        )
        return Cluster(
            self.device(nodes["device"]) if "device" in nodes else Device(),
            self.link(nodes["link"]) if "link" in nodes else Link(),
            self.speeds(nodes.get("speeds"), levels),
            levels,
            self.contention(nodes.get("compute_contention")),
            tuple(
                self.slow_link(node, f"slow_links[{index}]", levels)
                for index, node in enumerate(self.items(nodes.get("slow_links"), "slow_links"))
            ),
            self.contention(nodes.get("memory_contention"), "memory_contention"),
            self.time_slicing(nodes["time_slicing"]) if "time_slicing" in nodes else None,
        )

    def device(self, node: yaml.Node) -> Device:
        """Return the device of a node."""
        allowed = (*DEVICE_KEYS, *OPTIONAL_DEVICE_KEYS, "reserve", *ROOFLINE_KEYS)
        nodes = self.mapping(node, "device", allowed, required=DEVICE_KEYS)
        device = self.computing_device(nodes)
        disk, host = (
            self.quantity(nodes[key], f"device.{key}", kind) if key in nodes else default
            for (key, kind), default in zip(
                OPTIONAL_DEVICE_KEYS.items(), (device.disk_bytes_per_s, device.host_bytes_per_s), strict=True
            )
        )
        return replace(device, disk_bytes_per_s=disk, host_bytes_per_s=host)

    def computing_device(self, nodes: dict[str, yaml.Node]) -> Device:
        """Return the device without the bandwidths of what state is offloaded to."""
        memory, bandwidth = (
            self.quantity(nodes.get(key), f"device.{key}", DEVICE_KEYS[key]) for key in ("memory", "memory_bandwidth")
        )
        reserve = self.quantity(nodes["reserve"], "device.reserve", MEMORY) if "reserve" in nodes else 0
        if reserve >= memory and "memory" in nodes and "reserve" in nodes:
            self.add_error(nodes["reserve"], "device.reserve is not less than device.memory; no training would fit")
        flops = nodes.get("flops")
        if isinstance(flops, yaml.MappingNode):
            roofline = self.roofline(flops, nodes)
            return Device(
                dict(roofline.peaks).get("fp32", 1.0),
                int(memory),
                bandwidth,
                reserve_bytes=int(reserve),
                roofline=roofline,
            )
        for key in ROOFLINE_KEYS:
            if key in nodes:
                self.add_error(
                    nodes[key],
                    f"device.{key} is for peaks by dtype, but device.flops is {self.text(flops)}; write it as in "
                    f"{_EXAMPLES['fp32']}, or leave {key} out",
                )
        return Device(self.quantity(flops, "device.flops", FLOPS), int(memory), bandwidth, reserve_bytes=int(reserve))

    def roofline(self, flops: yaml.Node, nodes: dict[str, yaml.Node]) -> Roofline:
        """Return the roofline of peaks by dtype, and of the other keys of the device."""
        by_dtype = self.mapping(flops, "device.flops", DTYPES, required=("fp32",))
        peaks = {dtype: self.quantity(peak, f"device.flops.{dtype}", FLOPS) for dtype, peak in by_dtype.items()}
        peaks.setdefault("fp32", 1.0)  # after an error, with the others
        return Roofline(
            self.name(nodes["name"], "device.name") if "name" in nodes else "",
            tuple(peaks.items()),
            self.fraction(nodes.get("flops_fraction"), "device.flops_fraction"),
            self.fraction(nodes.get("memory_fraction"), "device.memory_fraction"),
            self.quantity(nodes["launch"], "device.launch", LATENCY) if "launch" in nodes else 0.0,
        )

    def fraction(self, node: yaml.Node | None, path: str) -> float:
        """Return a fraction; 1 if it is absent."""
        text = "1" if node is None else _describe_node(node)
        fraction = float(text) if re.fullmatch(NUMBER, text) else 0.0
        if not 0 < fraction <= 1:
            self.add_error(node, f"{path} is {text}; it must be more than 0 and at most 1; write it as in 0.5")
        return fraction

    @staticmethod
    def text(node: yaml.Node | None) -> str:
        """Return a scalar as written in the file; for no node, nothing."""
        return "nothing" if node is None else _describe_node(node)

    def link(self, node: yaml.Node) -> Link:
        return self.link_from(self.mapping(node, "link", _LINK_KEYS, required=LINK_KEYS), "link")

    def link_from(self, nodes: dict[str, yaml.Node], path: str) -> Link:
        """Return the link with these keys; ``path`` is their position, for messages."""
        latency_s, bytes_per_s = (
            self.quantity(nodes.get(key), f"{path}.{key}", kind) for key, kind in LINK_KEYS.items()
        )
        return Link(latency_s, bytes_per_s, self.boolean(nodes.get("shared_memory"), f"{path}.shared_memory"))

    def level(self, node: yaml.Node, path: str) -> Level:
        nodes = self.mapping(node, path, _LEVEL_KEYS, required=("name", "count", *LINK_KEYS))
        link = self.link_from(nodes, path)
        name = self.name(nodes.get("name"), f"{path}.name")
        return Level(
            name,
            self.positive_int(nodes.get("count"), f"{path}.count"),
            link,
            self.boolean(nodes.get("shared"), f"{path}.shared"),
        )

    def speeds(self, node: yaml.Node | None, levels: tuple[Level, ...]) -> tuple[float, ...]:
        speeds, num_ranks = self.numbers(node, "speeds"), math.prod(level.count for level in levels)
        if node is not None and levels and len(speeds) > num_ranks:
            self.add_error(
                node,
                f"speeds has {len(speeds)} numbers, but the levels have {num_ranks} ranks; give one number per rank",
            )
        return speeds

    def contention(self, node: yaml.Node | None, key: str = "compute_contention") -> tuple[float, ...]:
        parts = self.numbers(node, key)
        if node is not None and max(parts, default=0) > 1:
            self.add_error(node, f"{key} has {max(parts):g}; a fraction cannot be more than 1")
        return parts

    def time_slicing(self, node: yaml.Node) -> TimeSlicing:
        nodes = self.mapping(node, "time_slicing", _TIME_SLICING_KEYS, required=("cores",))
        message_s = self.quantity(nodes["message"], "time_slicing.message", LATENCY) if "message" in nodes else 0.0
        parts = self.contention(nodes.get("fractions"), "time_slicing.fractions")
        return TimeSlicing(self.positive_int(nodes.get("cores"), "time_slicing.cores"), parts, message_s)

    def slow_link(self, node: yaml.Node, path: str, levels: tuple[Level, ...]) -> tuple[int, int, float]:
        nodes = self.mapping(node, path, _SLOW_KEYS, required=_SLOW_KEYS)
        level, group = (self.non_negative_int(nodes.get(key), f"{path}.{key}") for key in ("level", "group"))
        part = self.fraction(nodes.get("fraction"), f"{path}.fraction")
        if level >= max(len(levels), 1):
            self.add_error(node, f"{path} is of level {level}, but the outermost level is {max(len(levels), 1) - 1}")
        num_groups = math.prod(other.count for other in levels[level:])
        if levels and group >= num_groups:
            self.add_error(node, f"{path} is group {group}, but level {level} has {num_groups} groups, numbered from 0")
        return level, group, part

    def mapping(
        self, node: yaml.Node, path: str, known: Collection[str], *, required: Collection[str]
    ) -> dict[str, yaml.Node]:
        """Return the values below a node by their keys."""
        location = path or "the file"
        if not isinstance(node, yaml.MappingNode):
            self.add_error(
                node, f"{location} is {_describe_node(node)}; it must have keys with values, {', '.join(known)}"
            )
            return {}
        values: dict[str, yaml.Node] = {}
        suggested: list[str] = []
        for key_node, value in node.value:
            key = _describe_node(key_node)
            if key in values:
                self.add_error(key_node, f"{location} has {key} twice; give it once")
            elif key not in known:
                is_renamed = _RENAMED_KEYS.get(key) in known
                closest = [_RENAMED_KEYS[key]] if is_renamed else get_close_matches(key, known, n=1)
                suggested += closest
                remedy = f"; did you mean {closest[0]}?" if closest else f"; its keys are {', '.join(known)}"
                remedy = renamed_hint(key, _RENAMED_KEYS) if is_renamed else remedy
                self.add_error(key_node, f"{location} has an unknown key {key}{remedy}")
            values[key] = value
        for key in required:
            if key not in values and key not in suggested:
                self.add_error(node, f"{location} has no {key}; give it, as in {_EXAMPLES[key]}")
        return {key: value for key, value in values.items() if key in known}

    def items(self, node: yaml.Node | None, path: str) -> list[yaml.Node]:
        if node is None:
            return []
        if isinstance(node, yaml.SequenceNode) and node.value:
            return list(node.value)
        self.add_error(node, f"{path} must be a list with at least one item; give one, or leave {path} out")
        return []

    def quantity(self, node: yaml.Node | None, path: str, kind: QuantityKind) -> float:
        if node is not None:
            try:
                return parse_quantity(_describe_node(node), kind)
            except PlanError as error:
                self.add_error(node, f"{path} is {_describe_node(node)}; {error}")
        return 1.0

    def numbers(self, node: yaml.Node | None, path: str) -> tuple[float, ...]:
        """Return positive numbers."""
        values = []
        for index, item in enumerate(self.items(node, path)):
            text = _describe_node(item)
            number = float(text) if re.fullmatch(NUMBER, text) else 0.0
            values.append(number)
            if not 0 < number < math.inf:
                self.add_error(item, f"{path}[{index}] is {text}; it must be a number above 0; write it as in 0.5")
        return tuple(values)

    def positive_int(self, node: yaml.Node | None, path: str) -> int:
        text = "1" if node is None else _describe_node(node)
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
            return int(text)
        self.add_error(node, f"{path} is {text}; it must be an integer of at least 1")
        return 1

    def non_negative_int(self, node: yaml.Node | None, path: str) -> int:
        text = "0" if node is None else _describe_node(node)
        if re.fullmatch(r"[0-9]{1,9}", text):
            return int(text)
        self.add_error(node, f"{path} is {text}; it must be an integer of at least 0")
        return 0

    def boolean(self, node: yaml.Node | None, path: str) -> bool:
        text = "false" if node is None else _describe_node(node)
        if text not in _BOOLEANS:
            self.add_error(node, f"{path} is {text}; it must be {' or '.join(_BOOLEANS)}")
        return _BOOLEANS.get(text, False)

    def name(self, node: yaml.Node | None, path: str) -> str:
        if node is not None and (not isinstance(node, yaml.ScalarNode) or not node.value):
            self.add_error(node, f"{path} is {_describe_node(node)}; it must be a name, as in {_EXAMPLES['name']}")
        return "" if node is None else str(node.value)

    def add_error(self, node: yaml.Node | None, mistake: str) -> None:
        self.errors.append((1 if node is None else node.start_mark.line + 1, mistake))


def _describe_node(node: yaml.Node) -> str:
    """Return a scalar as written in the file; for another node, its kind."""
    match node:
        case yaml.ScalarNode(value=value):
            return shorten(str(value)) or "empty"
        case yaml.SequenceNode():
            return "a list"
        case _:
            return "a group of keys"


def format_cluster(cluster: Cluster) -> str:
    """Format a cluster as the YAML that :func:`parse_cluster` parses.

    The unused link of a cluster with levels is omitted.
    """
    link = cluster.link
    fields: dict[str, Any] = {"device": _device_fields(cluster.device)}
    if cluster.levels:
        fields["levels"] = [
            {"name": level.name, "count": level.count, **_link_fields(level.link), "shared": level.is_shared}
            for level in cluster.levels
        ]
    else:
        fields["link"] = _link_fields(link)
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    lists = {
        "speeds": cluster.speeds,
        "compute_contention": cluster.compute_contention,
        "memory_contention": cluster.memory_contention,
    }
    for key, numbers in lists.items():
        text += f"{key}: {_format_list(numbers)}\n" if numbers else ""
    text += (
        ""
        if cluster.time_slicing is None
        else f"time_slicing: {{{', '.join(_time_slicing_fields(cluster.time_slicing))}}}\n"
    )
    rows = "".join(
        f"- {{level: {level}, group: {group}, fraction: {part!r}}}\n" for level, group, part in cluster.slow_links
    )
    return text + (f"slow_links:\n{rows}" if rows else "")


def _device_fields(device: Device) -> dict[str, Any]:
    roofline = device.roofline
    fields: dict[str, Any] = {} if roofline is None or not roofline.name else {"name": roofline.name}
    fields["flops"] = (
        format_quantity(device.cost_per_s, FLOPS)
        if roofline is None
        else {dtype: format_quantity(peak, FLOPS) for dtype, peak in roofline.peaks}
    )
    fields["memory"] = format_quantity(device.memory_bytes, MEMORY)
    fields["memory_bandwidth"] = format_quantity(device.memory_bytes_per_s, BANDWIDTH)
    if device.reserve_bytes:
        fields["reserve"] = format_quantity(device.reserve_bytes, MEMORY)
    default = Device()
    optional = {
        "disk_bandwidth": (device.disk_bytes_per_s, default.disk_bytes_per_s),
        "host_bandwidth": (device.host_bytes_per_s, default.host_bytes_per_s),
    }
    for key, (value, usual) in optional.items():
        if value != usual:
            fields[key] = format_quantity(value, BANDWIDTH)
    if roofline is not None:
        fields["flops_fraction"] = roofline.flops_fraction
        fields["memory_fraction"] = roofline.memory_fraction
        fields["launch"] = format_quantity(roofline.launch_s, LATENCY)
    return fields


def _format_list(numbers: Collection[float]) -> str:
    return f"[{', '.join(map(repr, numbers))}]"


def _time_slicing_fields(time_slicing: TimeSlicing) -> Iterator[str]:
    yield f"cores: {time_slicing.cores}"
    if time_slicing.speed_fractions:
        yield f"fractions: {_format_list(time_slicing.speed_fractions)}"
    if time_slicing.message_s:
        yield f"message: {format_quantity(time_slicing.message_s, LATENCY)}"


def _link_fields(link: Link) -> dict[str, Any]:
    copied = {"shared_memory": True} if link.is_shared_memory else {}
    return {
        "latency": format_quantity(link.latency_s, LATENCY),
        "bandwidth": format_quantity(link.bytes_per_s, BANDWIDTH),
        **copied,
    }
