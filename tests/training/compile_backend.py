"""Backends of torch.compile, by name: ``counting`` counts graphs and their calls, ``writing`` writes of gradients."""

from dataclasses import dataclass

import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


@dataclass
class GraphCounter:
    """How many graphs there are, how often they were called, and how many weight gradients their calls wrote."""

    num_graphs: int = 0
    num_calls: int = 0
    num_writes: int = 0


COUNTER = GraphCounter()


def reset_counter():
    """Drop all graphs; return the counter from 0 on."""
    torch._dynamo.reset()
    COUNTER.num_graphs = COUNTER.num_calls = COUNTER.num_writes = 0
    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(counting, name="counting")
        writing = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph),
            bw_compiler=count_writes,
            partition_fn=min_cut_rematerialization_partition,  # inductor's, which merges equal expressions
        )
        torch._dynamo.register_backend(writing, name="writing")
    return COUNTER


def counting(graph, _):
    """Return a graph as it is, and count it."""
    COUNTER.num_graphs += 1

    def call(*args):
        COUNTER.num_calls += 1
        return graph(*args)

    return call


def count_writes(graph, _):
    """Return the graph of a backward as it is, and count the gradients that its calls write."""
    num_writes = sum("submit_weight_grad" in str(node.target) for node in graph.graph.nodes)

    def call(*args):
        COUNTER.num_writes += num_writes
        return graph(*args)

    return make_boxed_func(call)
