"""Models as profiles and profiles as models, so that what is cut by its figures is what is compiled and simulated.

A model that was timed as PipeDream's optimizer reads it: layers with their figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param
from counterpoint.planner.pipeline.layer_graph import GraphCuts, GraphNode, LayerGraph, chain_graph
from counterpoint.planner.plan_simulation import build_costs
from counterpoint.program.instruction import Backward, Forward
from counterpoint.world.cluster import Cluster

ITEM_BYTES = 4
MIN_MICROBATCHES = 2
"""A pipeline has so many microbatches at least, so that none is all that a step has."""


def linearize(states: GraphCuts, cuts: Sequence[int]) -> LayerGraph:
    """Return the layers in an order in which each comes behind those that it reads, and cuts are between neighbours.

    Args:
        states: of a profile.
        cuts: states of it, each inside the next, the whole one last.
    """
    layers, edges = states.graph.nodes, states.graph.edges
    needs: defaultdict[str, set[str]] = defaultdict(set)
    for one, other in edges:
        needs[other].add(one)
    row: dict[str, GraphNode] = {}
    for stop in cuts:
        waiting = [
            layer for bit, layer in enumerate(layers) if states.layer_sets[stop] >> bit & 1 and layer.name not in row
        ]
        while waiting:
            ready = next(layer for layer in waiting if needs[layer.name] <= row.keys())
            row[ready.name] = ready
            waiting.remove(ready)
    return LayerGraph(tuple(row.values()), edges)


def prefix_cuts(graph: LayerGraph) -> GraphCuts:
    """Return the cuts between neighbours of a profile, whose layers stand in the order in which they run."""
    return GraphCuts(graph, tuple((1 << count) - 1 for count in range(len(graph.nodes) + 1)))


def model_from_graph(graph: LayerGraph, cluster: Cluster) -> ModelSpec:
    """Return a model of one block for each layer, in the order of the profile; a minibatch of it is one sample.

    It takes the seconds of the profile on the devices of the cluster.
    """
    at = {layer.name: place for place, layer in enumerate(graph.nodes)}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for one, other in graph.edges:
        readers[at[one]].append(at[other])
    read = {other for found in readers.values() for other in found}
    inputs = ValueSpec(INPUT, tuple(place for place in range(len(at)) if place not in read))
    made = (
        ValueSpec(place, tuple(sorted(found)), round(graph.nodes[place].activation_bytes))
        for place, found in sorted(readers.items())
    )
    unit_s = _unit_cost_s(cluster)
    blocks = tuple(Block((_layer_spec(layer, unit_s),), place) for place, layer in enumerate(graph.nodes))
    params = tuple(
        Param(_weight_name(layer), (round(layer.weight_bytes / ITEM_BYTES),), ITEM_BYTES)
        for layer in graph.nodes
        if layer.weight_bytes
    )
    return ModelSpec(blocks, params, (inputs, *made))


def _weight_name(layer: GraphNode) -> str:
    return f"{layer.name}.weight"


def _layer_spec(layer: GraphNode, unit_s: float) -> LayerSpec:
    params = (_weight_name(layer),) if layer.weight_bytes else ()
    return LayerSpec(layer.name, params, layer.seconds / unit_s, round(layer.activation_bytes))


def _unit_cost_s(cluster: Cluster) -> float:
    """Return the seconds that a block of cost 1 takes for a sample, forward and backward."""
    one = ModelSpec((Block((LayerSpec("one", (), cost=1.0),), 0),), ())
    return sum(_block_times(one, cluster, samples=1)[0])


def graph_from_model(
    model: ModelSpec, cluster: Cluster, *, samples: int, profile: ModelProfile | None = None
) -> LayerGraph:
    """Return what the blocks of a model take for one microbatch of so many samples, in their order.

    Args:
        model: its blocks are the layers.
        cluster: on the devices of which they run.
        samples: of a microbatch.
        timing: of the model's own pieces; None where their work is only counted.
    """
    spent = _block_times(model, cluster, samples=samples, profile=profile)
    strands = model.edges
    layers = tuple(
        GraphNode(
            name=f"block{at}",
            description=block.name,
            forward_s=spent[at][0],
            backward_s=spent[at][1],
            activation_bytes=float(samples * model.outgoing_bytes(at)),
            weight_bytes=float(sum(model.unit_bytes(unit) for unit in model.units if unit[0] == at)),
        )
        for at, block in enumerate(model.blocks)
    )
    edges = dict.fromkeys((strand.producer, reader) for strand in strands for reader in strand.consumers)
    return LayerGraph(layers, tuple((f"block{one}", f"block{other}") for one, other in edges))


def _block_times(
    model: ModelSpec, cluster: Cluster, *, samples: int, profile: ModelProfile | None = None
) -> list[tuple[float, float]]:
    """Return the seconds of each block forward and backward on a rank that is as fast as the device."""
    (costs,) = build_costs(
        (cluster,), model, samples=samples, global_num_microbatches=MIN_MICROBATCHES, profile=profile
    )
    whole = Fraction(1)
    return [
        (costs.compute_s(Forward(block, 0), whole), costs.compute_s(Backward(block, 0), whole))
        for block in range(model.num_blocks)
    ]


def merge_blocks(model: ModelSpec, counts: Sequence[int]) -> ModelSpec:
    """Return a model with runs of so many blocks each as one block.

    A stage runs its blocks one after the other, so that a program with one block for each stage takes as long, and is
    shorter; only what many small messages take to begin is counted once.
    """
    stops = accumulate(counts, initial=0)
    blocks = [model.blocks[start:stop] for start, stop in pairwise(stops)]
    return replace(
        model,
        blocks=tuple(Block(tuple(piece for one in run for piece in one.layers), run[0].first_layer) for run in blocks),
        heads=(),
    )


def graph_from_profile(profile: ModelProfile, samples: int) -> LayerGraph:
    """Return the pieces of a timed model as layers, each of which reads the one before it.

    Args:
        timing: of the model.
        samples: of the minibatch that the figures are for.

    Example:
        >>> from counterpoint.model.model_profile import Known, Machine, PieceTime, Point
        >>> took = PieceTime(1e-3, 2e-3, 1e-3, 1e-3, output_bytes=8.0)
        >>> timing = Timing(
        ...     "Linear", (Known("0", 16, 8.0, 4),), (("0.weight", 16),), Machine("a core"), (Point(2, (took,), took),)
        ... )
        >>> profile_of(timing, 2).layers[0].activation_bytes
        8.0
    """
    pieces = zip(profile.layers, profile.at_microbatch_size(samples).layers, strict=True)
    return chain_graph(
        GraphNode(f"node{index}", known.name, took.forward_s, took.backward_s, took.output_bytes, known.weight_bytes)
        for index, (known, took) in enumerate(pieces, start=1)
    )
