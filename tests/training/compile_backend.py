"""A backend of torch.compile, ``compile="segments(backend=counting)"``, that counts graphs and their calls."""

from dataclasses import dataclass

import torch._dynamo


@dataclass
class GraphCounter:
    """How many graphs there are, and how often they were called."""

    num_graphs: int = 0
    num_calls: int = 0


COUNTER = GraphCounter()


def reset_counter():
    """Drop all graphs; return the counter from 0 on."""
    torch._dynamo.reset()
    COUNTER.num_graphs = COUNTER.num_calls = 0
    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(counting, name="counting")
    return COUNTER


def counting(graph, _):
    """Return a graph as it is, and count it."""
    COUNTER.num_graphs += 1

    def call(*args):
        COUNTER.num_calls += 1
        return graph(*args)

    return call
