"""Convert layer graphs to models and back, so that partitions of graphs can be compiled and simulated."""

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
"""Minimum number of microbatches of a pipeline, so that none is the only one of its step."""


def linearize(cuts: GraphCuts, stops: Sequence[int]) -> LayerGraph:
    """Return the graph with its layers in an order in which each follows its inputs, and cuts are between neighbours.

    Args:
        cuts: of a graph.
        stops: indices of cuts, each a subset of the next, the whole graph last.
    """
    layers, edges = cuts.graph.nodes, cuts.graph.edges
    inputs_of: defaultdict[str, set[str]] = defaultdict(set)
    for producer, reader in edges:
        inputs_of[reader].add(producer)
    ordered: dict[str, GraphNode] = {}
    for stop in stops:
        members = cuts.layer_sets[stop]
        waiting = [layer for bit, layer in enumerate(layers) if members >> bit & 1 and layer.name not in ordered]
        while waiting:
            ready = next(layer for layer in waiting if inputs_of[layer.name] <= ordered.keys())
            ordered[ready.name] = ready
            waiting.remove(ready)
    return LayerGraph(tuple(ordered.values()), edges)


def prefix_cuts(graph: LayerGraph) -> GraphCuts:
    """Return the cuts between adjacent layers of a graph whose layers are in execution order."""
    return GraphCuts(graph, tuple((1 << count) - 1 for count in range(len(graph.nodes) + 1)))


def model_from_graph(graph: LayerGraph, cluster: Cluster) -> ModelSpec:
    """Return a model of one block for each layer, in the order of the graph; a minibatch of it is one sample.

    It takes the seconds of the graph on the devices of the cluster.
    """
    index = {layer.name: position for position, layer in enumerate(graph.nodes)}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for maker, reader in graph.edges:
        readers[index[maker]].append(index[reader])
    read_positions = {reader for positions in readers.values() for reader in positions}
    inputs = ValueSpec(INPUT, tuple(position for position in range(len(index)) if position not in read_positions))
    outputs = (
        ValueSpec(position, tuple(sorted(positions)), round(graph.nodes[position].activation_bytes))
        for position, positions in sorted(readers.items())
    )
    unit_s = _unit_cost_s(cluster)
    blocks = tuple(Block((_layer_spec(layer, unit_s),), position) for position, layer in enumerate(graph.nodes))
    params = tuple(
        Param(_weight_name(layer), (round(layer.weight_bytes / ITEM_BYTES),), ITEM_BYTES)
        for layer in graph.nodes
        if layer.weight_bytes
    )
    return ModelSpec(blocks, params, (inputs, *outputs))


def _weight_name(layer: GraphNode) -> str:
    return f"{layer.name}.weight"


def _layer_spec(layer: GraphNode, unit_s: float) -> LayerSpec:
    params = (_weight_name(layer),) if layer.weight_bytes else ()
    return LayerSpec(layer.name, params, layer.seconds / unit_s, round(layer.activation_bytes))


def _unit_cost_s(cluster: Cluster) -> float:
    """Return the seconds that a block of cost 1 takes for a sample, forward and backward."""
    unit_model = ModelSpec((Block((LayerSpec("one", (), cost=1.0),), 0),), ())
    return sum(_block_times(unit_model, cluster, samples=1)[0])


def graph_from_model(
    model: ModelSpec, cluster: Cluster, *, samples: int, profile: ModelProfile | None = None
) -> LayerGraph:
    """Return the blocks of a model as a layer graph, with times for one microbatch.

    Args:
        model: its blocks are the layers.
        cluster: on whose devices they run.
        samples: of a microbatch.
        profile: measured times of the model's layers; None to use operation counts.
    """
    times = _block_times(model, cluster, samples=samples, profile=profile)
    layers = tuple(
        GraphNode(
            name=f"block{index}",
            description=block.name,
            forward_s=times[index][0],
            backward_s=times[index][1],
            activation_bytes=float(samples * model.outgoing_bytes(index)),
            weight_bytes=float(sum(model.unit_bytes(unit) for unit in model.units if unit[0] == index)),
        )
        for index, block in enumerate(model.blocks)
    )
    edges = dict.fromkeys((edge.producer, reader) for edge in model.edges for reader in edge.consumers)
    return LayerGraph(layers, tuple((f"block{producer}", f"block{reader}") for producer, reader in edges))


def _block_times(
    model: ModelSpec, cluster: Cluster, *, samples: int, profile: ModelProfile | None = None
) -> list[tuple[float, float]]:
    """Return the seconds of each block forward and backward on a rank at device speed."""
    (costs,) = build_costs(
        (cluster,), model, samples=samples, global_num_microbatches=MIN_MICROBATCHES, profile=profile
    )
    all_of_it = Fraction(1)
    return [
        (costs.compute_s(Forward(block, 0), all_of_it), costs.compute_s(Backward(block, 0), all_of_it))
        for block in range(model.num_blocks)
    ]


def merge_blocks(model: ModelSpec, counts: Sequence[int]) -> ModelSpec:
    """Return a model in which each run of the given numbers of blocks is one block.

    A stage runs its blocks one after the other, so that a program with one block per stage takes as long, and is
    shorter; only the latency of many small messages is counted once.
    """
    stops = accumulate(counts, initial=0)
    blocks = [model.blocks[start:stop] for start, stop in pairwise(stops)]
    return replace(
        model,
        blocks=tuple(
            Block(tuple(layer for block in blocks_of_run for layer in block.layers), blocks_of_run[0].first_layer)
            for blocks_of_run in blocks
        ),
        chunk_starts=(),
    )


def graph_from_profile(profile: ModelProfile, samples: int) -> LayerGraph:
    """Return the layers of a profiled model as a layer graph, in which each reads the one before it.

    Args:
        profile: of the model.
        samples: of the minibatch that the times are for.

    Example:
        >>> from counterpoint.model.model_profile import BatchSizeProfile, LayerKey, LayerProfile, ProfiledOn
        >>> times = LayerProfile(1e-3, 2e-3, 1e-3, 1e-3, output_bytes=8.0)
        >>> layer, params = LayerKey("0", 16, 8.0, 4), (("0.weight", 16),)
        >>> profile = ModelProfile(
        ...     "Linear", (layer,), params, ProfiledOn("a core"), (BatchSizeProfile(2, (times,), times),)
        ... )
        >>> graph_from_profile(profile, 2).nodes[0].activation_bytes
        8.0
    """
    layers = zip(profile.layers, profile.at_microbatch_size(samples).layers, strict=True)
    return chain_graph(
        GraphNode(f"node{index}", key.name, times.forward_s, times.backward_s, times.output_bytes, key.weight_bytes)
        for index, (key, times) in enumerate(layers, start=1)
    )
