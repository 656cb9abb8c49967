"""Layer profiles measured by PipeDream's authors, for each row of their tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from counterpoint.planner.pipeline.layer_graph import GraphNode, LayerGraph, parse_graph

PROFILES = Path(__file__).parents[2] / "tests" / "planner" / "pipeline" / "profiles"
FILES = {"VGG-16": "vgg16", "ResNet-50": "resnet50", "AlexNet": "alexnet", "GNMT-8": "gnmt", "GNMT-16": "gnmt_large"}
SOSP = "Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019"
ARXIV = "Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, arXiv 1806.03377, 2018"
INPUTS = (
    "Layers as measured and published by the authors (`profiler/*/profiles/*/graph.txt` of msr-fiddle/pipedream), "
    "seconds and activations scaled to the minibatch of each row. The measured device is not published."
)
GBIT = 1e9 / 8
PCIE, NVLINK = 15.75e9, 150e9


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the published tables.

    Args:
        model: name of its profile.
        cluster: name in the papers.
        servers: their number.
        devices: per server.
        inside: bytes/s between devices of a server: PCIe 3.0 x16, or NVLink of a V100, by their data sheets.
        between: bytes/s between servers.
        scale: minibatch size per device, relative to that of the profile.
    """

    model: str
    cluster: str
    servers: int
    devices: int
    inside: float
    between: float
    scale: float = 1.0

    @property
    def labels(self) -> tuple[str, str]:
        """The model and the cluster."""
        return self.model, f"{self.servers}x{self.devices} ({self.cluster})"

    @property
    def num_devices(self) -> int:
        """The devices of all servers."""
        return self.servers * self.devices

    @property
    def slowest(self) -> float:
        """The bytes/s of the slowest link."""
        return self.between if self.servers > 1 else self.inside


A, B = {"inside": PCIE, "between": 10 * GBIT}, {"inside": NVLINK, "between": 25 * GBIT}
VGG_A, VGG_B = Setting("VGG-16", "A", 4, 4, **A, scale=0.5), Setting("VGG-16", "B", 2, 8, **B, scale=0.5)
VGG_OLD = Setting("VGG-16", "B of 2018", 8, 1, PCIE, 10 * GBIT, scale=0.25)
ALEX_A, ALEX_B = Setting("AlexNet", "A", 4, 4, **A), Setting("AlexNet", "B", 2, 8, **B)


@cache
def load_profile(setting: Setting) -> LayerGraph:
    """Return the layers of a model for one minibatch of a setting, without input layers."""
    profile = parse_graph((PROFILES / f"{FILES[setting.model]}.txt").read_text(encoding="utf-8")).without_inputs()
    return LayerGraph(tuple(scale_layer(layer, setting.scale) for layer in profile.nodes), profile.edges)


def scale_layer(layer: GraphNode, scale: float) -> GraphNode:
    """Return a layer's profile for a fraction of the samples."""
    return replace(
        layer,
        forward_s=layer.forward_s * scale,
        backward_s=layer.backward_s * scale,
        activation_bytes=layer.activation_bytes * scale,
    )


def topological_order(profile: LayerGraph) -> list[GraphNode]:
    """Return the layers with each after all of its inputs."""
    left, done = list(profile.nodes), list[GraphNode]()
    while left:
        names = {layer.name for layer in left}
        first = next(one for one in left if not any(to == one.name and by in names for by, to in profile.edges))
        left.remove(first)
        done.append(first)
    return done


def weighted_blocks(setting: Setting) -> list[GraphNode]:
    """Return the layers with weights in order, each with the layers after it."""
    blocks: list[GraphNode] = []
    for layer in topological_order(load_profile(setting)):
        if layer.weight_bytes or not blocks:
            blocks.append(layer)
        elif layer.seconds:
            forward_s, backward_s = blocks[-1].forward_s + layer.forward_s, blocks[-1].backward_s + layer.backward_s
            handed = layer.activation_bytes
            blocks[-1] = replace(blocks[-1], forward_s=forward_s, backward_s=backward_s, activation_bytes=handed)
    return blocks
