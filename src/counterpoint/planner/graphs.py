"""Models as profiles and profiles as models, so that what is cut by its figures is what is compiled and simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

from counterpoint.model.spec import Block, ModelSpec, Param, Piece
from counterpoint.model.timing import Timing
from counterpoint.model.values import INPUT, Made
from counterpoint.planner.playing import costs_on
from counterpoint.planner.profile import Layer, Profile
from counterpoint.planner.states import States
from counterpoint.program.instruction import Backward, Forward
from counterpoint.world.cluster import Cluster

ITEM_BYTES = 4
SEVERAL = 2
"""A pipeline has so many microbatches at least, so that none is all that a step has."""


def linear(states: States, cuts: Sequence[int]) -> Profile:
    """Return the layers in an order in which each comes behind those that it reads, and cuts are between neighbours.

    Args:
        states: of a profile.
        cuts: states of it, each inside the next, the whole one last.
    """
    layers, edges = states.profile.layers, states.profile.edges
    needs: defaultdict[str, set[str]] = defaultdict(set)
    for one, other in edges:
        needs[other].add(one)
    row: dict[str, Layer] = {}
    for stop in cuts:
        waiting = [layer for bit, layer in enumerate(layers) if states.held[stop] >> bit & 1 and layer.name not in row]
        while waiting:
            ready = next(layer for layer in waiting if needs[layer.name] <= row.keys())
            row[ready.name] = ready
            waiting.remove(ready)
    return Profile(tuple(row.values()), edges)


def prefixes(profile: Profile) -> States:
    """Return the cuts between neighbours of a profile, whose layers stand in the order in which they run."""
    return States(profile, tuple((1 << count) - 1 for count in range(len(profile.layers) + 1)))


def model_of(profile: Profile, cluster: Cluster) -> ModelSpec:
    """Return a model of one block for each layer, in the order of the profile; a minibatch of it is one sample.

    It takes the seconds of the profile on the devices of the cluster.
    """
    at = {layer.name: place for place, layer in enumerate(profile.layers)}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for one, other in profile.edges:
        readers[at[one]].append(at[other])
    read = {other for found in readers.values() for other in found}
    inputs = Made(INPUT, tuple(place for place in range(len(at)) if place not in read))
    made = (
        Made(place, tuple(sorted(found)), round(profile.layers[place].activation_bytes))
        for place, found in sorted(readers.items())
    )
    unit_s = _unit_s(cluster)
    blocks = tuple(Block((_piece(layer, unit_s),), place) for place, layer in enumerate(profile.layers))
    params = tuple(
        Param(_weight(layer), (round(layer.weight_bytes / ITEM_BYTES),), ITEM_BYTES)
        for layer in profile.layers
        if layer.weight_bytes
    )
    return ModelSpec(blocks, params, (inputs, *made))


def _weight(layer: Layer) -> str:
    return f"{layer.name}.weight"


def _piece(layer: Layer, unit_s: float) -> Piece:
    params = (_weight(layer),) if layer.weight_bytes else ()
    return Piece(layer.name, params, layer.seconds / unit_s, round(layer.activation_bytes))


def _unit_s(cluster: Cluster) -> float:
    """Return the seconds that a block of cost 1 takes for a sample, forward and backward."""
    one = ModelSpec((Block((Piece("one", (), cost=1.0),), 0),), ())
    return sum(_computed(one, cluster, samples=1)[0])


def profile_of(model: ModelSpec, cluster: Cluster, *, samples: int, timing: Timing | None = None) -> Profile:
    """Return what the blocks of a model take for one microbatch of so many samples, in their order.

    Args:
        model: its blocks are the layers.
        cluster: on the devices of which they run.
        samples: of a microbatch.
        timing: of the model's own pieces; None where their work is only counted.
    """
    spent = _computed(model, cluster, samples=samples, timing=timing)
    strands = model.strands
    layers = tuple(
        Layer(
            name=f"block{at}",
            text=block.name,
            forward_s=spent[at][0],
            backward_s=spent[at][1],
            activation_bytes=float(samples * model.made_bytes(at)),
            weight_bytes=float(sum(model.unit_bytes(unit) for unit in model.units if unit[0] == at)),
        )
        for at, block in enumerate(model.blocks)
    )
    edges = dict.fromkeys((strand.maker, reader) for strand in strands for reader in strand.readers)
    return Profile(layers, tuple((f"block{one}", f"block{other}") for one, other in edges))


def _computed(
    model: ModelSpec, cluster: Cluster, *, samples: int, timing: Timing | None = None
) -> list[tuple[float, float]]:
    """Return the seconds of each block forward and backward on a rank that is as fast as the device."""
    (costs,) = costs_on((cluster,), model, samples=samples, num_micros=SEVERAL, timing=timing)
    whole = Fraction(1)
    return [
        (costs.compute_s(Forward(block, 0), whole), costs.compute_s(Backward(block, 0), whole))
        for block in range(model.num_blocks)
    ]


def joined(model: ModelSpec, counts: Sequence[int]) -> ModelSpec:
    """Return a model with runs of so many blocks each as one block.

    A stage runs its blocks one after the other, so that a program with one block for each stage takes as long, and is
    shorter; only what many small messages take to begin is counted once.
    """
    stops = accumulate(counts, initial=0)
    blocks = [model.blocks[start:stop] for start, stop in pairwise(stops)]
    return replace(
        model,
        blocks=tuple(Block(tuple(piece for one in run for piece in one.pieces), run[0].first_piece) for run in blocks),
        heads=(),
    )
