"""Masks that a compiled backward computes from outputs of the forward, which torch's partitioner would store.

A segment may end with a ReLU. Its backward needs the mask ``output <= 0``, and the partitioner stores the mask because
it has fewer bytes than the output. But the output is kept anyway: it is the next segment's input. Storing a mask costs
a processor more than computing it, because inductor writes booleans element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch.fx.graph import Graph
    from torch.fx.node import Node

aten = torch.ops.aten
COMPARISONS = {aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar}
SAME_VALUES = {aten.alias.default, aten.detach.default}


def inductor_options(mode: str | None) -> dict[str, Any]:
    """Return the options of inductor for a mode of ``torch.compile``, and the pass that does not store these masks."""
    from torch import _inductor  # two seconds, if nothing is compiled

    options: dict[str, Any] = {} if mode in {None, "default"} else dict(_inductor.list_mode_options(mode))
    return {**options, "joint_custom_post_pass": mask_pass()}


@cache
def mask_pass() -> Any:  # noqa: ANN401 - its base is loaded with inductor
    """Return the pass over graphs of a forward and its backward, as inductor calls and caches it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class MaskPass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            recompute_masks(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return MaskPass()


def recompute_masks(graph: Graph) -> None:
    """Let the backward compare outputs of the forward with numbers, instead of reading a stored result.

    Args:
        graph: a forward and its backward.
    """
    for value in find_forward_outputs(graph):
        for mask in find_comparisons(value):
            mask.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def find_forward_outputs(graph: Graph) -> Iterator[Node]:
    """Yield what the graph computes from its primals, without its tangents, and returns."""
    (output,) = graph.find_nodes(op="output")
    tangents = {node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name}
    of_backward = set(tangents)
    for node in graph.nodes:
        if any(source in of_backward for source in node.all_input_nodes):
            of_backward.add(node)
    yield from (node for node in output.all_input_nodes if node.op == "call_function" and node not in of_backward)


def find_comparisons(value: Node) -> Iterator[Node]:
    """Yield the comparisons of a value with a number."""
    for user in value.users:
        if user.target in COMPARISONS:
            yield user
        elif user.target in SAME_VALUES:
            yield from find_comparisons(user)
