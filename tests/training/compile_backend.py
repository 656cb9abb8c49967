"""Backends of torch.compile, by name.

``counting`` counts graphs and their calls, ``writing`` writes of gradients, and ``static`` notes what a CUDA graph would
depend on: shapes, and addresses of weights.
"""

from dataclasses import dataclass, field

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
    num_other_shapes: int = 0  # calls with other shapes than those of the compilation
    addresses: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # of each static input of each graph


COUNTER = GraphCounter()


def reset_counter():
    """Drop all graphs; return the counter from 0 on."""
    torch._dynamo.reset()
    COUNTER.num_graphs = COUNTER.num_calls = COUNTER.num_writes = COUNTER.num_other_shapes = 0
    COUNTER.addresses.clear()
    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(counting, name="counting")
        writing = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph),
            bw_compiler=count_writes,
            partition_fn=min_cut_rematerialization_partition,  # inductor's, which merges equal expressions
        )
        torch._dynamo.register_backend(writing, name="writing")
        static = aot_autograd(fw_compiler=note_inputs, bw_compiler=lambda graph, _: make_boxed_func(graph))
        torch._dynamo.register_backend(static, name="static")
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


def describe(args):
    """Return what must be the same in every call of a CUDA graph; symbols for sizes that are none."""
    return [(tuple(arg.shape), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]


def note_inputs(graph, examples):
    """Return the graph of a forward as it is, and note with which shapes and static inputs it is called."""
    number, expected = COUNTER.num_graphs, describe(examples)
    metadata = torch._guards.TracingContext.get().fw_metadata
    assert metadata is not None
    static = metadata.static_input_indices
    COUNTER.num_graphs += 1

    def call(*args):
        COUNTER.num_calls += 1
        COUNTER.num_other_shapes += describe(args) != expected
        for index in static:
            COUNTER.addresses.setdefault((number, index), set()).add(args[index].data_ptr())
        return graph(*args)

    return make_boxed_func(call)
