"""Layers as they were measured, in the text that PipeDream's profiler writes and its users keep.

Source: the profiler of PipeDream (github.com/msr-fiddle/pipedream, ``graph.txt``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from counterpoint.errors import PlanError

MS_PER_S = 1e3
FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
NODE = re.compile(
    rf"(\S+) -- (.*) -- {', '.join(f'{figure}=([^,]*)' for figure in FIGURES[:-1])}, {FIGURES[-1]}=([^, ]*)"
    r"(?: -- stage_id=\d+)?"
)
NO_WORK = "Input"
"""How the text of a layer begins that stands for loading data; what it takes is no work of a stage."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer takes for one minibatch.

    Args:
        name: unique in its profile, without spaces.
        text: what it is, as its users read it.
        forward_s: seconds forward.
        backward_s: seconds backward.
        activation_bytes: what it hands on.
        weight_bytes: its parameters.
    """

    name: str
    text: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    weight_bytes: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Layers and who reads whom.

    Args:
        layers: in any order.
        edges: names of a layer and of one that reads it.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]

    def without_inputs(self) -> Profile:
        """Return the profile without layers that only load data, which no plan can place."""
        gone = {layer.name for layer in self.layers if layer.text.startswith(NO_WORK)}
        return Profile(
            tuple(layer for layer in self.layers if layer.name not in gone),
            tuple(edge for edge in self.edges if not gone.intersection(edge)),
        )


def chain_profile(layers: Iterable[Layer]) -> Profile:
    """Return layers of which each reads the one before it."""
    row = tuple(layers)
    return Profile(row, tuple((one.name, other.name) for one, other in pairwise(row)))


def read_profile(text: str) -> Profile:
    """Return the profile that a ``graph.txt`` holds.

    Raises:
        PlanError: a line that cannot be read, by its number, or an edge of a layer that is not there.

    Example:
        >>> times = "forward_compute_time=1.0, backward_compute_time=2.0"
        >>> profile = read_profile(f"node1 -- Linear -- {times}, activation_size=[4.0; 4.0], parameter_size=16.0")
        >>> profile.layers[0].seconds, profile.layers[0].activation_bytes
        (0.003, 8.0)
    """
    layers: dict[str, Layer] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("\t"):
            edges.append(_edge(line, number))
        elif line.strip():
            layer = _layer(line.strip(), number)
            if layer.name in layers:
                raise PlanError(f"line {number} names {layer.name!r} again; every layer has a name of its own")
            layers[layer.name] = layer
    for edge in edges:
        for name in edge:
            if name not in layers:
                raise PlanError(f"the edge {edge[0]} -- {edge[1]} names {name!r}, which no line describes")
    return Profile(tuple(layers.values()), tuple(edges))


def write_profile(profile: Profile) -> str:
    """Return the text of a profile, which reads back as the same one to a thousandth of a millisecond and of a byte."""
    lines = [
        f"{layer.name} -- {layer.text} -- forward_compute_time={layer.forward_s * MS_PER_S:.3f}, "
        f"backward_compute_time={layer.backward_s * MS_PER_S:.3f}, activation_size={layer.activation_bytes:.3f}, "
        f"parameter_size={layer.weight_bytes:.3f}"
        for layer in profile.layers
    ]
    return "\n".join([*lines, *(f"\t{one} -- {other}" for one, other in profile.edges)]) + "\n"


def _edge(line: str, number: int) -> tuple[str, str]:
    names = line.strip().split(" -- ")
    if len(names) != 2:
        raise PlanError(f"line {number} is no edge: {line.strip()!r}; it reads 'layer -- reader' behind a tab")
    return names[0], names[1]


def _layer(line: str, number: int) -> Layer:
    found = NODE.fullmatch(line)
    if found is None:
        raise PlanError(f"line {number} is no layer: {line!r}; it reads 'name -- text -- {'=, '.join(FIGURES)}='")
    name, text, *figures = found.groups()
    try:
        forward_ms, backward_ms, activation, weight = map(_number, figures)
    except ValueError as error:
        raise PlanError(f"line {number}, {name}: {error}") from None
    return Layer(name, text, forward_ms / MS_PER_S, backward_ms / MS_PER_S, activation, weight)


def _number(text: str) -> float:
    """Return a figure, or the sum of several in brackets."""
    value = sum(map(float, text.strip("[]").split("; "))) if text.startswith("[") else float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is no size and no time; both are finite and at least 0")
    return value
