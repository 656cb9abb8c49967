"""Clusters as YAML: every quantity with its unit, every mistake of a file told at once, with its line."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

import yaml

from counterpoint.errors import PlanError
from counterpoint.world.cluster import Cluster, Device, Level, Link, Turns
from counterpoint.world.quantities import (
    BANDWIDTH,
    FLOPS,
    LATENCY,
    MEMORY,
    NUMBER,
    Kind,
    parse_quantity,
)

DEVICE = {"flops": FLOPS, "memory": MEMORY, "memory_bandwidth": BANDWIDTH}
LINK = {"latency": LATENCY, "bandwidth": BANDWIDTH}

_KEYS = ("device", "link", "levels", "speeds", "crowding", "slow_links", "memory_crowding", "turns")
_SLOW_KEYS = ("level", "group", "part")
_LINK_KEYS = (*LINK, "copied")
_TURN_KEYS = ("cores", "parts", "message")
_LEVEL_KEYS = ("name", "count", *_LINK_KEYS, "shared")
_SWITCHES = {"true": True, "false": False}
_EXAMPLES = {
    "device": "device: {flops: 30 GFLOP/s, memory: 16 GiB, memory_bandwidth: 10 GB/s}",
    "name": "name: host",
    "count": "count: 2",
    "level": "level: 1",
    "group": "group: 0",
    "part": "part: 0.5",
    **{key: f"{key}: {kind.example}" for key, kind in (DEVICE | LINK).items()},
    "memory_bandwidth": "memory_bandwidth: 10 GB/s",
    "cores": "cores: 2",
}


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a file describes.

    Raises:
        PlanError: there is no such file, or it says something that cannot be; every mistake with its line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"the cluster file {path} cannot be read: {error.strerror}; give an existing one, or have "
            f"`counterpoint probe --out {path}` write it"
        ) from None
    except UnicodeDecodeError:
        raise PlanError(f"the cluster file {path} is not text in UTF-8; give a YAML file") from None
    return read_cluster(text, name=str(path))


def cluster_of(given: str | Path | Cluster) -> Cluster:
    """Return a cluster that is given as it is, or as the path of its file.

    Raises:
        PlanError: it is neither, or the file cannot be read as one.
    """
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, str | Path):
        raise PlanError(f"cluster={given!r} is a {type(given).__name__}; give a Cluster, or the path of its file")
    return load_cluster(given)


def read_cluster(text: str, *, name: str = "cluster file") -> Cluster:
    r"""Return the cluster that a text describes; see ``docs/clusters.md``.

    Args:
        text: YAML, as :func:`counterpoint.world.cluster_text.write_cluster` writes it.
        name: what the text is called in messages, its path for instance.

    Raises:
        PlanError: a key is unknown, missing or given twice, a quantity has no unit or a wrong one, or cannot be; the
            message has a line for each mistake.

    Example:
        >>> text = "device: {flops: 30 GFLOP/s, memory: 8 GiB, memory_bandwidth: 10 GB/s}\n"
        >>> read_cluster(text + "link: {latency: 50 us, bandwidth: 1 Gbit/s}").link.bytes_per_s
        125000000.0
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PlanError(f"{name} is not YAML: {error}") from None
    if root is None:
        raise PlanError(f"{name} is empty; a cluster has a device and a link or levels, as `counterpoint probe` writes")
    reader = _Reader()
    cluster = reader.cluster(root)
    if reader.mistakes:
        raise PlanError("\n".join(f"{name}:{line}: {mistake}" for line, mistake in sorted(reader.mistakes)))
    return cluster


class _Reader:
    """Reads the nodes of one file; where one cannot be read, it notes why, and goes on with something that can.

    Attributes:
        mistakes: their lines and what they are.
    """

    def __init__(self) -> None:
        self.mistakes: list[tuple[int, str]] = []

    def cluster(self, root: yaml.Node) -> Cluster:
        """Return what a whole file says; what it says wrong is noted, and something usual stands for it."""
        nodes = self.keys(root, "", _KEYS, required=("device",))
        both = [nodes[key] for key in ("link", "levels") if key in nodes]
        if not both:
            self.note(root, "the file has neither link nor levels; say by what ranks are joined, with one of them")
        if len(both) > 1:
            self.note(both[0], "link stands beside levels, each of which has a link of its own; leave one of them out")
        levels = tuple(
            self.level(node, f"levels[{at}]") for at, node in enumerate(self.items(nodes.get("levels"), "levels"))
        )
        return Cluster(
            self.device(nodes["device"]) if "device" in nodes else Device(),
            self.link(nodes["link"]) if "link" in nodes else Link(),
            self.speeds(nodes.get("speeds"), levels),
            levels,
            self.crowding(nodes.get("crowding")),
            tuple(
                self.slow_link(node, f"slow_links[{at}]", levels)
                for at, node in enumerate(self.items(nodes.get("slow_links"), "slow_links"))
            ),
            self.crowding(nodes.get("memory_crowding"), "memory_crowding"),
            self.turns(nodes["turns"]) if "turns" in nodes else None,
        )

    def device(self, node: yaml.Node) -> Device:
        """Return the device; all three of its keys are wanted."""
        nodes = self.keys(node, "device", DEVICE, required=DEVICE)
        flops, memory, bandwidth = (self.quantity(nodes.get(key), f"device.{key}", DEVICE[key]) for key in DEVICE)
        return Device(flops, int(memory), bandwidth)

    def link(self, node: yaml.Node) -> Link:
        """Return the link between any two ranks that no level joins."""
        return self.link_in(self.keys(node, "link", _LINK_KEYS, required=LINK), "link")

    def link_in(self, nodes: dict[str, yaml.Node], path: str) -> Link:
        """Return the link that these keys describe; ``path`` is where they stand, for what is noted."""
        latency_s, bytes_per_s = (self.quantity(nodes.get(key), f"{path}.{key}", kind) for key, kind in LINK.items())
        return Link(latency_s, bytes_per_s, self.switch(nodes.get("copied"), f"{path}.copied"))

    def level(self, node: yaml.Node, path: str) -> Level:
        """Return one level of the network."""
        nodes = self.keys(node, path, _LEVEL_KEYS, required=("name", "count", *LINK))
        link = self.link_in(nodes, path)
        name = self.name(nodes.get("name"), f"{path}.name")
        return Level(
            name,
            self.count(nodes.get("count"), f"{path}.count"),
            link,
            self.switch(nodes.get("shared"), f"{path}.shared"),
        )

    def speeds(self, node: yaml.Node | None, levels: tuple[Level, ...]) -> tuple[float, ...]:
        """Return how many times as fast as the device each rank is; more numbers than ranks are noted."""
        speeds, places = self.numbers(node, "speeds"), math.prod(level.count for level in levels)
        if node is not None and levels and len(speeds) > places:
            self.note(node, f"speeds has {len(speeds)} numbers, and the levels have {places} ranks; give one for each")
        return speeds

    def crowding(self, node: yaml.Node | None, key: str = "crowding") -> tuple[float, ...]:
        """Return what part of its speed a rank has among 1, 2, ... that compute; more than 1 is noted."""
        parts = self.numbers(node, key)
        if node is not None and max(parts, default=0) > 1:
            self.note(node, f"{key} has {max(parts):g}; no rank is faster in a crowd than alone: give parts of 1")
        return parts

    def turns(self, node: yaml.Node) -> Turns:
        """Return how short pieces of work go on."""
        nodes = self.keys(node, "turns", _TURN_KEYS, required=("cores",))
        message_s = self.quantity(nodes["message"], "turns.message", LATENCY) if "message" in nodes else 0.0
        parts = self.crowding(nodes.get("parts"), "turns.parts")
        return Turns(self.count(nodes.get("cores"), "turns.cores"), parts, message_s)

    def slow_link(self, node: yaml.Node, path: str, levels: tuple[Level, ...]) -> tuple[int, int, float]:
        """Return a level, which of its groups, and what part of the level's speed the group's link has."""
        nodes = self.keys(node, path, _SLOW_KEYS, required=_SLOW_KEYS)
        level, group = (self.whole(nodes.get(key), f"{path}.{key}") for key in ("level", "group"))
        part = float(text) if re.fullmatch(NUMBER, text := _shown(nodes.get("part", node))) else 0.0
        if "part" in nodes and not 0 < part <= 1:
            self.note(nodes["part"], f"{path}.part is {text}; it must be more than 0 and at most 1; write it as in 0.5")
        if level >= max(len(levels), 1):
            self.note(node, f"{path} is of level {level}, and the outermost one is {max(len(levels), 1) - 1}; give one")
        num_groups = math.prod(each.count for each in levels[level:])
        if levels and group >= num_groups:
            self.note(
                node, f"{path} is group {group}, and level {level} joins {num_groups}, from 0 on; give one of them"
            )
        return level, group, part

    def keys(
        self, node: yaml.Node, path: str, known: Collection[str], *, required: Collection[str]
    ) -> dict[str, yaml.Node]:
        """Return the values below a node by their keys."""
        place = path or "the file"
        if not isinstance(node, yaml.MappingNode):
            self.note(node, f"{place} is {_shown(node)}; it must have keys with values, {', '.join(known)}")
            return {}
        found: dict[str, yaml.Node] = {}
        meant: list[str] = []
        for key_node, value in node.value:
            key = _shown(key_node)
            if key in found:
                self.note(key_node, f"{place} has {key} twice; give it once")
            elif key not in known:
                near = get_close_matches(key, known, n=1)
                meant += near
                remedy = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(known)}"
                self.note(key_node, f"{place} has a key {key}, which there is not; {remedy}")
            found[key] = value
        for key in required:
            if key not in found and key not in meant:
                self.note(node, f"{place} has no {key}; give it, as in {_EXAMPLES[key]}")
        return {key: value for key, value in found.items() if key in known}

    def items(self, node: yaml.Node | None, path: str) -> list[yaml.Node]:
        """Return the members of a list."""
        if node is None:
            return []
        if isinstance(node, yaml.SequenceNode) and node.value:
            return list(node.value)
        self.note(node, f"{path} must be a list with at least one member; give one, or leave {path} out")
        return []

    def quantity(self, node: yaml.Node | None, path: str, kind: Kind) -> float:
        """Return a quantity."""
        if node is not None:
            try:
                return parse_quantity(_shown(node), kind)
            except PlanError as wrong:
                self.note(node, f"{path} is {_shown(node)}; {wrong}")
        return 1.0

    def numbers(self, node: yaml.Node | None, path: str) -> tuple[float, ...]:
        """Return numbers above 0."""
        found = []
        for at, item in enumerate(self.items(node, path)):
            text = _shown(item)
            number = float(text) if re.fullmatch(NUMBER, text) else 0.0
            found.append(number)
            if not 0 < number < math.inf:
                self.note(item, f"{path}[{at}] is {text}; it must be a number above 0; write it as in 0.5")
        return tuple(found)

    def count(self, node: yaml.Node | None, path: str) -> int:
        """Return a whole number above 0."""
        text = "1" if node is None else _shown(node)
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
            return int(text)
        self.note(node, f"{path} is {text}; it must be a whole number from 1 on, of how many things the level joins")
        return 1

    def whole(self, node: yaml.Node | None, path: str) -> int:
        """Return a whole number from 0 on."""
        text = "0" if node is None else _shown(node)
        if re.fullmatch(r"[0-9]{1,9}", text):
            return int(text)
        self.note(node, f"{path} is {text}; it must be a whole number from 0 on; write it as in 0")
        return 0

    def switch(self, node: yaml.Node | None, path: str) -> bool:
        """Return whether something is so that may be."""
        text = "false" if node is None else _shown(node)
        if text not in _SWITCHES:
            self.note(node, f"{path} is {text}; it must be {' or '.join(_SWITCHES)}")
        return _SWITCHES.get(text, False)

    def name(self, node: yaml.Node | None, path: str) -> str:
        """Return a name."""
        if node is not None and (not isinstance(node, yaml.ScalarNode) or not node.value):
            self.note(node, f"{path} is {_shown(node)}; it must be a word, as in {_EXAMPLES['name']}")
        return "" if node is None else _shown(node)

    def note(self, node: yaml.Node | None, mistake: str) -> None:
        """Note what is wrong at a node."""
        self.mistakes.append((1 if node is None else node.start_mark.line + 1, mistake))


def _shown(node: yaml.Node) -> str:
    """Return a value as it stands in the file; where it is none, what it is."""
    match node:
        case yaml.ScalarNode(value=value):
            return str(value) or "empty"
        case yaml.SequenceNode():
            return "a list"
        case _:
            return "a group of keys"
